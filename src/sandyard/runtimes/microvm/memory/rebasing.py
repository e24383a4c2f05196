"""Let a guest go on above what was just taken of its memory: what is its own afterwards is what changed since.

Its pages are mapped, privately, from the file they were copied to, as if it had been started from there. So the next
capture copies what was changed since this one, and those that are started from it share the pages with their source.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from sandyard.runtimes.finishing import ended
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory.inject import Mapper, Mapping
from sandyard.runtimes.microvm.memory.pagemap import PAGE, Span
from sandyard.runtimes.microvm.memory.pages import Region
from sandyard.runtimes.microvm.record import save_below
from sandyard.runtimes.microvm.said import number, part

_LEAST = 16  # pages: fewer stay its own, and are copied once more the next time
_MAPPINGS_MAX = 32768  # of a process; the kernel's own limit is twice that
_HELD = 2  # times its RAM: what files that a guest has parts of may take on the host's disk


@dataclass(frozen=True, slots=True)
class Rebased:
    """`mapped`: which of the captured spans the guest has from the file. `fdset`: what QEMU holds until `release`."""

    mapped: frozenset[Span]
    fdset: int


async def rebase(
    instance: MicroVMInstance,
    region: Region,
    spans: Sequence[Span],
    draft: Path,
    home: Path,
    name: str,
    mapper: Mapper,
) -> Rebased | None:
    """The guest stands still, and `draft` has its pages `spans`, one behind the other; from here on it goes on above
    its image `name`, by the record in `home`, as the `mapper` maps it. None: it goes on above what it did, as too much
    would be held for it.

    Raises `SandboxError`, `OSError`."""
    chosen = await ended(_choose, region, spans, draft)
    if not chosen:
        return None
    with FileIO(draft) as file:
        descriptor, fdset = await instance.control.query("add-fd", _added, descriptors=[file.fileno()])
    # First the record: a page that is its own and also in the image is only copied once more.
    await ended(save_below, home, name)
    await ended(mapper.map_over, region.pid, _mappings(region, spans, chosen, descriptor))
    return Rebased(frozenset(chosen), fdset)


def _added(said: object) -> tuple[int, int]:
    """Raises `Odd`."""
    return number(part(said, "fd")), number(part(said, "fdset-id"))


async def release(instance: MicroVMInstance, rebased: Rebased) -> None:
    """QEMU lets go of the file; only when the guest runs does it do so. Raises `SandboxError`."""
    await instance.control.execute("remove-fd", {"fdset-id": rebased.fdset})


def _choose(region: Region, spans: Sequence[Span], draft: Path) -> Sequence[Span]:
    mappings, held = _held(region.pid)
    if mappings > _MAPPINGS_MAX or held + draft.stat().st_blocks * 512 > _HELD * region.size:
        return []
    least = _LEAST
    while len(chosen := [span for span in spans if span[1] - span[0] >= least]) * 2 + mappings > _MAPPINGS_MAX:
        least *= 2
    return chosen


def _held(pid: int) -> tuple[int, int]:
    """How many mappings a process has, and bytes on the disk of the deltas among the files that it has parts of."""
    count, inodes, held = 0, set(), 0
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            count += 1
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and ".pages" in fields[5] and fields[4] not in inodes:
                inodes.add(fields[4])
                held += os.stat(f"/proc/{pid}/map_files/{fields[0]}").st_blocks * 512
    return count, held


def _mappings(region: Region, spans: Sequence[Span], chosen: Sequence[Span], descriptor: int) -> Sequence[Mapping]:
    wanted, result, offset = set(chosen), [], 0
    for span in spans:
        length = (span[1] - span[0]) * PAGE
        if span in wanted:
            result.append(Mapping(region.start + span[0] * PAGE, length, descriptor, offset))
        offset += length
    return result
