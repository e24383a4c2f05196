"""Commands of a build: run in its sandbox, their output into its log."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import suppress

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import Agent, Channel, ExitStatus, Process, ProcessSpec
from sandyard.guest.shell import BASH, spawn_shell
from sandyard.images.build.base import BuildFailed, Log, State

LINE_LIMIT = 8192  # characters of one line of the log; the rest of a longer one is dropped
_NO_NETWORK = (
    b"could not resolve",
    b"temporary failure in name resolution",
    b"temporary failure resolving",
    b"name or service not known",
    b"network is unreachable",
    b"bad address",
    b"no route to host",
    b"failed to establish a new connection",
    b"getaddrinfo",
)


async def start_shell(agent: Agent, command: str, state: State, user: str) -> Process:
    """Start `command` in a login bash, else in sh. Raises `GuestError`."""
    return await spawn_shell(agent, ProcessSpec([BASH, "-l", "-c", command], dict(state.env), state.workdir, user))


async def run_shell(agent: Agent, command: str, state: State, user: str, log: Log, step: str) -> None:
    """Run `command` to its end, each line of output logged. Raises `BuildFailed`; its processes are killed then,
    and when this is cancelled."""
    shown = command if len(command) <= 500 else f"{command[:500]}…"
    try:
        process = await start_shell(agent, command, state, user)
    except GuestError as error:
        raise BuildFailed(step, f"failed to run command '{shown}': {_refusal(error, user, state)}") from error
    await watch(process, log, step, f"failed to run command '{shown}': ")


async def watch(process: Process, log: Log, step: str, prefix: str = "") -> None:
    """A command to its end, each line of output logged. Raises `BuildFailed`, as `run_shell` does."""
    lines = Lines(log, step)
    try:
        await lines.take(process)
        status = await process.wait()
    except BaseException:
        await end(process)
        raise
    if status != ExitStatus(code=0):
        failure = BuildFailed(step, f"{prefix}{describe(status)}")
        failure.network_missed = lines.network_missed
        raise failure


def describe(status: ExitStatus) -> str:
    if status.signal is not None:
        return f"killed by signal {status.signal}"
    return f"exit status {status.code}"


async def end(process: Process) -> None:
    """Kill a process and all it started; one that has ended is no error."""
    with suppress(GuestError, AgentLinkError):
        await process.signal(signal.SIGKILL)


async def output_of(agent: Agent, *argv: str) -> tuple[ExitStatus, bytes]:
    """What a command of root says, at most 64 KiB of it. Raises `GuestError` where it cannot start."""
    process = await agent.spawn(ProcessSpec(argv, cwd="/"))
    said = b""
    async for _, data in process.output():
        said = (said + data)[:65536]
    return await process.wait(), said


class Lines:
    """Cuts output into lines of a log; the two channels do not mix within a line."""

    def __init__(self, log: Log, step: str) -> None:
        self.network_missed = False
        self._log = log
        self._step = step
        self._rest: dict[Channel, bytearray] = {}

    async def take(self, process: Process) -> None:
        output: AsyncIterator[tuple[Channel, bytes]] = process.output()
        async for channel, data in output:
            self.feed(channel, data)
        self.flush()

    def feed(self, channel: Channel, data: bytes) -> None:
        rest = self._rest.setdefault(channel, bytearray())
        *whole, last = data.split(b"\n")
        for part in whole:
            self._add(rest, part)
            self._say(rest)
        self._add(rest, last)

    def flush(self) -> None:
        for rest in self._rest.values():
            if rest:
                self._say(rest)

    def _add(self, rest: bytearray, part: bytes) -> None:
        rest += part[: max(LINE_LIMIT * 4 - len(rest), 0)]

    def _say(self, rest: bytearray) -> None:
        lowered = bytes(rest).lower()
        self.network_missed = self.network_missed or any(words in lowered for words in _NO_NETWORK)
        # What a progress bar overwrote is gone on a terminal too.
        text = rest.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")[:LINE_LIMIT]
        self._log(text, step=self._step)
        rest.clear()


def _refusal(error: GuestError, user: str, state: State) -> str:
    if error.code is GuestErrorCode.NO_USER:
        return f"command failed: unauthenticated: invalid username: '{user}'"
    if error.code is GuestErrorCode.NO_CWD:
        return f"command failed: invalid working directory: '{state.workdir}'"
    if error.code is GuestErrorCode.NOT_FOUND:
        return "command failed: the image has neither /bin/bash nor /bin/sh"
    return f"command failed: {error.message}"
