"""When the time of a sandbox is over: its lifetime, an idle timeout, the longest pause."""

from __future__ import annotations

import time
from collections.abc import Callable

from sandyard.sandboxes.model import Sandbox
from sandyard.sandboxes.timers import Timers


class Expiry:
    """`over` is called in the event loop with a sandbox whose time is over, and why."""

    def __init__(self, timers: Timers, max_paused: float, over: Callable[[Sandbox, str], None]) -> None:
        self._timers = timers
        self._max_paused = max_paused
        self._over = over

    def arm(self, sandbox: Sandbox, *, rest: float = 0.0) -> None:
        """Set the timers that its state asks for, in place of earlier ones; in `rest` seconds, if any."""
        self.disarm(sandbox)
        if rest:
            self._timers.set(f"end:{sandbox.id}", rest, lambda: self.arm(sandbox))
            return
        if sandbox.paused_at is not None:
            end = sandbox.paused_at + self._max_paused
            detail = f"paused for more than sandbox.max_paused, {self._max_paused:g} s"
        else:
            end, detail = sandbox.end_at, "its lifetime ended"
            if sandbox.idle_timeout is not None:
                self._arm_idle(sandbox, sandbox.idle_timeout)
        self._timers.set(f"end:{sandbox.id}", end - time.time(), lambda: self._over(sandbox, detail))

    def disarm(self, sandbox: Sandbox) -> None:
        self._timers.cancel(f"end:{sandbox.id}")
        self._timers.cancel(f"idle:{sandbox.id}")

    def _arm_idle(self, sandbox: Sandbox, idle_timeout: float) -> None:
        def check() -> None:
            left = sandbox.last_used + idle_timeout - time.monotonic()
            if sandbox.streams or left > 0:
                self._arm_idle(sandbox, idle_timeout)
            else:
                self._over(sandbox, f"idle for {idle_timeout:g} s")

        left = idle_timeout if sandbox.streams else sandbox.last_used + idle_timeout - time.monotonic()
        self._timers.set(f"idle:{sandbox.id}", left, check)
