"""What the benchmarks draw."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from benchmarks.measure import Figure, Report
from benchmarks.microvm import DIRTY_MB, GUEST_MB, name_of
from benchmarks.picture import draw_costs


def test_what_microvms_cost_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "costs.svg"
    assert not draw_costs(Report([Figure("another", [1.0])]), path, "0.1")
    assert not path.exists()
    combinations = [(size, changed) for size in GUEST_MB for changed in DIRTY_MB if changed < size]
    figures = [Figure(name_of("resume", size, changed), [100.0 + changed]) for size, changed in combinations]
    assert draw_costs(Report(figures), path, "0.1")
    said = path.read_text()
    assert ElementTree.fromstring(said).tag.endswith("svg")
    for words in ("<!-- resume -->", "<!-- fork x 8 -->", "<!-- guest of 256 MB -->", "<!-- guest of 1024 MB -->"):
        assert words in said
