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
from pathlib import Path
from typing import NoReturn

from sandyard.errors import AgentLinkError, BadRequest, GuestError, SandyardError
from sandyard.images.build.accounts import prepare
from sandyard.images.build.base import (
    BASE_STEP,
    FINAL_STEP,
    Archives,
    Bench,
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
from sandyard.images.build.chain import chain, reusable, then
from sandyard.images.build.copying import CopyFailed
from sandyard.images.build.start import DEFAULT_READY, try_start
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
        self._bench: Bench | None = None
        self._layers: list[Path] = []
        self._size = 0
        self._dirty = False  # files have changed since the topmost layer

    async def run(self, plan: Plan, *, ready_seconds: float = 600.0) -> Built:
        """Raises `BuildFailed` naming the step; what the workshop raises passes."""
        try:
            return await self._run(plan, ready_seconds)
        finally:
            await asyncio.shield(self._close())

    async def _run(self, plan: Plan, ready_seconds: float) -> Built:
        keys = chain(plan.base, plan.steps)
        known, done = self._known(plan, keys)
        state = State.of(plan.base.rootfs) if known is None else known.state
        self._layers = list(plan.base.rootfs.layers if known is None else known.layers)
        self._size = 0 if known is None else known.size_bytes
        self._log(f"FROM {plan.base.label}", step=BASE_STEP)
        if not self._workshop.has_network:
            self._log("builds have no network on this node", level=Level.DEBUG, step=BASE_STEP)
        for number, step in enumerate(plan.steps[:done], 1):
            self._log(f"CACHED [{number}/{len(plan.steps)}] {_title(step)}", step=str(number))
        if known is None and not await self._prepare():
            self._cache.put(keys[0], Cached(tuple(self._layers), state))
        state = await self._steps(plan, keys, done, state)
        start, ready = plan.start_cmd, plan.ready_cmd
        if start is None and ready is None:
            start, ready = plan.base.start_cmd, plan.base.ready_cmd
        rootfs = state.rootfs(self._layers)
        told = start is not None or ready is not None
        if told and await self._start(plan, keys[-1], state, start, ready, ready_seconds):
            ready = None
        if ready == DEFAULT_READY:
            ready = None  # SDKs write it where nothing is known: no sandbox is to wait for what was seen to come up
        return Built(rootfs, self._size, done, start, ready)

    async def _start(
        self, plan: Plan, key: str, state: State, start: str | None, ready: str | None, seconds: float
    ) -> bool:
        """Try the start command, unless the cache knows how that went: whether nothing is to be waited for after it."""
        tried = then(key, "START", [start, ready])
        over = then(tried, "OVER", [])
        if not plan.force and reusable(plan) == len(plan.steps) and self._cache.get(tried) is not None:
            self._log("CACHED START", step=FINAL_STEP)
            return self._cache.get(over) is not None
        is_over = await self._finish(state, start, ready, seconds)
        for known in [tried, over] if is_over else [tried]:
            self._cache.put(known, Cached(tuple(self._layers), state, self._size))
        return is_over

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
            self._dirty = self._dirty or changed
            last = number + 1 == len(plan.steps)
            worth = time.monotonic() - began > COMMIT_AFTER and len(self._layers) < MAX_LAYERS
            if self._dirty and (worth or last):
                await self._commit(keys[number + 1], state, name)
                began = time.monotonic()
            elif last:
                self._cache.put(keys[number + 1], Cached(tuple(self._layers), state, self._size))
        if self._dirty:
            await self._commit(keys[-1], state, BASE_STEP)
        return state

    async def _prepare(self) -> bool:
        """Whether that changed files."""
        try:
            self._dirty = await prepare((await self._open()).agent)
            return self._dirty
        except (GuestError, AgentLinkError, ValueError) as error:
            await self._fail(BASE_STEP, error)

    async def _step(self, step: Step, name: str, state: State) -> tuple[State, bool]:
        try:
            return await run_step(step, name, state, self._open, self._archives, self._log)
        except BuildFailed as error:
            if error.network_missed and not self._workshop.has_network:
                self._log("it looked for a network, and builds have none on this node", level=Level.WARN, step=name)
            if (why := await self._why_dead()) is not None:
                raise BuildFailed(name, f"{error.message}; the sandbox died: {why}") from error
            raise
        except (GuestError, AgentLinkError, BadRequest, CopyFailed, ValueError) as error:
            await self._fail(name, error, _title(step))

    async def _finish(self, state: State, start: str | None, ready: str | None, seconds: float) -> bool:
        """Whether there is nothing to wait for after the start command."""
        try:
            await self._close()
            bench = await self._open(state)
            return await try_start(bench.agent, state, start, ready, self._log, seconds)
        except (GuestError, AgentLinkError) as error:
            await self._fail(FINAL_STEP, error)
        finally:
            await self._close()

    async def _fail(self, step: str, error: Exception, title: str | None = None) -> NoReturn:
        message = error.message if isinstance(error, SandyardError) else str(error)
        if (why := await self._why_dead()) is not None:
            message = f"the sandbox died: {why}"
        raise BuildFailed(step, f"failed to run {title}: {message}" if title else message) from error

    async def _why_dead(self) -> str | None:
        return await self._bench.why_dead() if self._bench is not None else None

    async def _open(self, state: State | None = None) -> Bench:
        if self._bench is None:
            self._bench = await self._workshop.open((state or State()).rootfs(self._layers))
        return self._bench

    async def _commit(self, key: str, state: State, step: str) -> None:
        assert self._bench is not None  # something changed in it
        began = time.monotonic()
        path, size = await self._bench.commit()
        self._layers.insert(0, path)
        self._dirty = False
        self._size += size
        self._cache.put(key, Cached(tuple(self._layers), state, self._size))
        self._log(f"layer of {size >> 10} KiB kept in {time.monotonic() - began:.2f} s", level=Level.DEBUG, step=step)
        await self._close()

    async def _close(self) -> None:
        bench, self._bench = self._bench, None
        if bench is not None:
            await bench.close()


def _title(step: Step) -> str:
    if step.kind in ("ENV", "ARG"):
        pairs = zip(step.args[::2], step.args[1::2], strict=False)
        return f"{step.kind} {' '.join(f'{name}={value}' for name, value in pairs)}"
    shown = " ".join(arg for arg in step.args if arg)
    return f"{step.kind} {shown if len(shown) <= 500 else shown[:500] + '…'}"
