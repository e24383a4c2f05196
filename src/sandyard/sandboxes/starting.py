"""The start command of a template, in every sandbox that is made from it or boots again."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from sandyard.errors import CreateFailed, GuestError, SandyardError
from sandyard.guest.base import Channel, ExitStatus, Process, ProcessSpec
from sandyard.guest.shell import BASH, spawn_shell
from sandyard.runtimes.base import Instance, Rootfs
from sandyard.sandboxes.log import LINE_BYTES, Level, SandboxLog

POLL_FIRST, POLL_LAST = 0.02, 0.5  # seconds between two tries of a ready command
PROBE_SECONDS = 10.0  # one try of it
_SLEEP = re.compile(r"\s*sleep\s+(\d+(?:\.\d+)?)\s*")
USER = "user"
ENVIRONMENT = "/run/sandyard/environment.json"


@dataclass(frozen=True, slots=True)
class StartCommand:
    """`start` is kept running; a sandbox is ready when `ready` succeeds. Both are lines for `bash -l -c`."""

    start: str | None = None
    ready: str | None = None

    def __bool__(self) -> bool:
        return self.start is not None or self.ready is not None

    def record(self) -> dict[str, str]:
        found = {"start_cmd": self.start, "ready_cmd": self.ready}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def of(cls, record: Mapping[str, str]) -> StartCommand:
        return cls(record.get("start_cmd"), record.get("ready_cmd"))


NO_START = StartCommand()


class Starter:
    """Runs start commands and follows their output into logs. `seconds` bounds the wait for readiness."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._followers: set[asyncio.Task[ExitStatus]] = set()

    async def run(self, instance: Instance, command: StartCommand, log: SandboxLog) -> None:
        """Start, and return when the sandbox is ready. The process goes on, with its output in `log`.

        Raises `CreateFailed("start")`; the sandbox is the caller's to destroy."""
        if not command:
            return
        began = time.monotonic()
        following = None
        try:
            if command.start is not None:
                following = self._follow(await _spawn(instance, command.start), log)
            if command.ready is not None and (pause := _SLEEP.fullmatch(command.ready)) is not None:
                await self._let_pass(float(pause[1]), following)
            elif command.ready is not None:
                await self._ready(instance, command.ready, following)
        except GuestError as error:
            raise CreateFailed("start", error.message) from error
        log.append("ready", seconds=f"{time.monotonic() - began:.3f}")

    async def stop(self) -> None:
        """Follow no more; the processes are left alone."""
        for task in list(self._followers):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandyardError):
                await task

    def _follow(self, process: Process, log: SandboxLog) -> asyncio.Task[ExitStatus]:
        task = asyncio.create_task(_follow(process, log))
        self._followers.add(task)
        task.add_done_callback(self._settled)
        return task

    def _settled(self, task: asyncio.Task[ExitStatus]) -> None:
        self._followers.discard(task)
        if not task.cancelled():
            task.exception()  # the link is gone, as its sandbox: whoever holds that knows

    async def _let_pass(self, seconds: float, following: asyncio.Task[ExitStatus] | None) -> None:
        """A ready command that only sleeps asks nothing: it gives the start command time, for as long as that runs."""
        if following is None:
            return
        await asyncio.wait({following}, timeout=min(seconds, self._seconds))
        if following.done():
            _check_start(following)

    async def _ready(self, instance: Instance, ready: str, following: asyncio.Task[ExitStatus] | None) -> None:
        polling = asyncio.create_task(_poll(instance, ready))
        waiting: set[asyncio.Task[object]] = {polling} if following is None else {polling, following}
        deadline = time.monotonic() + self._seconds
        try:
            while not polling.done():
                left = max(deadline - time.monotonic(), 0)
                await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if following is not None and following.done():
                    _check_start(following)
                    waiting = {polling}  # it went into the background
                if not polling.done() and time.monotonic() >= deadline:
                    raise CreateFailed("start", f"the ready command did not succeed within {self._seconds:g} s")
            polling.result()
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandyardError):
                await polling


async def tell_environment(instance: Instance, variables: Mapping[str, str]) -> None:
    """Write the variables a sandbox was asked for with where its start command can read them: that ran
    already when a warm sandbox is handed out. Raises `CreateFailed("start")`, `AgentLinkError`."""
    try:
        await instance.agent.write_file(ENVIRONMENT, json.dumps(dict(variables)).encode())
    except GuestError as error:
        raise CreateFailed("start", f"{ENVIRONMENT}: {error.message}") from error


def _check_start(following: asyncio.Task[ExitStatus]) -> None:
    status = following.result()
    if status != ExitStatus(code=0):
        raise CreateFailed("start", f"the start command ended with {_words(status)} before it was ready")


async def _spawn(instance: Instance, line: str) -> Process:
    rootfs: Rootfs = instance.spec.rootfs
    argv = [BASH, "-l", "-c", line]
    return await spawn_shell(instance.agent, ProcessSpec(argv, rootfs.env, rootfs.workdir, rootfs.user or USER))


async def _poll(instance: Instance, ready: str) -> None:
    pause = POLL_FIRST
    while True:
        process = await _spawn(instance, ready)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                async for _ in process.output():
                    pass  # of no interest: it is asked for success
                if await process.wait() == ExitStatus(code=0):
                    return
        except TimeoutError:
            await _end(process)
        except BaseException:
            await asyncio.shield(_end(process))
            raise
        await asyncio.sleep(pause)
        pause = min(pause * 2, POLL_LAST)


async def _end(process: Process) -> None:
    with contextlib.suppress(SandyardError):  # it ended meanwhile, or its sandbox did
        await process.signal(9)


async def _follow(process: Process, log: SandboxLog) -> ExitStatus:
    log.append("start command runs", pid=str(process.pid))
    lines = {channel: _Lines(log, channel) for channel in Channel}
    try:
        async for channel, data in process.output():
            lines[channel].feed(data)
    finally:
        for each in lines.values():
            each.end()
    status = await process.wait()
    failed = status != ExitStatus(code=0)
    log.append(f"start command ended with {_words(status)}", Level.ERROR if failed else Level.INFO)
    return status


class _Lines:
    """Bytes of one channel, appended to a log line by line."""

    def __init__(self, log: SandboxLog, channel: Channel) -> None:
        self._log = log
        self._channel = channel
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._say(line)
        if len(self._rest) > LINE_BYTES:
            self.flush()

    def end(self) -> None:
        self._rest += self._decoder.decode(b"", True)
        self.flush()

    def flush(self) -> None:
        if self._rest:
            self._say(self._rest)
            self._rest = ""

    def _say(self, line: str) -> None:
        level = Level.WARN if self._channel is Channel.STDERR else Level.INFO
        self._log.append(line.rstrip("\r"), level, stream=self._channel.value, source="start")


def _words(status: ExitStatus) -> str:
    return f"signal {status.signal}" if status.signal is not None else f"exit code {status.code}"
