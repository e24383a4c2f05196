"""What is checked of images: the layers of pulled ones, and the node's own templates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from sandyard.config import Settings
from sandyard.images.garbage.base import Checkup, Finding
from sandyard.images.garbage.collect import stray
from sandyard.images.oci.layers import LayerStore
from sandyard.images.templates import TemplateStore
from sandyard.images.treeindex import NAME, differences


class LayersOfImages:
    """`layers-oci`: each is what `files.idx` beside it says."""

    kind = "image layers"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = LayerStore(settings)

    def check(self, *, deep: bool) -> Checkup:
        found = Checkup(self.kind, orphans=list(stray(self._settings)))
        known = {layer.key: layer for layer in self._store.all()}
        for home in _folders(self._store.home):
            layer = known.get(home.name)
            problem: str | None = None
            if layer is None:
                problem = "its layer.json is missing, damaged or another layer's"
            else:
                found.size_bytes += layer.disk_bytes
                problem = compare(home, layer.tree, deep=deep)
            note(found, home.name, home, problem)
        return found


class NodeTemplates:
    """`templates`: what their records name is there, and the files of each state are what was made."""

    kind = "node templates"

    def __init__(self, settings: Settings) -> None:
        self._store = TemplateStore(settings)

    def check(self, *, deep: bool) -> Checkup:
        found = Checkup(self.kind)
        for home in _folders(self._store.home):
            record = home / "template.json"
            if not record.is_file():
                found.orphans.append(Finding(home.name, "it has no template.json: not finished, or deleted", home))
                continue
            current, problem = self._record(record)
            note(found, home.name, home, problem)
            for state in _folders(home):
                if (tree := state / "rootfs").exists():
                    what = home if state.name == current else state  # without its files a template is none
                    note(found, f"{home.name}/{state.name}", what, compare(state, tree, deep=deep))
        if self._store.home.is_dir():
            left = self._store.leftovers()
            found.orphans += [Finding(path.name, "left by a build that was killed", path) for path in left]
        return found

    def _record(self, path: Path) -> tuple[str, str | None]:
        """The id of the current state, and what is wrong with the record."""
        try:
            template = self._store.read(path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return "", f"its template.json cannot be read: {error}"
        except FileNotFoundError:
            return "", None  # it was deleted meanwhile
        missing = [str(layer) for layer in template.rootfs.layers if not os.path.lexists(layer)]
        problem = f"it stands on {missing[0]}, which is not there" if missing and path.exists() else None
        return template.template_id, problem


UNKNOWN = "\0"


def compare(home: Path, tree: Path, *, deep: bool) -> str | None:
    """What is wrong with `tree`, by the index in `home`; `UNKNOWN` where there is no index."""
    if not os.path.lexists(tree):
        return "its files are missing" if home.exists() else None
    try:
        problems = differences(tree, home / NAME, deep=deep)
    except FileNotFoundError:
        return UNKNOWN if home.exists() else None
    return "; ".join(problems) if problems and home.exists() else None


def note(found: Checkup, name: str, path: Path, problem: str | None) -> None:
    """Count one thing, with what is wrong about it."""
    found.count += 1
    if problem == UNKNOWN:
        found.unknown += 1
    elif problem is not None:
        found.damaged.append(Finding(name, problem, path))


def _folders(home: Path) -> Iterator[Path]:
    if home.is_dir():
        for entry in sorted(os.scandir(home), key=lambda entry: entry.name):
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)
