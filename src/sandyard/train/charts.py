"""Small line charts of a run's metrics: as inline SVG for the report, and as one PNG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT = 340, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 10, 24


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart: a title and up to two curves by metric name. `unit` bounds the axis to [0, 1]."""

    title: str
    curves: Mapping[str, str]  # metric name → label
    unit: bool = False


PANELS: Sequence[Panel] = (
    Panel("Tasks solved in training", {"train/code_acc": "all tests", "train/test_pass_rate": "tests"}, unit=True),
    Panel("Reward", {"train/avg_reward": "mean"}, unit=True),
    Panel("Submitted", {"train/submit_rate": "submitted", "train/tool_error_rate": "bad calls"}, unit=True),
    Panel("Sampled tokens per rollout", {"train/completion_length": "tokens"}),
    Panel("Entropy", {"train/entropy": "nats per token"}),
    Panel("KL and clipped share", {"train/kl": "KL", "train/clip_ratio": "clipped"}),
    Panel("Gradient norm", {"train/grad_norm": "before clipping"}),
    Panel("Seconds per step", {"time/rollout": "rollouts", "time/train": "training"}),
    Panel("Rollouts without a say", {"train/masked": "masked", "train/groups_degenerate": "equal groups"}),
)
_COLORS = ("#1f6feb", "#d9730d")


def curve(metrics: Sequence[Mapping[str, object]], name: str) -> list[tuple[float, float]]:
    """(step, value) where a step has a finite value of this metric."""
    points = []
    for line in metrics:
        value, step = line.get(name), line.get("step")
        if isinstance(value, int | float) and isinstance(step, int | float) and math.isfinite(value):
            points.append((float(step), float(value)))
    return points


def svg(panel: Panel, metrics: Sequence[Mapping[str, object]]) -> str:
    """The panel as an SVG element; "" if none of its metrics was recorded."""
    curves = [(label, curve(metrics, name)) for name, label in panel.curves.items()]
    curves = [(label, points) for label, points in curves if points]
    if not curves:
        return ""
    steps = [step for _, points in curves for step, _ in points]
    first, last = min(steps), max(steps)
    low, high = _range([value for _, points in curves for _, value in points], panel.unit)

    def place(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + (step - first) / max(1e-9, last - first) * (WIDTH - _LEFT - _RIGHT)
        y = HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)
        return x, y

    parts = [_grid(low, high, first, last)]
    for color, (label, points) in zip(_COLORS, curves, strict=False):
        placed = [place(step, value) for step, value in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (x, y), (step, value) in zip(placed, points, strict=True):
            tip = html.escape(f"{label}, step {step:.0f}: {value:.4g}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"><title>{tip}</title></circle>')
    legend = " ".join(
        f'<span class="key" style="color:{color}">● {html.escape(label)}</span>'
        for color, (label, _) in zip(_COLORS, curves, strict=False)
    )
    body = "".join(parts)
    return (
        f"<figure><figcaption>{html.escape(panel.title)} {legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(panel.title)}">{body}</svg></figure>'
    )


def write_png(path: Path, metrics: Sequence[Mapping[str, object]], title: str) -> None:
    """All panels that have data, in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    panels = [panel for panel in PANELS if any(curve(metrics, name) for name in panel.curves)]
    rows = max(1, math.ceil(len(panels) / 3))
    figure, axes = pyplot.subplots(rows, 3, figsize=(13, 3.1 * rows), squeeze=False)
    figure.suptitle(title)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for panel, axis in zip(panels, axes.flat, strict=False):
        for color, (name, label) in zip(_COLORS, panel.curves.items(), strict=False):
            points = curve(metrics, name)
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", ms=3, color=color, label=label)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        if panel.unit:
            axis.set_ylim(-0.03, 1.03)
        else:
            axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _range(values: Sequence[float], unit: bool) -> tuple[float, float]:
    if unit:
        return 0.0, max(1.0, *values)
    low, high = min(0.0, *values), max(values)
    return low, high if high > low else low + 1.0


def _short(value: float) -> str:
    """Few enough characters for the margin."""
    return f"{value:.3g}" if value == 0 or abs(value) >= 0.1 else f"{value:.1g}"


def _grid(low: float, high: float, first: float, last: float) -> str:
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)
        value = low + share * (high - low)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{HEIGHT - 7}">step {first:.0f}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 7}" text-anchor="end">{last:.0f}</text>')
    return "".join(parts)
