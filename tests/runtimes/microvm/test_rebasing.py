"""What a guest goes on above, where there is no room to say it or nothing more can be mapped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandyard.errors import SandboxError
from sandyard.runtimes.microvm.memory import rebasing
from sandyard.runtimes.microvm.memory.inject import Mapper, Mapping
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


COUNT = 20000
# Says where it has its memory, and when the last page of that is another.
MAPPED = f"""
import ctypes, mmap, time
held = mmap.mmap(-1, {COUNT} * 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held[-8192] = 1
print(ctypes.addressof(ctypes.c_char.from_buffer(held)), flush=True)
while held[-8192]: time.sleep(0.001)
print("mapped", flush=True)
"""
SERVER = f"""
import sys
from sandyard.runtimes.microvm.memory.inject import Mapper, Mapping
mapper, at = Mapper(), int(sys.argv[2])
print("go", flush=True)
mapper.map_over(int(sys.argv[1]), [Mapping(at + number * 8192, 4096) for number in range({COUNT})])
print("done", flush=True)
"""


@contextmanager
def mapped() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen([sys.executable, "-c", MAPPED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def traced(pid: int) -> bool:
    return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.root
def test_a_server_that_is_killed_while_a_guest_is_mapped_does_not_end_that() -> None:
    path = os.pathsep.join(each for each in sys.path if each)
    with mapped() as (process, at):
        words = [sys.executable, "-c", SERVER, str(process.pid), str(at)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as ours:
            assert ours.stdout is not None
            assert ours.stdout.readline() == "go\n"
            while not traced(process.pid):
                time.sleep(0.001)
            ours.kill()
            assert ours.stdout.read() == "", "it was over before that"
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        assert process.wait(10) == 0


@pytest.mark.root
def test_what_cannot_be_mapped_is_told() -> None:
    with mapped() as (process, at):
        for pid, mapping in ((process.pid, Mapping(at, 4096, 999)), (1 << 22, Mapping(at, 4096))):
            mapper = Mapper()
            with pytest.raises(SandboxError, match="cannot be mapped from outside"):
                mapper.map_over(pid, [mapping])
            mapper.close()
        assert process.poll() is None
    mapper = Mapper()
    mapper.close()  # it was not needed
    mapper.close()
