"""Who stands on which layer: by the database, and by what a server has in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sandyard.store import Store

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager


@dataclass(frozen=True, slots=True)
class References:
    """Layers by path, and who needs each, for people. `builds` are of templates and snapshots that are ready: a
    layer that one names must be there."""

    builds: Mapping[Path, str]
    sandboxes: Mapping[Path, str]

    @property
    def in_use(self) -> dict[Path, str]:
        return {**self.builds, **self.sandboxes}


async def recorded(store: Store) -> References:
    """What the database names: with no server, all there is. Raises `HostError`."""
    templates, builds, _ = await store.catalog.load()
    names = {template.id: f"{template.kind} {(template.names or [template.id])[0]}" for template in templates}
    built = {
        Path(layer): names.get(build.template_id, "a build")
        for build in builds
        if build.status == "ready"
        for layer in build.layers
    }
    living = {Path(layer): f"sandbox {box.id}" for box in await store.living() for layer in box.layers}
    return References(built, living)


def live(manager: SandboxManager) -> References:
    """What a server knows. Call it in its event loop."""
    built = {
        layer: f"{template.kind} {template.name}"
        for template in manager.catalog.all()
        for build in template.builds.values()
        if build.status == "ready"
        for layer in build.rootfs.layers
    }
    used = dict.fromkeys(manager.layers_in_use(), "a sandbox that starts or waits")
    for box in manager.everyone():
        used |= dict.fromkeys(box.instance.spec.rootfs.layers, f"sandbox {box.id}")
    return References(built, used)
