"""The report of a run: one self-contained HTML page and one PNG."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandyard.train.charts import PANELS, svg, write_png
from sandyard.train.evaluate import EvalResult, FamilyScore
from sandyard.train.runlog import TRAJECTORIES, read_metrics
from sandyard.train.trajectory import read_lines

_MASK_PREFIX = "train/masked/"
_TEXT_LIMIT = 6000
_VIEWPORT = '<meta name=viewport content="width=device-width, initial-scale=1">'


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same evaluation before and after training; `label` says how it was sampled."""

    label: str
    before: EvalResult | None
    after: EvalResult | None


@dataclass(frozen=True, slots=True)
class Report:
    html: Path
    png: Path


def write_report(run_dir: Path, *, title: str = "Training run", comparisons: Sequence[Comparison] = ()) -> Report:
    """Write `report.html` and `report.png` into `run_dir` from its logs and the evaluations given.

    The first comparison is the one whose families are tabulated. Works on an unfinished run too."""
    metrics = read_metrics(run_dir)
    report = Report(run_dir / "report.html", run_dir / "report.png")
    write_png(report.png, metrics, title)
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        _tiles(comparisons, metrics),
        *(_families(comparison) for comparison in comparisons[:1]),
        '<h2>Training</h2><div class="charts">' + "".join(svg(panel, metrics) for panel in PANELS) + "</div>",
        _failures(metrics, comparisons),
        _trajectories(run_dir / TRAJECTORIES),
        _config(run_dir / "config.json"),
    ]
    page = f"<!doctype html><html lang=en><meta charset=utf-8>{_VIEWPORT}<title>{html.escape(title)}</title>"
    report.html.write_text(page + _STYLE + "<main>" + "".join(sections) + "</main></html>", encoding="utf-8")
    return report


def family_rows(comparison: Comparison) -> list[tuple[str, FamilyScore | None, FamilyScore | None]]:
    """(family, before, after) by name, then the total as "all"."""
    before, after = comparison.before, comparison.after
    names = sorted({*(before.families if before else ()), *(after.families if after else ())})
    rows = [
        (name, before.families.get(name) if before else None, after.families.get(name) if after else None)
        for name in names
    ]
    return [*rows, ("all", before.total if before else None, after.total if after else None)]


def percent(score: FamilyScore | None) -> str:
    """Pass@1 as text, "–" where nothing was scored."""
    return "–" if score is None or not score.scored else f"{score.pass_at_1:.0%}"


def _tiles(comparisons: Sequence[Comparison], metrics: Sequence[Mapping[str, Any]]) -> str:
    tiles = [
        (
            f"pass@1, {comparison.label}",
            f"{percent(comparison.before.total if comparison.before else None)} → "
            f"{percent(comparison.after.total if comparison.after else None)}",
        )
        for comparison in comparisons
    ]
    seconds = sum(line.get("time/rollout", 0.0) + line.get("time/train", 0.0) for line in metrics)
    tiles.append(("steps", str(len(metrics))))
    tiles.append(("time of the steps", f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"))
    cells = (f'<div class="tile"><b>{html.escape(v)}</b><span>{html.escape(k)}</span></div>' for k, v in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _families(comparison: Comparison) -> str:
    rows = []
    for name, before, after in family_rows(comparison):
        tasks = (after or before or FamilyScore(0, 0, 0)).tasks
        bars = _bar(before, "before") + _bar(after, "after")
        kind = ' class="total"' if name == "all" else ""
        rows.append(
            f"<tr{kind}><td>{html.escape(name or 'no family')}</td><td>{tasks}</td><td>{percent(before)}</td>"
            f"<td>{percent(after)}</td><td>{bars}</td></tr>"
        )
    head = "<tr><th>family</th><th>tasks</th><th>before</th><th>after</th><th></th></tr>"
    return f"<h2>By family: {html.escape(comparison.label)}</h2><table>{head}{''.join(rows)}</table>"


def _bar(score: FamilyScore | None, kind: str) -> str:
    share = 0.0 if score is None or math.isnan(score.pass_at_1) else score.pass_at_1
    return f'<div class="bar {kind}" style="width:calc({share:.3f} * var(--bar))"></div>'


def _failures(metrics: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison]) -> str:
    reasons: Counter[str] = Counter()
    for line in metrics:
        for name, value in line.items():
            if name.startswith(_MASK_PREFIX):
                reasons[name.removeprefix(_MASK_PREFIX)] += int(value)
    for result in (r for c in comparisons for r in (c.before, c.after) if r is not None):
        reasons.update(result.masked)
    skipped = [f"step {line['step']}: {line['skipped']}" for line in metrics if "skipped" in line]
    if not reasons and not skipped:
        return "<h2>Failures</h2><p>No rollout was lost to the infrastructure, no step was skipped.</p>"
    rows = "".join(f"<tr><td>{html.escape(r)}</td><td>{n}</td></tr>" for r, n in reasons.most_common())
    table = f"<table><tr><th>masked because of</th><th>rollouts</th></tr>{rows}</table>" if rows else ""
    return "<h2>Failures</h2>" + table + "".join(f"<p>Skipped {html.escape(text)}</p>" for text in skipped)


def _trajectories(path: Path) -> str:
    """The last step's best and worst, the first step's best and worst, and one that was masked."""
    if not path.exists():
        return ""
    lines = list(read_lines(path))
    scored = [line for line in lines if line.get("reward") is not None]
    chosen: list[dict[str, Any]] = []
    for step in dict.fromkeys((scored[-1].get("step"), scored[0].get("step")) if scored else ()):
        of_step = sorted((line for line in scored if line.get("step") == step), key=lambda line: float(line["reward"]))
        chosen += [of_step[-1], of_step[0]] if len(of_step) > 1 else of_step
    chosen += [line for line in lines if line.get("masked")][:1]
    where = f"<p>All {len(lines)} rollouts are in <code>{html.escape(path.name)}</code>, one JSON line each; "
    look = f"the text of the last one: <code>tail -n 1 {html.escape(path.name)} | python3 -c "
    look += '\'import json,sys; t = json.load(sys.stdin); print(t["prompt"] + t["text"])\'</code></p>'
    return "<h2>Trajectories</h2>" + where + look + "".join(_trajectory(line) for line in chosen)


def _trajectory(line: Mapping[str, Any]) -> str:
    outcome = f"masked: {line['masked']}" if line.get("masked") else f"reward {line['reward']:.2f}"
    head = f"step {line.get('step')}, {line['task_id']} ({line.get('family') or 'no family'}): {outcome}, "
    head += f"{line['turns']} turn{'' if line['turns'] == 1 else 's'}"
    head += f", ended: {str(line['end_reason']).replace('_', ' ')}" if line["end_reason"] else ""
    body = [html.escape(str(line.get("prompt", "")))[-_TEXT_LIMIT:]]
    body.append(f"<mark>{html.escape(str(line.get('text', '')))[:_TEXT_LIMIT]}</mark>")
    if line.get("detail"):
        body.append(f"\n[{html.escape(str(line['detail']))}]")
    return f"<details><summary>{html.escape(head)}</summary><pre>{''.join(body)}</pre></details>"


def _config(path: Path) -> str:
    if not path.exists():
        return ""
    config = json.loads(path.read_text())
    return f"<h2>Settings</h2><table>{''.join(_settings(config))}</table>"


def _settings(config: Mapping[str, Any]) -> Iterable[str]:
    for name, value in config.items():
        shown = ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        yield f"<tr><td>{html.escape(name)}</td><td>{html.escape(shown)}</td></tr>"


_STYLE = """<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --bar: min(180px, 15vw); }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; } h2 { font-size: 19px; margin-top: 36px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: 10px 18px; }
.tile b { display: block; font-size: 22px; } .tile span { opacity: .7; font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 14px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: 8px; }
figcaption { font-size: 13px; font-weight: 600; } .key { font-weight: 400; margin-left: 8px; }
svg text { font-size: 10px; fill: currentColor; opacity: .65; } .grid { stroke: var(--line); }
table { border-collapse: collapse; } td, th { padding: 3px 14px 3px 0; text-align: left; vertical-align: middle; }
tr { border-bottom: 1px solid var(--soft); } .total { font-weight: 700; }
.bar { height: 7px; border-radius: 3px; margin: 2px 0; background: #1f6feb; } .bar.before { background: #8886; }
td:first-child { overflow-wrap: anywhere; } code { overflow-wrap: anywhere; }
@media (max-width: 560px) { main { padding: 14px; } table { font-size: 13px; } td, th { padding-right: 8px; } }
details { margin: 6px 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; background: var(--soft); padding: 12px; border-radius: 8px; font-size: 12.5px; }
mark { background: #1f6feb33; color: inherit; } code { font-size: 12.5px; }
</style>"""
