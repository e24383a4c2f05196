"""The memory that a VMM is given, on a process that stands by as one does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from sandyard.runtimes.deltas import Delta, write_delta
from sandyard.runtimes.microvm.memory import restore
from sandyard.runtimes.microvm.memory.inject import Mapping, map_over
from sandyard.runtimes.microvm.memory.pagemap import PAGE
from sandyard.runtimes.microvm.memory.pages import Region, changed

pytestmark = pytest.mark.root
PAGES = 2048
CHILD = """
import ctypes, mmap, os, sys
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
files = [os.open(path, os.O_RDONLY) for path in sys.argv[2:]]
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), *files, flush=True)
sys.stdin.read()
"""


class Image:
    """A base and deltas, and what they stand for."""

    def __init__(self, home: Path, seed: int) -> None:
        self._dice = random.Random(seed)
        self._home = home
        self.content = bytearray(self._dice.randbytes(PAGES // 2 * PAGE) + bytes(PAGES // 2 * PAGE))
        self.paths = [home / "ram"]
        self.paths[0].write_bytes(self.content)

    def change(self, spans: list[tuple[int, int]], *, zero: bool = False) -> None:
        """Pages of these spans, in a delta of their own."""
        blocks = []
        for first, end in spans:
            for number in range(first, end):
                data = bytes(PAGE) if zero else self._dice.randbytes(PAGE)
                self.content[number * PAGE : (number + 1) * PAGE] = data
                blocks.append((number, data))
        path = self._home / f"pages{len(self.paths) - 1}"
        write_delta(path, blocks, block_size=PAGE, size=PAGES * PAGE, parent="x", durable=False)
        self.paths.append(path)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    made = Image(tmp_path, 7)
    made.change([(10, 1500)])  # six runs, neighbours in the file too
    made.change([(0, 3), (100, 101), (300, 340), (1600, 1700)])
    made.change([(600, 700), (1650, 1652)], zero=True)
    made.change([(number, number + 1) for number in range(0, 1000, 2)])
    made.change([(number, number + 1) for number in range(1, 400, 2)])  # between those
    return made


def filled(image: Image) -> tuple[bytes, int]:
    """What a process has that was given it, and how many pages of that are its own."""
    command = [sys.executable, "-c", CHILD, str(PAGES * PAGE), *map(str, image.paths)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        start, *files = map(int, process.stdout.readline().split())
        region = Region(process.pid, start, PAGES * PAGE)
        with open(image.paths[0], "rb") as ram:
            restore._fill(region, image.paths[1:], ram.fileno(), files, files)
        assert not {str(number) for number in files} & set(os.listdir(f"/proc/{process.pid}/fd"))
        own = sum(end - first for first, end in changed(region))
        with open(f"/proc/{process.pid}/mem", "rb", buffering=0) as memory:
            content = os.pread(memory.fileno(), region.size, start)
        assert process.poll() is None
        process.kill()
    return content, own


def test_it_has_what_the_image_says(image: Image) -> None:
    content, own = filled(image)
    assert content == image.content
    assert own == 1001  # below page 999 every one is a run of its own, and two pages are elsewhere


@pytest.mark.parametrize("most", [2, 1])
def test_of_many_pieces_the_small_ones_are_copied(image: Image, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(restore, "_MAPPINGS_MAX", most)
    content, own = filled(image)
    assert content == image.content
    assert own > 1001


def test_a_stretch_is_mapped_as_one(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Mapping]()

    def watched(pid: int, mappings: list[Mapping], done_with: list[int]) -> None:
        seen.extend(mappings)
        map_over(pid, mappings, done_with)

    monkeypatch.setattr(restore, "map_over", watched)
    image.paths = image.paths[:2]
    with Delta(image.paths[1]) as delta:
        assert len(delta.runs) == 6
    filled(image)
    assert [mapping.length for mapping in seen] == [PAGES * PAGE, 1490 * PAGE]
