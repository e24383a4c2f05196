"""A client of QEMU's control socket (QMP): one command at a time, events beside them.

The peer has a hostile guest inside it: a line is bounded, an answer has a deadline, and whatever is
not the protocol closes the connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sandyard.errors import SandboxError
from sandyard.runtimes.microvm.said import Odd, number, part, shown

LINE_MAX = 1 << 20
Event = Callable[[str, Mapping[str, Any]], None]
_T = TypeVar("_T")


class QmpError(SandboxError):
    """QEMU refused a command (`kind` is its error class), or the connection is gone (`kind` is "")."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class Qmp:
    """One connection; QEMU serves one at a time. `on_event` is called with each event's name and data; it can be
    replaced. `version` is what its greeting says, such as "7.2.0"; empty where it says none. `name`: whose VMM it is,
    for what is told of it."""

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: socket.socket, on_event: Event
    ) -> None:
        self.name = name
        self.on_event = on_event
        self._reader = reader
        self._writer = writer
        self._socket = own  # another descriptor of the writer's: asyncio sends no descriptors
        self.version = ""
        self._lock = asyncio.Lock()
        self._id = 0
        self._waiting: tuple[int, asyncio.Future[Any]] | None = None
        self._lost: QmpError | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, path: Path, timeout: float, on_event: Event = lambda name, data: None, *, call_timeout: float = 30.0
    ) -> Qmp:
        """Connect and greet within `timeout` seconds. Raises `QmpError`."""
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_unix_connection(str(path), limit=LINE_MAX)
                own = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
                client = cls(path.parent.name, reader, writer, own, on_event)
                try:
                    greeting = await client._line()
                    if "QMP" not in greeting:
                        raise QmpError(f"{path}: the greeting is not QEMU's")
                    client.version = _version(greeting["QMP"])
                    client._task = asyncio.ensure_future(client._read())
                    await client.execute("qmp_capabilities", timeout=call_timeout)
                except BaseException:
                    await client.close()
                    raise
                return client
        except TimeoutError as error:
            raise QmpError(f"QEMU at {path} did not greet within {timeout:g} s") from error
        except OSError as error:
            raise QmpError(f"no QEMU answers at {path}: {error.strerror}") from error

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout: float = 30.0,
        descriptors: Sequence[int] = (),
    ) -> Any:  # what a command returns differs from command to command
        """Run one command and return what it answers. QEMU gets duplicates of `descriptors`. Raises `QmpError`."""
        async with self._lock:
            if self._lost is not None:
                raise self._lost
            self._id += 1
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._waiting = (self._id, answer)
            request = {"execute": command, "id": self._id} | ({"arguments": dict(arguments)} if arguments else {})
            try:
                async with asyncio.timeout(timeout):
                    await self._send(json.dumps(request).encode() + b"\n", descriptors)
                    return await answer
            except TimeoutError as error:
                raise self._error(f"QEMU did not answer {command} within {timeout:g} s") from error
            except OSError as error:
                raise self._error(f"the connection to QEMU broke at {command}: {error}") from error
            finally:
                self._waiting = None

    async def query(
        self,
        command: str,
        read: Callable[[Any], _T],
        arguments: Mapping[str, Any] | None = None,
        *,
        descriptors: Sequence[int] = (),
    ) -> _T:
        """What `read`, which raises `Odd` for what is none, makes of the answer to a command. Raises `QmpError`."""
        said = await self.execute(command, arguments, descriptors=descriptors)
        try:
            return read(said)
        except Odd as error:
            raise self._error(f"QEMU answered {command} with what is no answer: {error}") from error

    async def close(self) -> None:
        """Idempotent."""
        self._fail(self._error("the connection to QEMU was closed"))
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._socket.close()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _send(self, line: bytes, descriptors: Sequence[int]) -> None:
        if descriptors:
            if self._writer.transport.get_write_buffer_size():
                raise self._error("QEMU has not read what it was sent before")
            sent = socket.send_fds(self._socket, [line], list(descriptors))
            line = line[sent:]
        self._writer.write(line)
        await self._writer.drain()

    async def _line(self) -> dict[str, Any]:
        try:
            line = await self._reader.readuntil(b"\n")
            message = json.loads(line)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise self._error("QEMU closed its control connection") from error
        except (asyncio.LimitOverrunError, ValueError, RecursionError) as error:
            raise self._error(f"QEMU sent what is not its protocol: {shown(str(error))}") from error
        if not isinstance(message, dict):
            raise self._error("QEMU sent what is not its protocol: no object")
        return message

    async def _read(self) -> None:
        try:
            while True:
                self._take(await self._line())
        except QmpError as error:
            self._fail(error)

    def _take(self, message: Mapping[str, Any]) -> None:
        if "event" in message:
            name, data = message["event"], message.get("data")
            if isinstance(name, str):
                self.on_event(name, data if isinstance(data, dict) else {})
            return
        if self._waiting is None or message.get("id") != self._waiting[0] or self._waiting[1].done():
            return  # of a command that was given up
        error = message.get("error")
        if isinstance(error, dict):
            kind = shown(error.get("class")) or "GenericError"
            self._waiting[1].set_exception(self._error(f"QEMU: {shown(error.get('desc'))}", kind))
        elif "return" in message:
            self._waiting[1].set_result(message["return"])
        else:
            self._waiting[1].set_exception(self._error("QEMU sent what is not its protocol: an answer without one"))

    def _error(self, message: str, kind: str = "") -> QmpError:
        return QmpError(f"{self.name}: {message}", kind)

    def _fail(self, error: QmpError) -> None:
        self._lost = self._lost or error
        if self._waiting is not None and not self._waiting[1].done():
            self._waiting[1].set_exception(self._lost)


def _version(greeting: Any) -> str:
    try:
        parts = part(part(greeting, "version"), "qemu")
        return ".".join(str(number(part(parts, each))) for each in ("major", "minor", "micro"))
    except Odd:
        return ""
