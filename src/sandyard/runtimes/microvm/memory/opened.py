"""The files of an image of memory, open for one VMM: also for one that runs already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.image import Manifest
from sandyard.runtimes.microvm.qmp import Qmp
from sandyard.runtimes.microvm.said import number, part

STATE, FILES = "state", 0
"""What a VMM that got them knows them by."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Descriptors: `state`, which is at its end once a VMM has read it, and the RAM's, with the deltas after it."""

    name: Path
    manifest: Manifest
    state: int
    ram: Sequence[int]

    async def send(self, qmp: Qmp) -> Sequence[int]:
        """Give them to a VMM that runs: the state as `STATE`, the others in its set `FILES`; the numbers that those
        have there. Raises `SandboxError`."""
        await qmp.execute("getfd", {"fdname": STATE}, descriptors=[self.state])
        return [await qmp.query("add-fd", _added, {"fdset-id": FILES}, descriptors=[each]) for each in self.ram]


def _added(said: object) -> int:
    """Raises `Odd`."""
    return number(part(said, "fd"))


async def take_back(qmp: Qmp) -> None:
    """Let a VMM close what it was sent, once its memory is mapped and its guest runs: earlier it would not. Raises
    `SandboxError`."""
    await qmp.execute("remove-fd", {"fdset-id": FILES})


@contextmanager
def opened(name: Path, manifest: Manifest) -> Iterator[Opened]:
    """Raises `OSError`."""
    paths = [image.part(name, "state"), image.part(name, "ram"), *image.pages_of(name, manifest)]
    with ExitStack() as stack:
        state, *ram = (stack.enter_context(FileIO(path)).fileno() for path in paths)
        yield Opened(name, manifest, state, ram)
