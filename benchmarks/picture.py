"""The figures as bars, each beside its peer; what microVMs cost by what was changed, as lines."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from benchmarks import microvm
from benchmarks.measure import Figure, Report

OURS, PEER = "#2f6f8f", "#b8b2a7"
_COSTS = {  # a figure's name: the words above its panel
    "snapshot, first": "snapshot",
    "pause, first": "pause",
    "resume": "resume",
    f"fork x {microvm.CHILDREN}": f"fork x {microvm.CHILDREN}",
}


def draw(report: Report, path: Path, load: str) -> None:
    """Write a PNG: one row of two bars for each figure that has a peer."""
    mpl.use("Agg")
    from matplotlib import pyplot

    compared = [(figure, peer) for figure in report.figures if (peer := report.find(figure.peer)) is not None]
    if not compared:
        return
    figure, axes = pyplot.subplots(len(compared), 1, figsize=(9, 1.1 * len(compared) + 0.6), squeeze=False)
    for axis, (ours, peer) in zip(axes[:, 0], compared, strict=True):
        axis.barh([peer.name, ours.name], [peer.p50, ours.p50], color=[PEER, OURS])
        for row, one in enumerate((peer, ours)):
            axis.text(one.p50, row, f" {one.p50:.1f} {one.unit}{_verdict(one)}", va="center", fontsize=8)
        axis.margins(x=0.2)
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.suptitle(f"Sandyard (blue) beside its peers (grey), same host, same run: medians\nload {load}", fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_costs(report: Report, path: Path, load: str) -> bool:
    """Write an SVG: a panel for each of what microVMs do, with a line for each size of their memory. False, and
    nothing, where the report has no such figures."""
    mpl.use("Agg")
    from matplotlib import pyplot

    lines = {(what, size): _by_change(report, what, size) for what in _COSTS for size in microvm.GUEST_MB}
    if not any(lines.values()):
        return False
    figure, axes = pyplot.subplots(1, len(_COSTS), figsize=(10, 2.9), sharey=True)
    small, big = microvm.GUEST_MB
    for axis, (what, title) in zip(axes, _COSTS.items(), strict=True):
        # The big one's line lies under the small one's: where both are seen as one, the size made no difference.
        for size, look in ((big, {"color": PEER, "linewidth": 5.0}), (small, {"color": OURS, "linewidth": 1.8})):
            points = lines[what, size]
            axis.plot(list(points), list(points.values()), marker="o", label=f"guest of {size} MB", **look)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(microvm.DIRTY_MB)
        axis.set_xlabel("MB changed", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("ms, median", fontsize=8)
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"MicroVMs: cost by what was changed, and by the size of the memory (load {load})", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _by_change(report: Report, what: str, size: int) -> dict[int, float]:
    found = {changed: report.find(microvm.name_of(what, size, changed)) for changed in microvm.DIRTY_MB}
    return {changed: figure.p50 for changed, figure in found.items() if figure is not None}


def _verdict(figure: Figure) -> str:
    more = ", more is better" if figure.higher_is_better else ""
    if figure.budget is None:
        return more
    return f"{more}   (budget {figure.budget:g}, {'kept' if figure.within_budget else 'missed'})"
