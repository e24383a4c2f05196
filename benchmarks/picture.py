"""The figures as bars, each beside its peer."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from benchmarks.measure import Figure, Report

OURS, PEER = "#2f6f8f", "#b8b2a7"


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


def _verdict(figure: Figure) -> str:
    more = ", more is better" if figure.higher_is_better else ""
    if figure.budget is None:
        return more
    return f"{more}   (budget {figure.budget:g}, {'kept' if figure.within_budget else 'missed'})"
