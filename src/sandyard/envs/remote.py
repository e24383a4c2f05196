"""One sandbox on a server, through the official SDK, with every failure put where it belongs.

Nothing here is retried: an action that may have run is never run again. The SDK lets through what its
transport and its parsers raise, of a dozen types: whatever comes out of a call to it is what the other
side did, and is put on a boundary here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import e2b
from e2b.connection_config import ApiParams

from sandyard.connection import Connection
from sandyard.envs.attribution import explain_create, explain_loss, find_death
from sandyard.envs.base import Execution
from sandyard.envs.output import OutputTap
from sandyard.errors import GuestError, GuestErrorCode

logger = logging.getLogger(__name__)

_CREATE_TIMEOUT = 120.0
_GRACE = 30.0  # a client waits this much longer than the server, so that the server's verdict arrives
_KILL_TIMEOUT = 15.0
_STDIN_CHUNK = 256 << 10
_OPEN_TIMEOUT = 60.0
_FILE_TIMEOUT = 120.0
_DEATH_NOTICE = 0.3
_MAX_COMMAND = 120 << 10  # it is one argument of bash, and the kernel's limit is 128 KiB
_GONE = tuple(
    kind
    for name in ("SandboxNotRunningException", "SandboxUnreachableException", "SandboxNotFoundException")
    if isinstance(kind := getattr(e2b.exceptions, name, None), type)
)
# The SDK's own retries of a create are turned off where it has them: how long to wait for room is
# the caller's decision.
_NO_RETRIES: Mapping[str, Any] = {"retries": 0} if "retries" in ApiParams.__annotations__ else {}


class RemoteSandbox:
    """A running sandbox. Made by `create`; `close` kills it, is idempotent, bounded and shielded."""

    def __init__(self, handle: e2b.AsyncSandbox, connection: Connection) -> None:
        self.handle = handle
        self.connection = connection
        self._closing: asyncio.Task[None] | None = None

    @property
    def sandbox_id(self) -> str:
        return str(self.handle.sandbox_id)

    @classmethod
    async def create(
        cls,
        connection: Connection,
        template: str = "base",
        *,
        timeout: float = 300.0,
        envs: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> RemoteSandbox:
        """Raises `CapacityError`, `CreateFailed`, `NotFound` (template), `Unauthorized`, `BadRequest`."""
        making = asyncio.ensure_future(
            e2b.AsyncSandbox.create(
                template,
                timeout=max(1, round(timeout)),
                envs=dict(envs or {}),
                metadata={key: str(value) for key, value in (metadata or {}).items()},
                request_timeout=_CREATE_TIMEOUT,
                **connection.sdk_options(),
                **_NO_RETRIES,
            )
        )
        try:
            handle = await asyncio.shield(making)
        except asyncio.CancelledError:
            await _kill_when_made(making)
            raise
        except Exception as error:
            raise explain_create(error, template, connection) from error
        return cls(handle, connection)

    async def run(
        self,
        command: str,
        *,
        timeout: float,
        user: str | None = None,
        cwd: str | None = None,
        envs: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        close_stdin: bool = True,
        output_limit: int = 1 << 20,
    ) -> Execution:
        """Run a shell command to its end; a non-zero exit and a timeout are results, not errors.

        `stdin` None means end of file. At most `output_limit` characters of each stream are kept; a
        command whose output passes 16 times that is killed. Raises `SandboxDied` and
        `AgentLinkError`; `GuestError` when the sandbox refused to start the command.
        """
        if not is_shell_text(command):
            raise GuestError(GuestErrorCode.INVALID, "a command cannot hold a null byte or a lone surrogate")
        if len(command.encode()) > _MAX_COMMAND:
            raise GuestError(GuestErrorCode.TOO_BIG, f"a command cannot be longer than {_MAX_COMMAND} bytes")
        tap, started, process = OutputTap(output_limit), time.monotonic(), None
        options: dict[str, Any] = {"user": user, "cwd": cwd, "envs": dict(envs or {}), "stdin": stdin is not None}
        try:
            async with asyncio.timeout(timeout + _GRACE):
                process = await self.handle.commands.run(
                    command,
                    background=True,
                    timeout=timeout,
                    request_timeout=_OPEN_TIMEOUT,
                    on_stdout=tap.stdout.add,
                    on_stderr=tap.stderr.add,
                    **options,
                )
                if stdin is not None:
                    await self._feed(process.pid, stdin, close_stdin)
                exit_code = await self._wait(process, tap)
        except e2b.InvalidArgumentException as error:
            raise GuestError(GuestErrorCode.INVALID, str(error)) from error
        except Exception as error:
            elapsed = time.monotonic() - started
            if process is not None and _is_deadline(error) and elapsed >= timeout - 0.05:
                # The SDK's own clock says so too when the server hangs: then it is not the command's doing.
                died = await find_death(self.sandbox_id, self.connection, str(error))
                if died is not None:
                    raise died from error
                return tap.execution(None, timed_out=True, duration=elapsed)
            raise await explain_loss(error, self.sandbox_id, self.connection) from error
        if exit_code is None and not tap.flooded.is_set():
            # A process ended by a signal may be all that is seen of the sandbox's own end, a moment
            # before the server knows of it.
            await asyncio.sleep(_DEATH_NOTICE)
            died = await find_death(self.sandbox_id, self.connection, "a command ended by a signal")
            if died is not None:
                raise died
        return tap.execution(exit_code, timed_out=False, duration=time.monotonic() - started)

    async def _feed(self, pid: int, data: bytes, close: bool) -> None:
        try:
            for start in range(0, len(data), _STDIN_CHUNK):
                await self.handle.commands.send_stdin(pid, data[start : start + _STDIN_CHUNK])
            if close:
                await self.handle.commands.close_stdin(pid)
        except e2b.NotFoundException:
            # The command ended without reading all; a sandbox that is gone shows in the wait that follows.
            logger.debug("command %d of sandbox %s ended before its stdin was read", pid, self.sandbox_id)

    async def _wait(self, process: Any, tap: OutputTap) -> int | None:
        waiting = asyncio.ensure_future(process.wait())
        flooded = asyncio.ensure_future(tap.flooded.wait())
        try:
            await asyncio.wait({waiting, flooded}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await process.kill()
            return int((await waiting).exit_code)
        except e2b.CommandExitException as ended:
            return int(ended.exit_code) if ended.exit_code >= 0 else None
        finally:
            for task in (waiting, flooded):
                task.cancel()
            await asyncio.gather(waiting, flooded, return_exceptions=True)

    async def write_file(self, path: str, content: str | bytes, *, user: str | None = None) -> None:
        """Write a file, making its directories. Raises `GuestError` when the sandbox refuses the path."""
        if not is_shell_text(path) or (isinstance(content, str) and not _is_unicode(content)):
            raise GuestError(GuestErrorCode.INVALID, "a path or text cannot hold a null byte or a lone surrogate")
        try:
            await self.handle.files.write(path, content, user=user, request_timeout=_FILE_TIMEOUT)
        except (e2b.InvalidArgumentException, e2b.NotFoundException, e2b.NotEnoughSpaceException) as error:
            if isinstance(error, _GONE):
                raise await explain_loss(error, self.sandbox_id, self.connection) from error
            raise GuestError(_file_code(error), str(error)) from error
        except Exception as error:
            raise await explain_loss(error, self.sandbox_id, self.connection) from error

    async def close(self) -> None:
        """Kill the sandbox. Never raises: a kill that fails is logged, and the sandbox's lease and
        lifetime stand behind it."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(_kill(self.handle))
        await asyncio.shield(self._closing)


async def _kill(handle: e2b.AsyncSandbox) -> None:
    try:
        async with asyncio.timeout(_KILL_TIMEOUT):
            await handle.kill()
    except Exception as error:  # noqa: BLE001 - any type: see the page's head
        logger.warning("sandbox %s was not killed, its lifetime will end it: %s", handle.sandbox_id, error)


async def _kill_when_made(making: asyncio.Future[e2b.AsyncSandbox]) -> None:
    """A create that nobody waits for any more: what it made is killed again."""
    try:
        async with asyncio.timeout(_KILL_TIMEOUT):
            handle = await making
    except Exception as error:  # noqa: BLE001 - any type: see the page's head
        logger.warning("a create that was given up did not end cleanly: %s", error)
        return
    await _kill(handle)


def is_shell_text(text: str) -> bool:
    """Whether `text` can stand in a command: no null byte, and UTF-8 can say it."""
    return "\0" not in text and _is_unicode(text)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _is_deadline(error: Exception) -> bool:
    return isinstance(error, e2b.TimeoutException) and not isinstance(error, _GONE)


def _file_code(error: Exception) -> GuestErrorCode:
    if isinstance(error, e2b.NotEnoughSpaceException):
        return GuestErrorCode.NO_SPACE
    return GuestErrorCode.NOT_FOUND if isinstance(error, e2b.NotFoundException) else GuestErrorCode.INVALID
