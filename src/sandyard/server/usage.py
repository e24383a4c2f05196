"""What sandboxes use, over time: a short history each, sampled in the background and when asked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from sandyard.errors import SandboxDied, SandyardError
from sandyard.runtimes.base import Usage
from sandyard.sandboxes import Sandbox, SandboxManager, State

log = structlog.get_logger("sandyard.usage")

SAMPLE_SECONDS = 15.0
KEPT = 240  # an hour
FRESH_SECONDS = 1.0
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """`at` in seconds since the epoch; `cpu_percent` of one core since the sample before."""

    at: float
    usage: Usage
    cpu_percent: float


class UsageHistory:
    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._samples: dict[str, deque[Sample]] = {}
        self._task: asyncio.Task[None] | None = None
        manager.on_death.append(self._forget)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="usage")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def now(self, sandbox: Sandbox) -> Sample:
        """A sample not older than a second."""
        history = self._samples.setdefault(sandbox.id, deque(maxlen=KEPT))
        at = time.time()
        if history and at - history[-1].at < FRESH_SECONDS:
            return history[-1]
        usage = await sandbox.instance.usage()
        before_at, before_cpu = (
            (history[-1].at, history[-1].usage.cpu_seconds) if history else (sandbox.started_at, 0.0)
        )
        percent = max(usage.cpu_seconds - before_cpu, 0.0) / max(at - before_at, 0.001) * 100
        sample = Sample(at, usage, round(percent, 2))
        history.append(sample)
        return sample

    async def between(self, sandbox: Sandbox, start: float | None, end: float | None) -> Sequence[Sample]:
        """Samples within a window (seconds since the epoch), oldest first. While paused none is added."""
        if sandbox.state is State.RUNNING:
            await self.now(sandbox)
        low, high = start if start is not None else 0.0, end if end is not None else float("inf")
        return [sample for sample in self._samples.get(sandbox.id, ()) if low <= sample.at <= high]

    def _forget(self, sandbox: Sandbox, _death: SandboxDied) -> None:
        self._samples.pop(sandbox.id, None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            # Side by side: what one guest takes its time to answer, or does not, is not for the others to wait for.
            await asyncio.gather(*(self._sample(sandbox) for sandbox in self._manager.all()))

    async def _sample(self, sandbox: Sandbox) -> None:
        try:
            async with asyncio.timeout(SAMPLE_SECONDS):
                await self.now(sandbox)
        except (SandyardError, TimeoutError) as error:
            log.info("no sample", sandbox=sandbox.id, error=str(error))
