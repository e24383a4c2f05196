"""Putting one server together from settings, and taking it apart again in the opposite order."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sandyard.config import Settings
from sandyard.errors import ConfigError
from sandyard.images.templates import Template, TemplateStore
from sandyard.network.runtime import networked, permit
from sandyard.runtimes import open_runtime
from sandyard.runtimes.base import Resources, Rootfs, Runtime
from sandyard.sandboxes import FixedTemplates, SandboxManager, TemplateSource, TemplateView
from sandyard.sandboxes.remote import RemoteSnapshots
from sandyard.server.app import Application
from sandyard.server.auth import Keys
from sandyard.server.control.hooks import Hooks
from sandyard.server.tokens import SEED_FILE, SandboxTokens, new_api_key, read_or_make, secrets_dir
from sandyard.store import open_store
from sandyard.store.blobs import open_blobs


class StoredTemplates:
    """The node's templates, as the lifecycle sees them."""

    def __init__(self, settings: Settings) -> None:
        self._store = TemplateStore(settings)
        self._sandbox = settings.sandbox

    def views(self) -> Sequence[TemplateView]:
        return [self._view(template) for template in self._store.list()]

    def _view(self, template: Template) -> TemplateView:
        return TemplateView(
            template.name,
            template.template_id,
            template.rootfs,
            template.created_at,
            template.size_bytes,
            start_cmd=template.start_cmd,
            ready_cmd=template.ready_cmd,
            resources=self._resources(template),
            aliases=template.aliases,
        )

    def _resources(self, template: Template) -> Resources | None:
        """None: the node's default."""
        default = self._sandbox
        if template.memory_mb is None or template.memory_mb <= default.memory_mb:
            return None
        return Resources(default.cpu, template.memory_mb, default.disk_mb, default.pids)


def template_source(settings: Settings) -> TemplateSource:
    """The memory runtime has no files, so its one template needs none."""
    if settings.sandbox.runtime == "memory":
        return FixedTemplates([TemplateView("base", "base", Rootfs(layers=()), time.time(), 0)])
    return StoredTemplates(settings)


@asynccontextmanager
async def application(settings: Settings, runtime: Runtime | None = None) -> AsyncIterator[Application]:
    """A started server without its socket. On exit its sandboxes are destroyed, or left to be adopted
    with `server.keep_sandboxes`."""
    own = runtime or networked(open_runtime(settings), settings)
    store = await open_store(settings)
    try:
        keys = Keys(store)
        await keys.open(settings)
        made_with = await own.check()
        seed = read_or_make(secrets_dir(settings.paths.state) / SEED_FILE, new_api_key())
        manager = SandboxManager(settings, own, template_source(settings), store)
        manager.permit = lambda sandbox: permit(own, sandbox.id, sandbox.network)
        hooks = Hooks.of(settings.extension)
        if hooks is not None:
            manager.extension = hooks
        blobs = open_blobs(settings.blobs)
        if blobs is not None:
            _check_uploads(settings, own)
            manager.remote = RemoteSnapshots(manager, blobs)
        app = Application(manager, keys, SandboxTokens(seed), hooks)
        app.made_with = made_with
        try:
            await manager.start()
            if manager.remote is not None:
                await manager.remote.start()
            await app.builds.start()
            await app.keeper.start()
            app.usage.start()
            yield app
        finally:
            await app.usage.stop()
            await app.keeper.stop()
            await app.builds.stop()
            if manager.remote is not None:
                await manager.remote.stop()
            try:
                await manager.stop(keep=settings.server.keep_sandboxes)
            finally:
                if manager.remote is not None:
                    await manager.remote.close()
                if hooks is not None:
                    await hooks.close()
    finally:
        await store.close()
        if runtime is None:
            await own.close()


def _check_uploads(settings: Settings, runtime: Runtime) -> None:
    """Raises `ConfigError` where every snapshot is to be uploaded, and none can be."""
    if settings.blobs.upload != "off" and runtime.capabilities.memory_snapshot:
        raise ConfigError(
            f"blobs.upload is {settings.blobs.upload}, but snapshots of the runtime {runtime.name} have memory, which "
            "stays on its node",
            remedy="set blobs.upload = off",
        )
