"""One VMM that stands ready: it has come up, for no sandbox yet, with what has to be there at its start.

What it is to read and write later it sees already: its directory, and one that files for it to read are put into.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from sandyard.errors import CreateFailed, SandboxError
from sandyard.runtimes.container.cgroups import Cgroups
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm.cgroup import make_groups
from sandyard.runtimes.microvm.kind import Kind
from sandyard.runtimes.microvm.launch import LATER, VmStart, listen, start_vmm
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.machine import Absent
from sandyard.runtimes.microvm.qmp import Qmp
from sandyard.runtimes.microvm.users import make_home

_COME_UP = 30.0
_END = 20.0


class Spare:
    """Owns the process, its pidfd, its control connection, and everything that has its `name`."""

    def __init__(self, layout: Layout, cgroups: Cgroups, kind: Kind, name: str) -> None:
        self.kind = kind
        self.name = name
        self.uid = 0  # until it has come up
        self.pid = 0
        self._layout = layout
        self._cgroups = cgroups
        self._qmp: Qmp | None = None
        self._pidfd = -1

    @property
    def home(self) -> Path:
        return self._layout.home(self.name)

    @property
    def own(self) -> Path:
        return self._layout.disk(self.name)

    @property
    def given(self) -> Path:
        return self._layout.memory(self.name)

    @property
    def control(self) -> Qmp:
        if self._qmp is None:
            raise SandboxError(f"{self.name} has not come up")
        return self._qmp

    async def come_up(self, on_end: Callable[[Spare], None]) -> None:
        """Start it; `on_end` is called when it ends by itself. Raises `SandboxError`, `OSError`; what was made then
        is for `drop`."""
        await ended(self._start)
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended, on_end)
        self._qmp = await Qmp.connect(self._layout.qmp_socket(self.name), _COME_UP)

    def _start(self) -> None:
        kind = self.kind
        try:
            for path, mode in ((self.home, 0o700), (self.given, 0o755)):
                path.mkdir(mode=mode)
            self.uid = make_home(self._layout, self.own)
            groups = make_groups(self._cgroups, self.name, kind.limits)
            with ExitStack() as stack:
                agent_fd = listen(stack, self._layout.agent_socket(self.name))
                qmp_fd = listen(stack, self._layout.qmp_socket(self.name))
                plan = VmStart(
                    own=self.own,
                    uid=self.uid,
                    groups=groups,
                    shared={},
                    log=self.home / "vmm.log",
                    file_bytes=kind.file_bytes,
                    device=kind.device,
                    gate=LATER if kind.tap else "",
                    given=self.given,
                )
                command = kind.machine(_places(kind.layers), agent_fd, qmp_fd, incoming=True).command()
                self.pid = start_vmm(plan, command, (agent_fd, qmp_fd))
        except OSError as error:
            raise CreateFailed("vmm", str(error)) from error

    def _ended(self, on_end: Callable[[Spare], None]) -> None:
        self._let_go()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        self.pid = 0
        on_end(self)

    def take(self) -> None:
        """From here on its end is for whoever took it to notice. Its pid is its own until it is dropped, or another
        waits for it."""
        self._let_go()

    def hand_over(self) -> tuple[int, Qmp]:
        """Process and connection of one that was taken are another's from here on, also to be ended; `drop` removes the
        rest."""
        pid, control = self.pid, self.control
        self.pid, self._qmp = 0, None
        return pid, control

    async def drop(self) -> None:
        """End it, unless it was handed over, and remove all that has its name. Idempotent. Raises `SandboxError`,
        `OSError`."""
        await finish(self._drop())

    async def _drop(self) -> None:
        qmp, self._qmp = self._qmp, None
        if qmp is not None:
            await qmp.close()
        self._let_go()
        pid, self.pid = self.pid, 0
        if pid:
            await ended(_end, pid)
        await ended(remove_spare, self._layout, self._cgroups, self.name)

    def _let_go(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _end(pid: int) -> None:
    """Of a child. Raises `SandboxError`."""
    deadline = time.monotonic() + _END
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                raise SandboxError(f"the VMM {pid} does not die")
            time.sleep(0.001)


def remove_spare(layout: Layout, cgroups: Cgroups, name: str) -> None:
    """Whatever is left of it. Blocking. Raises `SandboxError`, `OSError`."""
    deadline = time.monotonic() + _END
    cgroups.kill(name, deadline)
    cgroups.remove(name, deadline)
    for path in (layout.home(name), layout.disk(name), layout.memory(name)):
        remove_tree(path)


def _places(layers: int) -> list[Absent]:
    """Of the disks that `starting.drives` has, in that order."""
    return [Absent("conf"), Absent("base"), Absent("disk", writable=True)] + [
        Absent(f"layer{number}") for number in range(layers)
    ]
