"""The parent's side of a worker: its process, its seats, and what it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import sandyard
from sandyard.envs.openenv.worker import PACKET
from sandyard.errors import ConfigError, HostError

_START_TIMEOUT = 60.0
_KILL_GRACE = 5.0


class WorkerHandle:
    """One worker. `seats` are the sessions that it has or was sent."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.process = process
        self.seats: set[int] = set()
        self._control = control
        self._failure = ""
        self._ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(control, self._on_word)

    @classmethod
    async def start(cls, options: dict[str, Any]) -> WorkerHandle:
        """A worker that is ready. Raises `ConfigError` when its env cannot be made, `HostError` when it died."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        root = str(Path(sandyard.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sandyard.envs.openenv.worker",
                str(theirs.fileno()),
                json.dumps(options),
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdin=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        handle = cls(process, ours)
        try:
            await handle._wait_ready()
        except BaseException:
            await handle.kill()
            raise
        return handle

    def hand(self, seat: int, connection: socket.socket, refused: tuple[int, int] | None, *, counts: bool) -> bool:
        """Give the worker a connection; False when it does not take one now."""
        packet = json.dumps({"seat": seat, "refused": refused}).encode()
        try:
            socket.send_fds(self._control, [packet], [connection.fileno()])
        except OSError:
            return False
        if counts:
            self.seats.add(seat)
        return True

    async def stop(self, drain: float) -> None:
        """Let it finish what it was asked, then end it. Idempotent."""
        with contextlib.suppress(OSError):  # it is dead already
            self._control.send(json.dumps({"stop": drain}).encode())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain + _KILL_GRACE):
                await self.process.wait()
        await self.kill()

    async def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        self.forget()

    def forget(self) -> None:
        """Give back what is left of a worker that has ended."""
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
        self.seats.clear()

    async def _wait_ready(self) -> None:
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await self._ready.wait()
        except TimeoutError as error:
            raise HostError(f"a worker was not ready after {_START_TIMEOUT:g} s") from error
        if self._failure:
            raise ConfigError(self._failure)

    def _on_word(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    packet = self._control.recv(PACKET)
                except ConnectionError:
                    packet = b""
                if not packet:
                    asyncio.get_running_loop().remove_reader(self._control)
                    if not self._ready.is_set():
                        self._failure = "a worker died as it started; what it printed says why"
                        self._ready.set()
                    return
                self._heed(json.loads(packet))

    def _heed(self, word: dict[str, Any]) -> None:
        if "taken" in word:
            self.seats.add(word["taken"])
            return
        if "free" in word:
            self.seats.discard(word["free"])
            return
        self._failure = word.get("failed", "")
        self._ready.set()
