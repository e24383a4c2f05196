"""`ProcessSession`: programs one after another in one live CPython."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from sandyard.envs.base import StepStatus
from sandyard.envs.process.inside.driver import ENDED, FRESH
from sandyard.envs.process.lease import Ended, Lease, LinkLost
from sandyard.envs.process.pump import OutputPump
from sandyard.envs.process.result import ProcessResult
from sandyard.errors import DeathReason, SandboxDied

GRACE = 1.0  # seconds that a program has to end after it was interrupted
MAX_SOURCE = 16 << 20


class ProcessSession:
    """Made by `SessionServer.open`. Names that a run binds are there in the next, until the session is over.

    Calls at the same time wait for each other. A run that is cancelled ends the session.
    """

    def __init__(
        self, lease: Callable[[], Awaitable[Lease]], live: Lease, output_limit: int, registry: set[ProcessSession]
    ) -> None:
        self._new_lease = lease
        self._lease: Lease | None = live
        self._output_limit = output_limit
        self._turn = asyncio.Lock()
        self._step = 0
        self._death = ""
        self._registry = registry  # of sessions that hold a link
        registry.add(self)

    @property
    def alive(self) -> bool:
        return self._lease is not None and not self._lease.ended.done()

    async def run(self, source: str, timeout: float = 10.0, *, fresh: bool = False) -> ProcessResult:
        """Run one program for at most `timeout` seconds; `fresh`: as a process of its own in the session, without
        the names of others, of which only files stay.

        A program that runs too long gets a KeyboardInterrupt, and is killed with its session if that does not end
        it. Raises `SandboxDied` when the session is over already: `restart` begins a new one.
        """
        async with self._turn:
            lease = self._lease
            if lease is None or lease.ended.done():
                raise SandboxDied("session", DeathReason.CRASHED, f"{self._death or 'it is closed'}; restart it")
            started = time.monotonic()
            program = source.encode("utf-8", "surrogatepass")
            if len(program) > MAX_SOURCE:
                too_long = f"the program has {len(program)} bytes, more than {MAX_SOURCE}\n"
                return ProcessResult(StepStatus.TASK_FAILED, stderr=too_long, exit_code=1)
            try:
                with OutputPump(self._output_limit) as pump:
                    return await self._run(lease, pump, program, timeout, fresh, started)
            except BaseException:
                await self._end("a run was given up")
                raise

    async def restart(self) -> None:
        """End the session and begin a new one, without names and files. Raises as `SessionServer.open`."""
        async with self._turn:
            await self._end("it was restarted")
            self._lease = await self._new_lease()
            self._death = ""
            self._registry.add(self)

    async def close(self) -> None:
        """End the session; nothing of it is left. Idempotent."""
        async with self._turn:
            await self._end("it is closed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(
        self, lease: Lease, pump: OutputPump, program: bytes, timeout: float, fresh: bool, started: float
    ) -> ProcessResult:
        self._step += 1
        exchange = asyncio.ensure_future(self._exchange(lease, pump, program, fresh))
        flooded = asyncio.ensure_future(pump.tap.flooded.wait())
        stopped = ""
        try:
            await asyncio.wait({exchange, flooded}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done():
                stopped = "it printed without end" if flooded.done() else f"stopped after {timeout:g} s"
                await lease.interrupt()
                await asyncio.wait({exchange}, timeout=GRACE)
                if not exchange.done():
                    await lease.kill()
            try:
                code: int | None = await exchange
                how = ""
            except LinkLost:
                code, how = None, await self._post_mortem(lease)
        finally:
            for task in (exchange, flooded):
                task.cancel()
            await asyncio.gather(exchange, flooded, return_exceptions=True)
        pump.drain()
        return self._result(pump, code, how, stopped, time.monotonic() - started)

    async def _exchange(self, lease: Lease, pump: OutputPump, program: bytes, fresh: bool) -> int:
        await lease.request(self._step, FRESH if fresh else 0, program, pump.writers)
        pump.close_writers()
        kind, number, code = await lease.answer()
        if kind != ENDED or number != self._step & 0xFFFFFFFF:
            raise LinkLost("the program spoke in its session's place")
        return code

    async def _post_mortem(self, lease: Lease) -> str:
        """Why the session is over; it is, when this returns."""
        how = lease.ended.result() if lease.ended.done() else await lease.kill()
        if how.code is None:
            await self._end("the fork server has ended")
            raise SandboxDied("session", DeathReason.HOST, "the fork server has ended")
        reason = _reason(how)
        await self._end(reason)
        return reason

    def _result(self, pump: OutputPump, code: int | None, how: str, stopped: str, took: float) -> ProcessResult:
        lost = self._lease is None
        flooded = pump.tap.flooded.is_set()
        raw = pump.tap.execution(code, timed_out=bool(stopped) and not flooded, duration=took)
        if stopped:
            status = StepStatus.TASK_FAILED if flooded else StepStatus.TIMEOUT
            return ProcessResult(status, raw.stdout, raw.stderr, None, stopped, lost, took)
        if code is None:
            return ProcessResult(StepStatus.TASK_FAILED, raw.stdout, raw.stderr, None, how, lost, took)
        if code < 0:
            return ProcessResult(StepStatus.TASK_FAILED, raw.stdout, raw.stderr, None, _signal_name(-code), lost, took)
        status = StepStatus.OK if code == 0 else StepStatus.TASK_FAILED
        return ProcessResult(status, raw.stdout, raw.stderr, code, "", lost, took)

    async def _end(self, why: str) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        self._death = why
        lease.link.close()
        self._registry.discard(self)
        await asyncio.shield(asyncio.ensure_future(lease.kill()))


def _reason(how: Ended) -> str:
    assert how.code is not None
    if how.memory:
        return "the session was killed: out of memory"
    if how.code < 0:
        return f"the session ended: {_signal_name(-how.code)}"
    return f"the session ended with exit code {how.code}"


def _signal_name(number: int) -> str:
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"
