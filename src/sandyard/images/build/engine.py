"""The step engine: a start, a list of steps, and at the end the layers of a template.

A step runs in a sandbox that starts from the layers so far. After steps that took a while the sandbox's
files become a layer, which the cache keeps under the key of the chain; cheap steps share the next layer.
Steps that the cache knows are not run. The start command is tried at the end, in a sandbox whose changes
are thrown away: it starts anew in every sandbox of the template.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from sandyard.errors import AgentLinkError, BadRequest, GuestError
from sandyard.images.build.accounts import prepare
from sandyard.images.build.base import (
    BASE_STEP,
    Archives,
    BuildFailed,
    Built,
    Cache,
    Cached,
    Level,
    Log,
    Plan,
    State,
    Step,
    Workshop,
)
from sandyard.images.build.chain import chain, reusable
from sandyard.images.build.copying import CopyFailed
from sandyard.images.build.stack import Stack
from sandyard.images.build.start import settle
from sandyard.images.build.steps import run_step

COMMIT_AFTER = 1.0  # seconds of work that are worth a layer of their own
MAX_LAYERS = 40  # runtimes bound the depth; beyond this a build adds one layer only


class Engine:
    """Runs one plan. Everything it opens is closed when `run` ends, however that is."""

    def __init__(self, workshop: Workshop, archives: Archives, cache: Cache, log: Log) -> None:
        self._workshop = workshop
        self._archives = archives
        self._cache = cache
        self._log = log
        self._stack = Stack(workshop, log)

    async def run(self, plan: Plan, *, ready_seconds: float = 600.0) -> Built:
        """Raises `BuildFailed` naming the step; what the workshop raises passes."""
        try:
            return await self._run(plan, ready_seconds)
        finally:
            await asyncio.shield(self._stack.close())

    async def _run(self, plan: Plan, ready_seconds: float) -> Built:
        keys = chain(plan.base, plan.steps)
        known, done = self._known(plan, keys)
        state = State.of(plan.base.rootfs) if known is None else known.state
        self._stack.layers = list(plan.base.rootfs.layers if known is None else known.layers)
        self._stack.size = 0 if known is None else known.size_bytes
        self._log(f"FROM {plan.base.label}", step=BASE_STEP)
        if not self._workshop.has_network:
            self._log("builds have no network on this node", level=Level.DEBUG, step=BASE_STEP)
        for number, step in enumerate(plan.steps[:done], 1):
            self._log(f"CACHED [{number}/{len(plan.steps)}] {_title(step)}", step=str(number))
        if known is None and not await self._prepare():
            self._cache.put(keys[0], Cached(tuple(self._stack.layers), state))
        state = await self._steps(plan, keys, done, state)
        start, ready = plan.start_cmd, plan.ready_cmd
        if start is None and ready is None:
            start, ready = plan.base.start_cmd, plan.base.ready_cmd
        fresh = plan.force or reusable(plan) != len(plan.steps)
        ready = await settle(
            self._stack, self._cache, self._log, keys[-1], state, start, ready, fresh=fresh, ready_seconds=ready_seconds
        )
        return Built(state.rootfs(self._stack.layers), self._stack.size, done, start, ready)

    def _known(self, plan: Plan, keys: Sequence[str]) -> tuple[Cached | None, int]:
        """The longest chain of steps that the cache has, and how many steps it is."""
        for done in range(reusable(plan), -1, -1):
            if not plan.force and (known := self._cache.get(keys[done])) is not None:
                return known, done
        return None, 0

    async def _steps(self, plan: Plan, keys: Sequence[str], done: int, state: State) -> State:
        began = time.monotonic()
        for number in range(done, len(plan.steps)):
            step, name = plan.steps[number], str(number + 1)
            self._log(f"[{name}/{len(plan.steps)}] {_title(step)}", step=name)
            state, changed = await self._step(step, name, state)
            self._stack.dirty = self._stack.dirty or changed
            last = number + 1 == len(plan.steps)
            worth = time.monotonic() - began > COMMIT_AFTER and len(self._stack.layers) < MAX_LAYERS
            if self._stack.dirty and (worth or last):
                await self._commit(keys[number + 1], state, name)
                began = time.monotonic()
            elif last:
                self._cache.put(keys[number + 1], Cached(tuple(self._stack.layers), state, self._stack.size))
        if self._stack.dirty:
            await self._commit(keys[-1], state, BASE_STEP)
        return state

    async def _prepare(self) -> bool:
        """Whether that changed files."""
        try:
            self._stack.dirty = await prepare((await self._stack.open()).agent)
            return self._stack.dirty
        except (GuestError, AgentLinkError, ValueError) as error:
            raise await self._stack.failure(BASE_STEP, error) from error

    async def _step(self, step: Step, name: str, state: State) -> tuple[State, bool]:
        try:
            return await run_step(step, name, state, self._stack.open, self._archives, self._log)
        except BuildFailed as error:
            if error.network_missed and not self._workshop.has_network:
                self._log("it looked for a network, and builds have none on this node", level=Level.WARN, step=name)
            raise await self._stack.failure(name, error) from error
        except (GuestError, AgentLinkError, BadRequest, CopyFailed, ValueError) as error:
            raise await self._stack.failure(name, error, _title(step)) from error

    async def _commit(self, key: str, state: State, step: str) -> None:
        await self._stack.commit(step)
        self._cache.put(key, Cached(tuple(self._stack.layers), state, self._stack.size))


def _title(step: Step) -> str:
    if step.kind in ("ENV", "ARG"):
        pairs = zip(step.args[::2], step.args[1::2], strict=False)
        return f"{step.kind} {' '.join(f'{name}={value}' for name, value in pairs)}"
    shown = " ".join(arg for arg in step.args if arg)
    return f"{step.kind} {shown if len(shown) <= 500 else shown[:500] + '…'}"
