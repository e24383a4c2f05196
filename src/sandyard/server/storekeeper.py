"""Keeps the layers of images within their watermarks while a server runs, and looks after what is stored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import structlog

from sandyard.config import Settings
from sandyard.errors import HostError
from sandyard.images.garbage.base import Checked, Checkup, check_all, set_aside
from sandyard.images.garbage.checks import LayersOfImages, NodeTemplates
from sandyard.images.garbage.collect import Outcome, collect, node_templates
from sandyard.sandboxes import SandboxManager
from sandyard.sandboxes.remote.checks import SharedLayers
from sandyard.sandboxes.remote.lazy import LazyChecks
from sandyard.sandboxes.storage.checks import BuildCache, CommittedLayers, Foundations
from sandyard.sandboxes.storage.references import References, live

log = structlog.get_logger("sandyard.store")

PERIOD_SECONDS = 60.0
_ANSWER_SECONDS = 30.0
_QUIET_SECONDS = 60.0


class StoreKeeper:
    """Used from one event loop, between `start` and `stop`."""

    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._settings = manager.settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()

    async def start(self) -> None:
        """Remove what killed pulls left, and begin to keep watch."""
        self._loop = asyncio.get_running_loop()
        self._wanted.set()
        self._keeper = asyncio.create_task(self._keep(), name="store-keeper")

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper

    def soon(self) -> None:
        """Something was pulled or built."""
        self._wanted.set()

    def make_room(self, count: int) -> None:
        """A `Collect` for threads of this process, not for that of the event loop."""
        _tell(collect(self._settings, self._in_use, free=count))

    async def collect(self, free: int | None = None, *, dry_run: bool = False) -> Outcome:
        """Remove layers as `garbage.collect` says. Raises `HostError`."""
        try:
            outcome = await asyncio.to_thread(collect, self._settings, self._in_use, free=free, dry_run=dry_run)
        except OSError as error:
            raise HostError(f"layer store: {error}", remedy="check paths.state and its disk") from error
        if not dry_run:
            _tell(outcome)
        return outcome

    async def check(self, *, deep: bool, repair: bool) -> Sequence[Checkup]:
        """What is damaged or nobody's; with `repair` the damaged is set aside. Raises `HostError`."""
        kinds = checked(self._settings, live(self._manager), quiet=_QUIET_SECONDS)
        found = await asyncio.to_thread(checkups, self._settings, kinds, deep=deep, repair=repair)
        for finding in (finding for checkup in found for finding in checkup.damaged):
            log.warning("damaged", name=finding.name, problem=finding.problem, set_aside=repair)
        return found

    def _in_use(self) -> dict[Path, str]:
        """Asked from a thread that holds the store's guard: the event loop never waits for that."""
        assert self._loop is not None  # started

        async def ask() -> dict[Path, str]:
            return live(self._manager).in_use

        known = asyncio.run_coroutine_threadsafe(ask(), self._loop).result(_ANSWER_SECONDS)
        return {**node_templates(self._settings), **known}

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_SECONDS):
                    await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.collect()
            except Exception:  # whatever it is, the next look may be better, and nobody waits for this one
                log.exception("layers could not be collected")


def _tell(outcome: Outcome) -> None:
    if outcome.gone:
        log.info("layers removed", count=len(outcome.gone), bytes=outcome.freed_bytes, used=outcome.used_bytes)


def checked(settings: Settings, references: References, *, quiet: float = 0.0) -> Sequence[Checked]:
    """Every kind that `store verify` looks at."""
    state = settings.paths.state.absolute()
    cache = BuildCache(state / "builds" / "cache.json")
    return [
        LayersOfImages(settings),
        NodeTemplates(settings),
        CommittedLayers(state / "layers", references, cache.layers, quiet=quiet),
        SharedLayers(settings),
        LazyChecks(settings),
        Foundations(state / "layers", references),
        cache,
    ]


def checkups(settings: Settings, kinds: Sequence[Checked], *, deep: bool, repair: bool) -> Sequence[Checkup]:
    """Check, and with `repair` move what is damaged to `<state>/damaged`. Blocking. Raises `HostError`."""
    try:
        found = check_all(kinds, deep=deep)
        for finding in [finding for checkup in found if repair for finding in checkup.damaged]:
            set_aside(finding, settings.paths.state.absolute() / "damaged")
    except OSError as error:
        raise HostError(f"store {settings.paths.state}: {error}", remedy="check its disk") from error
    return found
