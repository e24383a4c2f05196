"""Which pages of a process are its own: both ways of asking the kernel say the same."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import pytest

from sandyard.runtimes.microvm.memory import pagemap
from sandyard.runtimes.microvm.memory.pagemap import PAGE, Span, own_pages, read, scan

PAGES = 4096
# A private mapping of a file, then anonymous memory; of both some pages are read, written and swapped out.
CHILD = """
import ctypes, mmap, sys
pages, path = int(sys.argv[1]), sys.argv[2]
with open(path, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
plain = mmap.mmap(-1, pages * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
plain.madvise(15)  # no huge pages: whole ones are another's own
for each in mapped, plain:
    for number in range(0, pages // 2, 3):
        each[number * 4096] = 1
    for number in range(1, pages, 3):
        each[number * 4096]
    each[(pages - 8) * 4096 : pages * 4096] = bytes(8 * 4096)
    each.madvise(21, 0, 300 * 4096)  # to the swap, where there is one
    print(ctypes.addressof(ctypes.c_char.from_buffer(each)), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[int, Sequence[int]]]:
    """Its pid, and the addresses of the two."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES // 2 * PAGE))
    os.truncate(path, PAGES * PAGE)
    command = [sys.executable, "-c", CHILD, str(PAGES), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid, [int(process.stdout.readline()) for _ in range(2)]
        process.kill()


def scanned(file: FileIO, start: int, size: int) -> Sequence[Span]:
    try:
        return scan(file, start, size)
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
        pytest.skip("this kernel has no PAGEMAP_SCAN")


@pytest.mark.parametrize("regions", [1, 2, 7, 300, 4096])
def test_both_say_the_same(child: tuple[int, Sequence[int]], regions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagemap, "_REGIONS", regions)
    pid, starts = child
    with FileIO(f"/proc/{pid}/pagemap") as file:
        for start in starts:
            whole = read(file, start, PAGES * PAGE)
            assert sum(end - first for first, end in whole) >= PAGES // 2 // 3 + 8
            assert whole[-1][0] <= PAGES - 8
            assert whole[-1][1] == PAGES
            for skip, count in ((0, PAGES), (1, PAGES - 1), (2, 600), (PAGES // 2, 64), (PAGES - 1, 1)):
                at, size = start + skip * PAGE, count * PAGE
                assert list(scanned(file, at, size)) == list(read(file, at, size))
            assert list(own_pages(pid, start, PAGES * PAGE)) == list(whole)


def test_what_was_written_or_is_zero_is_its_own_and_what_was_read_of_a_file_is_not(
    child: tuple[int, Sequence[int]],
) -> None:
    pid, (mapped, plain) = child
    written = [(number, number + 1) for number in range(0, PAGES // 2, 3)]
    assert list(own_pages(pid, mapped, PAGES * PAGE))[:-1] == written
    own = {number for first, end in own_pages(pid, plain, PAGES * PAGE) for number in range(first, end)}
    # A page of zeros that was only read is counted too: a file's page may come to be one, where the host merges pages.
    assert own >= {*range(0, PAGES // 2, 3), *range(1, PAGES, 3)}


def test_without_the_call_it_is_read(child: tuple[int, Sequence[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    pid, starts = child
    usual = [list(own_pages(pid, start, PAGES * PAGE)) for start in starts]

    def absent(*_: object) -> Sequence[Span]:
        raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    monkeypatch.setattr(pagemap, "scan", absent)
    assert [list(own_pages(pid, start, PAGES * PAGE)) for start in starts] == usual


def test_of_a_process_that_ended_there_is_no_answer(child: tuple[int, Sequence[int]]) -> None:
    pid, (start, _) = child
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(OSError, match=r"No such process|process is gone"):
        own_pages(pid, start, PAGES * PAGE)
