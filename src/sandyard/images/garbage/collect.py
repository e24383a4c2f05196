"""What of the layers of pulled images goes, and why the rest stays."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.config import Settings
from sandyard.images.garbage.base import Finding
from sandyard.images.oci.downloads import leftovers
from sandyard.images.oci.holds import Held, guard
from sandyard.images.oci.layers import Layer, LayerStore
from sandyard.images.oci.room import Watermarks
from sandyard.images.templates import TemplateStore

# Who stands on a tree: its path, and who that is, for people.
InUse = Mapping[Path, str]
AT_WORK = "a pull or a build that is under way"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`why` it stays; empty where it goes."""

    layer: Layer
    why: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The longest unused first. `used_bytes` before, with what is being written."""

    verdicts: Sequence[Verdict]
    used_bytes: int
    marks: Watermarks

    @property
    def gone(self) -> Sequence[Layer]:
        return [verdict.layer for verdict in self.verdicts if not verdict.why]

    @property
    def freed_bytes(self) -> int:
        return sum(layer.disk_bytes for layer in self.gone)


def node_templates(settings: Settings) -> dict[Path, str]:
    """What the node's own templates stand on. Blocking."""
    templates = TemplateStore(settings).list()
    return {layer: f"template {template.name}" for template in templates for layer in template.rootfs.layers}


def judge(layers: Sequence[Layer], in_use: InUse, held: Held, marks: Watermarks, free: int | None) -> Outcome:
    """What is to go of `layers`, the longest unused first.

    `free`: at least so many bytes, None: whatever is too much by the watermarks. Negative: all that nobody uses."""
    used = sum(layer.disk_bytes for layer in layers) + held.bytes
    if free is None:
        free = used - marks.low if used > marks.high else 0
    verdicts: list[Verdict] = []
    freed = 0
    for layer in layers:
        why = AT_WORK if layer.key in held.keys else in_use.get(layer.tree, "")
        if not why and 0 <= free <= freed:
            why = "nobody uses it, and there is room"
        verdicts.append(Verdict(layer, why))
        freed += 0 if why else layer.disk_bytes
    return Outcome(verdicts, used, marks)


def collect(
    settings: Settings, in_use: Callable[[], InUse], *, free: int | None = None, dry_run: bool = False
) -> Outcome:
    """Remove layers as `judge` says, and what killed pulls left. Blocking, and under the store's guard for a moment:
    `in_use` is asked when nobody can begin to use a layer that nobody uses. Raises `OSError`."""
    store = LayerStore(settings)
    with guard(store.home, exclusive=True):
        held = store.held()  # before the names: what is pulled has one by the time that it is not held any more
        outcome = judge(store.all(), in_use(), held, Watermarks.of(settings), free)
        unlinked = [] if dry_run else [path for layer in outcome.gone if (path := store.unlink(layer)) is not None]
    for path in unlinked:
        shutil.rmtree(path, ignore_errors=True)  # another collection may be at it, and what stays is tidied up
    if not dry_run:
        store.tidy()
        for path in leftovers(settings):
            shutil.rmtree(path, ignore_errors=True)  # another may be at it
    return outcome


def stray(settings: Settings) -> Sequence[Finding]:
    """What killed pulls left; the next `collect` removes it. Blocking."""
    store = LayerStore(settings)
    if not store.home.is_dir():
        return []
    with guard(store.home, exclusive=True):
        found = list(store.leftovers())
    return [Finding(path.name, "left by a pull that was killed", path) for path in (*found, *leftovers(settings))]
