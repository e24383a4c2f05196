"""The machine as microVMs see it: settings, paths, control groups, and what is left of one that goes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import SandboxError
from sandyard.runtimes.container.cgroups import Cgroups, detect_cgroups
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.finishing import finish
from sandyard.runtimes.microvm.cgroup import tool_group
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.launch import last_lines
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.record import forget_halted, load_running
from sandyard.runtimes.microvm.said import printable
from sandyard.runtimes.microvm.spares import Spares
from sandyard.runtimes.microvm.starting import Starter
from sandyard.runtimes.microvm.turns import Turns

ID = re.compile(r"[a-z0-9]{1,40}")
_DESTROY_TIMEOUT = 20.0


class Host:
    """`instances` are those this process holds, by sandbox id; one that is being made is among them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.layout = Layout.of(settings)
        self.instances: dict[str, MicroVMInstance] = {}
        self.background: dict[str, asyncio.Task[None]] = {}  # what is done to disks, by sandbox id
        self.turns = Turns()
        self._cgroups: Cgroups | None = None
        self.spares = Spares(settings, self.layout, lambda: self.cgroups)

    @property
    def cgroups(self) -> Cgroups:
        if self._cgroups is None:
            self._cgroups = detect_cgroups(self.layout.cgroup_parent)
        return self._cgroups

    @property
    def starter(self) -> Starter:
        return Starter(self.settings, self.layout, self.cgroups)

    def said(self, sandbox_id: str) -> str:
        """What the VMM of a sandbox wrote last."""
        return printable(last_lines(self.layout.home(sandbox_id) / "vmm.log"))

    def ids(self) -> set[str]:
        """Of everything that is there, whole or not."""
        found = self.cgroups.ids()
        for parent in (self.layout.homes, self.layout.disks, self.layout.memories, self.layout.keeps):
            if parent.is_dir():
                found.update(entry.name for entry in os.scandir(parent))
        return {name for name in found if ID.fullmatch(name)}

    def known(self, sandbox_id: str) -> bool:
        layout = self.layout
        return any(path(sandbox_id).exists() for path in (layout.home, layout.disk, layout.memory, layout.kept))

    async def remove(self, sandbox_id: str) -> None:
        """`end`, and its disk and memory go too. Raises `SandboxError` naming what stays."""
        await self.end(sandbox_id)
        try:
            for path in (self.layout.memory, self.layout.disk, self.layout.kept):
                await asyncio.to_thread(remove_tree, path(sandbox_id))
            await asyncio.to_thread(forget_halted, self.layout.disk(sandbox_id))
        except OSError as error:
            raise SandboxError(f"sandbox {sandbox_id}: its disk does not go: {error}") from error

    async def end(self, sandbox_id: str) -> None:
        """End the VMM and remove all but the disk, whatever step it stopped at. Raises `SandboxError`."""
        deadline = time.monotonic() + _DESTROY_TIMEOUT
        instance = self.instances.get(sandbox_id)
        if instance is not None:
            instance.kill()
            await self._call_off(sandbox_id)
            with suppress(TimeoutError):  # `clear` kills harder, and says what stays
                await asyncio.wait_for(instance.wait_dead(), _DESTROY_TIMEOUT / 2)
            await instance.release()
            self.instances.pop(sandbox_id, None)  # it hears of nothing any more: a second try has to do without

        def clear() -> None:
            self.end_tools(sandbox_id)
            record = load_running(self.layout.home(sandbox_id))
            if record is not None:
                _end_child(record.pid, sandbox_id)
            self.cgroups.kill(sandbox_id, deadline)
            self.cgroups.remove(sandbox_id, deadline)
            remove_tree(self.layout.home(sandbox_id))

        try:
            await asyncio.to_thread(clear)
        except OSError as error:
            raise SandboxError(f"sandbox {sandbox_id}: files do not go: {error}") from error

    async def _call_off(self, sandbox_id: str) -> None:
        """What is done in the background is left as it is; a later server goes on from there."""
        task = self.background.get(sandbox_id)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    def end_tools(self, sandbox_id: str) -> None:
        """End what a server that was killed left at work on the disk of a sandbox. Blocking. Raises `SandboxError`."""
        deadline = time.monotonic() + _DESTROY_TIMEOUT
        self.cgroups.kill(tool_group(sandbox_id), deadline)
        self.cgroups.remove(tool_group(sandbox_id), deadline)
        try:
            remove_tree(self.layout.disk(tool_group(sandbox_id)))
        except OSError as error:
            raise SandboxError(f"sandbox {sandbox_id}: what a tool left does not go: {error}") from error

    async def close(self) -> None:
        """Let go of the instances; they go on living. What stands ready for others ends."""
        for sandbox_id in list(self.background):
            await self._call_off(sandbox_id)
        for instance in self.instances.values():
            await instance.release()
        self.instances.clear()
        await finish(self.spares.close())
        if self._cgroups is not None:
            await self.spares.sweep()
            self._cgroups.remove_parent()


def _end_child(pid: int, sandbox_id: str) -> None:
    """Kill and collect a VMM that this process started, also one that has not joined its groups yet."""
    with suppress(ChildProcessError, FileNotFoundError):  # another's, or collected
        # Of an earlier server's record the number may be another child's by now.
        said = "".join(Path(f"/proc/{pid}/{name}").read_text(errors="replace") for name in ("cmdline", "cgroup"))
        if sandbox_id in said and os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
