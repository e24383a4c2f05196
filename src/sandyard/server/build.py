"""Putting one server together from settings, and taking it apart again in the opposite order."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sandyard.config import Settings
from sandyard.images.templates import TemplateStore
from sandyard.runtimes import open_runtime
from sandyard.runtimes.base import Rootfs, Runtime
from sandyard.sandboxes import FixedTemplates, SandboxManager, TemplateSource, TemplateView
from sandyard.server.app import Application
from sandyard.server.auth import Keys
from sandyard.server.tokens import SEED_FILE, SandboxTokens, new_api_key, read_or_make, secrets_dir
from sandyard.store import open_store


class StoredTemplates:
    """The node's templates, as the lifecycle sees them."""

    def __init__(self, store: TemplateStore) -> None:
        self._store = store

    def views(self) -> Sequence[TemplateView]:
        return [TemplateView(t.name, t.template_id, t.rootfs, t.created_at, t.size_bytes) for t in self._store.list()]


def template_source(settings: Settings) -> TemplateSource:
    """The memory runtime has no files, so its one template needs none."""
    if settings.sandbox.runtime == "memory":
        return FixedTemplates([TemplateView("base", "base", Rootfs(layers=()), time.time(), 0)])
    return StoredTemplates(TemplateStore(settings))


@asynccontextmanager
async def application(settings: Settings, runtime: Runtime | None = None) -> AsyncIterator[Application]:
    """A started server without its socket. On exit its sandboxes are destroyed, or left to be adopted
    with `server.keep_sandboxes`."""
    own = runtime or open_runtime(settings)
    store = await open_store(settings)
    try:
        keys = Keys(store)
        await keys.open(settings)
        seed = read_or_make(secrets_dir(settings.paths.state) / SEED_FILE, new_api_key())
        manager = SandboxManager(settings, own, template_source(settings), store)
        app = Application(manager, keys, SandboxTokens(seed))
        try:
            await manager.start()
            app.usage.start()
            yield app
        finally:
            await app.usage.stop()
            await manager.stop(keep=settings.server.keep_sandboxes)
    finally:
        await store.close()
        if runtime is None:
            await own.close()
