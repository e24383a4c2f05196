"""What a conformance check is made of: a live sandbox, and short ways to ask it something."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest.base import Agent, Channel, ExitStatus, Process, ProcessSpec, PtySize
from sandyard.runtimes.base import Instance, Resources, Rootfs, Runtime, SandboxSpec

COMMAND_TIMEOUT = 30.0
PACE: ContextVar[float] = ContextVar("PACE", default=1.0)
"""`Runtime.pace` of the runtime under check."""


def patience(seconds: float) -> float:
    """A time limit, as long as this runtime may take for it."""
    return seconds * PACE.get()


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command went."""

    stdout: bytes
    stderr: bytes
    status: ExitStatus
    seconds: float

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="surrogateescape").strip()


@dataclass(slots=True)
class Kit:
    """Given to every check. `sandbox` is shared between checks, unless the check asked for its own."""

    runtime: Runtime
    rootfs: Rootfs
    sandbox: Instance
    made: list[str] = field(default_factory=list)

    @property
    def agent(self) -> Agent:
        return self.sandbox.agent

    async def make(self, resources: Resources = Resources(), hostname: str = "sandbox") -> Instance:
        """Another sandbox, destroyed after the check."""
        sandbox_id = f"check{secrets.token_hex(6)}"
        self.made.append(sandbox_id)
        return await self.runtime.create(SandboxSpec(sandbox_id, self.rootfs, resources, hostname))

    async def start(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        cwd: str | None = "/",
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        pty: PtySize | None = None,
        agent: Agent | None = None,
    ) -> Process:
        """Start a command; a string is a bash script."""
        argv = ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)
        return await (agent or self.agent).spawn(ProcessSpec(argv, env or {}, cwd, user, stdin, pty))

    async def run(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        cwd: str | None = "/",
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        agent: Agent | None = None,
        timeout: float = COMMAND_TIMEOUT,
    ) -> Ran:
        """Run a command to its end; a string is a bash script."""
        began = time.monotonic()
        async with asyncio.timeout(patience(timeout)):
            process = await self.start(command, user=user, cwd=cwd, env=env, stdin=stdin is not None, agent=agent)
            feeding = asyncio.ensure_future(_feed(process, stdin))
            out, err = await collect(process)
            await feeding
            status = await process.wait()
        return Ran(out, err, status, time.monotonic() - began)

    async def output(self, command: str | Sequence[str], *, user: str | None = None, agent: Agent | None = None) -> str:
        """What a command prints; it must succeed."""
        ran = await self.run(command, user=user, agent=agent)
        expect(ran.status.code == 0, f"{command!r} gave {ran.status}: {ran.stderr[-300:]!r}")
        return ran.text

    async def python(self, source: str, *, user: str | None = None, agent: Agent | None = None) -> str:
        return await self.output(["python3", "-c", source], user=user, agent=agent)


async def collect(process: Process) -> tuple[bytes, bytes]:
    """All of stdout (or the PTY) and of stderr."""
    out, err = bytearray(), bytearray()
    async for channel, data in process.output():
        (err if channel is Channel.STDERR else out).extend(data)
    return bytes(out), bytes(err)


async def read_until(process: Process, mark: bytes, timeout: float = 10.0) -> bytes:
    """Output up to and including `mark`; the rest of it is given up."""
    seen = bytearray()
    async with asyncio.timeout(patience(timeout)):
        async for _, data in process.output():
            seen += data
            if mark in seen:
                return bytes(seen)
    raise AssertionError(f"output ended without {mark!r}: {bytes(seen[-200:])!r}")


async def refused(work: Awaitable[object], *codes: GuestErrorCode) -> None:
    """The operation must fail inside the sandbox with one of `codes`."""
    try:
        await work
    except GuestError as error:
        expect(error.code in codes, f"failed with {error.code} ({error}), not {' or '.join(codes)}")
    else:
        raise AssertionError(f"succeeded, where {' or '.join(codes)} is due")


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, timeout: float = 5.0) -> None:
    """Wait for a condition that becomes true on its own."""
    deadline = time.monotonic() + patience(timeout)
    while not await condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout} s")
        await asyncio.sleep(0.05)


def expect(condition: object, message: str) -> None:
    """An assertion that `python -O` keeps."""
    if not condition:
        raise AssertionError(message)


async def _feed(process: Process, stdin: bytes | None) -> None:
    if stdin is None:
        return
    for at in range(0, len(stdin), 65536):
        await process.write_stdin(stdin[at : at + 65536])
    await process.close_stdin()
