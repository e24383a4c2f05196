"""Who may have a sandbox now: a count, or the host's memory with honest overcommit."""

from __future__ import annotations

import time
from collections import deque

from sandyard.config import Settings
from sandyard.errors import BadRequest, CapacityError
from sandyard.runtimes.base import Resources, Runtime
from sandyard.runtimes.room import host_memory

HOST_SHARE_MB = 1024  # what the host itself, this server and the trainer beside it need
_START_SECONDS = 5.0  # after which the host's own figure shows what a sandbox took as it started
_FRESH_SECONDS = 0.25  # for which the host's own figure is good


class Admission:
    """Counts places. A place is taken before anything is made, and given back after it is gone.

    With `sandbox.max_count` set that many sandboxes fit. Else the sum of their memory limits may
    reach `sandbox.memory_overcommit` times the host's memory less 1 GiB: a limit is what a sandbox
    may use, not what it uses. It is the limit on the host, with `Runtime.above_mb`; what stands ready for the next
    starts counts as what it has. Either way none is admitted while the host is short of memory, with what those that
    are starting will take.
    """

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        self._runtime = runtime
        self._max_count = settings.sandbox.max_count
        total, _ = host_memory()
        self._total_mb = total
        self._budget_mb = int(max(total - HOST_SHARE_MB, total // 2) * settings.sandbox.memory_overcommit)
        self._default_mb = settings.sandbox.memory_mb
        self._floor_mb = min(256, total // 16)
        self.count = 0
        self.memory_mb = 0
        self._available = (0.0, 0)
        self._starting: deque[float] = deque()

    @property
    def max_count(self) -> int:
        """How many sandboxes of the default size fit on an idle host."""
        return self._max_count or max(self._budget_mb // (self._default_mb + self._runtime.above_mb), 1)

    @property
    def budget_mb(self) -> int:
        """What the memory limits of all sandboxes may sum up to; 0: only their number counts."""
        return 0 if self._max_count else self._budget_mb

    def promised_mb(self, resources: Resources) -> int:
        """What a sandbox of this size may take of the host's memory."""
        return resources.memory_mb + self._runtime.above_mb

    def check(self, resources: Resources) -> None:
        """Raises `BadRequest` where a sandbox of this size has no room here, whatever else goes."""
        if (why := self._too_big(resources)) is not None:
            raise BadRequest(
                why, field="memoryMB", remedy="ask for less memory (a template has its own, else sandbox.memory_mb)"
            )

    def _too_big(self, resources: Resources) -> str | None:
        """A microVM's memory is mapped at once; of a container it is a limit, which may be any."""
        most = self._total_mb - self._runtime.above_mb
        if not self._runtime.capabilities.own_kernel or resources.memory_mb <= most:
            return None
        return f"a sandbox of {resources.memory_mb} MiB of memory is more than this host can have, {most} MiB"

    def shortage(self, resources: Resources) -> str | None:
        """Why a sandbox of this size cannot be placed now; None if it can."""
        if (why := self._too_big(resources)) is not None:
            return why
        if self._max_count:
            if self.count >= self._max_count:
                return f"all {self._max_count} places are taken (sandbox.max_count)"
        elif (over := self._over_budget(resources)) is not None:
            return over
        available = self._host_available()
        if available < self._floor_mb:
            return f"the host has only {available} MiB of memory left"
        if available - (soon := self._taken_soon()) < self._floor_mb:
            return f"the host has only {available} MiB of memory left, of which {soon} MiB are for starts under way"
        return None

    async def let_go(self, resources: Resources) -> bool:
        """Where a sandbox of this size cannot be placed for want of memory, end what stands ready for starts; whether
        anything did. Then it is worth another look."""
        full = self._max_count and self.count >= self._max_count
        if full or self.shortage(resources) is None or not self._runtime.ready_bytes():
            return False
        await self._runtime.rest()
        self._available = (0.0, 0)
        return True

    def _over_budget(self, resources: Resources) -> str | None:
        more, ready = self.promised_mb(resources), self._runtime.ready_bytes() >> 20
        if self.memory_mb + more + ready <= self._budget_mb:
            return None
        beside = f", {ready} MiB stand ready for starts," if ready else ""
        return (
            f"memory limits of {self.count} sandboxes sum up to {self.memory_mb} MiB{beside} and {more} MiB "
            f"more would pass {self._budget_mb} MiB (host memory x sandbox.memory_overcommit)"
        )

    def take(self, resources: Resources, retry_after: float = 1.0) -> None:
        """Take a place. Raises `CapacityError` saying why there is none."""
        why = self.shortage(resources)
        if why is not None:
            raise CapacityError(f"no room for another sandbox: {why}", retry_after=retry_after)
        self.hold(resources, starts=True)

    def hold(self, resources: Resources, *, starts: bool = False) -> None:
        """Take a place without asking: for what already lives, or `starts` now and was asked for."""
        self.count += 1
        self.memory_mb += self.promised_mb(resources)
        if starts and self._runtime.start_mb:
            self._starting.append(time.monotonic())

    def release(self, resources: Resources) -> None:
        self.count -= 1
        self.memory_mb -= self.promised_mb(resources)

    def _taken_soon(self) -> int:
        """MiB that the last starts are about to take."""
        while self._starting and time.monotonic() - self._starting[0] > _START_SECONDS:
            self._starting.popleft()
        return len(self._starting) * self._runtime.start_mb

    def _host_available(self) -> int:
        now = time.monotonic()
        if now - self._available[0] > _FRESH_SECONDS:
            self._available = (now, host_memory()[1])
        return self._available[1]
