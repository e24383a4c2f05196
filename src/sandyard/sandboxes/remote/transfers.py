"""Which snapshots are on their way, and which lately were: one transfer a build and direction at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import structlog

from sandyard.errors import SandyardError
from sandyard.sandboxes.remote.transfer import Direction, Transfer

log = structlog.get_logger("sandyard.remote")

_KEPT = 200  # finished transfers whose state is still told

Work = Callable[[Transfer], Coroutine[None, None, None]]


class Transfers:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._known: dict[tuple[Direction, str], Transfer] = {}
        self._tasks: dict[tuple[Direction, str], asyncio.Task[None]] = {}

    def of(self, tenant: str) -> Sequence[Transfer]:
        """What is under way and what lately was, the newest first."""
        found = [each for each in self._known.values() if each.tenant == tenant]
        return sorted(found, key=lambda each: each.started_at, reverse=True)

    def note(self, transfer: Transfer) -> None:
        """Tell of it from now on, in place of an earlier one of the same build."""
        self._known.pop((transfer.direction, transfer.build_id), None)
        self._known[transfer.direction, transfer.build_id] = transfer
        old = [key for key, each in self._known.items() if each.finished_at is not None]
        for key in old[: max(0, len(old) - _KEPT)]:
            del self._known[key]

    def begin(self, transfer: Transfer, work: Work) -> Transfer:
        """Do `work` in the background, unless the same is being done: then that one goes on, and is returned."""
        key = transfer.direction, transfer.build_id
        if key in self._tasks:
            return self._known[key]
        self.note(transfer)
        task = asyncio.create_task(work(transfer))
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._ended(transfer, done))
        return transfer

    async def wait(self, transfer: Transfer) -> None:
        """Until it ended; raises what it failed of. Whoever waits may go: the transfer does not end with them."""
        task = self._tasks.get((transfer.direction, transfer.build_id))
        if task is not None:
            await asyncio.shield(task)

    async def stop(self) -> None:
        """What is under way is left where it is."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, transfer: Transfer, task: asyncio.Task[None]) -> None:
        self._tasks.pop((transfer.direction, transfer.build_id), None)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, SandyardError):
            log.error("a transfer failed", transfer=transfer.snapshot_id, error=repr(error))
