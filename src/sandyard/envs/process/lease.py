"""The host's end of one live session."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sandyard.envs.process.control import writable
from sandyard.envs.process.inside.driver import ANSWER, FAILED, READY, REQUEST
from sandyard.errors import CreateFailed

_MAX_TEXT = 4096


@dataclass(frozen=True, slots=True)
class Ended:
    """How a session or job ended. `code` as `subprocess` has it, None when the fork server ended with it."""

    code: int | None
    memory: bool = False  # the kernel killed for want of memory
    left: str = ""  # what could not be cleaned up


class LinkLost(Exception):
    """The session ended, or said what no session says."""


@dataclass(slots=True)
class Lease:
    """A live session: its link, how it ends, and how to interrupt and to end it."""

    link: socket.socket
    ended: asyncio.Future[Ended]
    interrupt: Callable[[], Awaitable[None]]
    kill: Callable[[], Awaitable[Ended]]

    async def ready(self) -> None:
        """Raises `CreateFailed` naming the stage, `CapacityError` when it was not even forked."""
        try:
            kind, _, length = await self.answer()
            if kind == FAILED and 0 <= length <= _MAX_TEXT:
                raise CreateFailed("confinement", (await self._exactly(length)).decode(errors="replace"))
        except LinkLost as error:
            how = await asyncio.shield(self.ended)
            raise CreateFailed("fork", f"the session ended with {how.code}") from error
        if kind != READY:
            raise CreateFailed("confinement", "the session does not speak")

    async def request(self, number: int, flags: int, source: bytes, descriptors: list[int]) -> None:
        header = REQUEST.pack(number, flags, len(source))
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sent = socket.send_fds(self.link, [header], descriptors)
                    break
                except BlockingIOError:
                    await writable(self.link)
            await loop.sock_sendall(self.link, header[sent:] + source)
        except OSError as error:
            raise LinkLost(str(error)) from error

    async def answer(self) -> tuple[int, int, int]:
        kind, number, value = ANSWER.unpack(await self._exactly(ANSWER.size))
        return kind, number, value

    async def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            try:
                chunk = await asyncio.get_running_loop().sock_recv(self.link, length - len(data))
            except OSError as error:
                raise LinkLost(str(error)) from error
            if not chunk:
                raise LinkLost("end of file")
            data += chunk
        return data
