"""What a guest goes on above, where there is no room to say it or nothing more can be mapped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandyard.runtimes.microvm.memory import rebasing
from sandyard.runtimes.microvm.memory.pages import Region
from sandyard.runtimes.microvm.record import load_below, save_below

SPANS = [(0, 64), (100, 164)]


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    path = tmp_path / "1.pages.draft"
    path.write_bytes(bytes(128 * 4096))
    return path


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("mappings", "chosen"), [(100, 2), (32766, 1), (32768, 0), (60000, 0)])
def test_no_more_is_mapped_than_a_process_may_have(
    draft: Path, monkeypatch: pytest.MonkeyPatch, mappings: int, chosen: int
) -> None:
    """A guest can write to its memory so that a copy of it has as many mappings as it likes."""
    monkeypatch.setattr(rebasing, "_held", lambda _: (mappings, 0))
    spans = SPANS if chosen != 1 else [(0, 16), (100, 164)]
    assert len(rebasing._choose(Region(os.getpid(), 0, 1 << 30), spans, draft)) == chosen


def test_the_image_below_stays_known_where_there_is_no_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_below(tmp_path, "1")

    def full(path: Path, _: str) -> int:
        path.touch()
        os.truncate(path, 0)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        save_below(tmp_path, "2")
    assert load_below(tmp_path) == "1"
