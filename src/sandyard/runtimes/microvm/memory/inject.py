"""Put mappings of files into the memory of a process that stands by.

QEMU opens the file of a guest's RAM for writing whatever it is to do with it, and a VMM must not be able to write
what its siblings read. So it starts with memory of its own, and what it inherited open for reading is mapped over
that from outside, privately: see `tracing`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from sandyard.errors import SandboxError
from sandyard.runtimes.microvm.memory import tracing
from sandyard.runtimes.microvm.memory.tracing import Mapping

__all__ = ["Mapper", "Mapping", "map_over"]

_REMEDY = "allow ptrace (kernel.yama.ptrace_scope below 3, CAP_SYS_PTRACE)"
_PATIENCE = 120.0


def map_over(pid: int, mappings: Sequence[Mapping], done_with: Sequence[int]) -> None:
    """`tracing.map_over`, of a process that nobody depends on yet: it does not live on if we are killed meanwhile.
    Raises `SandboxError`."""
    try:
        tracing.map_over(pid, mappings, done_with)
    except OSError as error:
        raise _failed(pid, str(error)) from error


class Mapper:
    """Does the same by a process of its own, to one that is to outlive us. Made ahead, as that takes its time. All is
    blocking; `close` is due."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", tracing.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # what ends us by our group does not end it
            cwd="/",
        )

    def map_over(self, pid: int, mappings: Sequence[Mapping]) -> None:
        """Once. Raises `SandboxError`."""
        try:
            _, said = self._process.communicate(tracing.packed(pid, mappings), timeout=_PATIENCE)
        except (OSError, subprocess.TimeoutExpired) as error:
            self._process.kill()
            self._process.communicate()
            raise _failed(pid, str(error)) from error
        if self._process.returncode != 0:
            raise _failed(pid, said.decode(errors="replace").strip()[-300:])

    def close(self) -> None:
        """Idempotent."""
        if self._process.returncode is None:
            self._process.communicate(b"")


def _failed(pid: int, why: str) -> SandboxError:
    return SandboxError(f"memory of process {pid} cannot be mapped from outside: {why}", remedy=_REMEDY)
