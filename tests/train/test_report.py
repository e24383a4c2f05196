from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from sandyard.train.charts import PANELS, Panel, svg
from sandyard.train.evaluate import summarize
from sandyard.train.progress import RunProgress, comparison_table
from sandyard.train.report import Comparison, write_report
from sandyard.train.runlog import RunLog
from sandyard.train.trainer import TrainEvent
from sandyard.train.trajectory import EndReason, Trajectory
from sandyard.verify.base import Verdict

HOSTILE = "<script>alert(1)</script>"


def played(task: int, passed: int, masked: str | None = None) -> Trajectory:
    trajectory = Trajectory(f"t{task}", "add" if task % 2 else "clip", prompt_ids=[1], turns=1)
    trajectory.end_reason, trajectory.masked = EndReason.DONE, masked
    if masked is None:
        trajectory.verdict = Verdict(True, passed, 2)
        trajectory.reward = {0: 0.1, 1: 0.3, 2: 1.0}[passed]
    return trajectory


def make_run(run_dir: Path) -> Comparison:
    log = RunLog(run_dir, lambda ids: f"{HOSTILE} text")
    log.begin({"seed": 1, "deadlines": {"exec": 1.0}}, 0)
    for step in (1, 2, 3):
        log.metrics({"step": step, "train/avg_reward": step / 3, "train/masked/sandbox:oom": 1.0, "time/rollout": 2.0})
        log.trajectories([played(1, 0), played(2, 2), played(3, 0, "sandbox:oom")], step=step)
    log.metrics({"step": 4, "skipped": "all rollouts are masked", "train/entropy": float("nan")})
    before = summarize([played(i, 0) for i in range(4)], 1, 1.0)
    after = summarize([played(i, 2) for i in range(3)] + [played(3, 0, "verifier")], 1, 1.0)
    return Comparison("sampled at temperature 1", before, after)


class Wellformed(HTMLParser):
    """Fails on a tag that is closed and was not open; collects tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)


def test_the_report_shows_what_happened_and_needs_nothing_else(tmp_path: Path) -> None:
    comparison = make_run(tmp_path)
    report = write_report(tmp_path, title="Run <1>", comparisons=[comparison])
    page = report.html.read_text()
    parser = Wellformed()
    parser.feed(page)
    assert parser.open == []
    assert {"svg", "table", "details", "polyline"} <= parser.tags
    assert "script" not in parser.tags
    assert "http" not in page
    for text in ("0% → 100%", "sandbox:oom", "verifier", "all rollouts are masked", "Run &lt;1&gt;", "clip", "seed"):
        assert text in page
    assert report.png.read_bytes().startswith(b"\x89PNG")
    assert len(report.png.read_bytes()) > 10000


def test_a_run_without_a_step_has_a_report_too(tmp_path: Path) -> None:
    RunLog(tmp_path).begin({}, 0)
    page = write_report(tmp_path).html.read_text()
    assert "No rollout was lost" in page


def test_a_chart_places_its_points() -> None:
    panel = Panel("Reward", {"a": "mean"}, unit=True)
    picture = svg(panel, [{"step": 1, "a": 0.0}, {"step": 2, "a": 1.0}, {"step": 3, "b": 1.0}])
    assert 'points="44.0,146.0 330.0,10.0"' in picture
    assert svg(panel, [{"step": 1}]) == ""
    assert len({panel.title for panel in PANELS}) == len(PANELS)


def events() -> list[TrainEvent]:
    return [
        TrainEvent("rollout", 0),
        TrainEvent("step", 1, metrics={"train/avg_reward": 0.25, "train/code_acc": 0.5, "train/masked": 2.0}),
        TrainEvent("skip", 2, "all 8 rollouts are masked (capacity 8)"),
        TrainEvent("evaluation", 2, "before", {"pass_at_1": 0.375}),
    ]


def test_progress_off_a_terminal_is_plain_lines() -> None:
    out = io.StringIO()
    with RunProgress(Console(file=out, width=200), max_steps=3, rollouts=8) as progress:
        progress.begin("evaluating", 12)
        for event in events():
            progress.on_event(event)
    lines = out.getvalue().splitlines()
    assert lines[0] == "evaluating: 12 rollouts"
    assert lines[1].startswith("step 1/3  reward 0.250  solved 50%")
    assert "masked 2" in lines[1]
    assert lines[2] == "step 2/3  no update: all 8 rollouts are masked (capacity 8)"
    assert lines[3] == "before: pass@1 37.5%"
    assert len(lines) == 4
    assert "\x1b" not in out.getvalue()


def test_progress_on_a_terminal_counts_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb one gets no bar
    out = io.StringIO()
    with RunProgress(Console(file=out, width=200, force_terminal=True), rollouts=8) as progress:
        progress.on_event(events()[0])
        progress._bar.refresh()
    assert "1/8" in out.getvalue()


def test_the_table_compares_by_family(tmp_path: Path) -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(comparison_table(make_run(tmp_path)))
    rows = [line.split("│")[1:-1] for line in out.getvalue().splitlines() if line.count("│") == 5]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["add", "2", "0%", "100%"],
        ["clip", "2", "0%", "100%"],
        ["all", "4", "0%", "100%"],
    ]


def test_config_in_the_run_is_json(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1
