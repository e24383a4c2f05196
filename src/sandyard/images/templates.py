"""The templates of a node: unpacked root file systems, by name.

`<state>/templates/<name>/<template id>/rootfs` holds the files (for a template that was made in a sandbox
from another one: what it adds to that one's), `files.idx` beside it says what it held when it was made, and
`<state>/templates/<name>/template.json` says which of them is current. All appear by rename: a crash leaves a
`.building-*` directory at most, which the next build removes.
"""

from __future__ import annotations

import asyncio
import difflib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandyard.config import Settings
from sandyard.errors import BadRequest, Conflict, NotFound
from sandyard.images.tarball import unpack
from sandyard.images.treeindex import NAME as INDEX
from sandyard.images.treeindex import write_index
from sandyard.runtimes.base import Rootfs

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_BUILDING = ".building-"


@dataclass(frozen=True, slots=True)
class Template:
    name: str
    template_id: str
    rootfs: Rootfs
    created_at: float  # seconds since the epoch
    size_bytes: int
    source: str  # where it came from, for people
    recipe: str = ""  # the hash of what it was made from
    aliases: Sequence[str] = ()  # other names it is found by
    start_cmd: str | None = None
    ready_cmd: str | None = None
    memory_mb: int | None = None  # what its sandboxes need, where that is more than the node's default


@dataclass(frozen=True, slots=True)
class Origin:
    """What is recorded about a tree when it becomes a template."""

    source: str
    recipe: str
    size_bytes: int
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    below: Sequence[Path] = ()  # layers of the template it was made from, the topmost first
    aliases: Sequence[str] = ()
    start_cmd: str | None = None
    ready_cmd: str | None = None
    memory_mb: int | None = None


class TemplateStore:
    """Templates below `settings.paths.state`. Reading needs no lock; one process builds at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.home = settings.paths.state.absolute() / "templates"

    def list(self) -> Sequence[Template]:
        """Every usable template, by name."""
        if not self.home.is_dir():
            return []
        names = sorted(entry.name for entry in os.scandir(self.home) if _NAME.fullmatch(entry.name))
        return [template for name in names if (template := self._load(name)) is not None]

    def get(self, name: str) -> Template:
        """The template of that name or id. Raises `NotFound` with near names."""
        templates = self.list()
        for template in templates:
            if name in (template.name, template.template_id, *template.aliases):
                return template
        near = difflib.get_close_matches(name, [template.name for template in templates], n=3)
        hint = f"did you mean {', '.join(near)}?" if near else _what_there_is(templates)
        raise NotFound(f"template {name!r} does not exist", remedy=hint)

    def find(self, name: str) -> Template | None:
        """The template of exactly that name, if there is one."""
        return self._load(name) if _NAME.fullmatch(name) else None

    async def import_tarball(
        self,
        name: str,
        archive: Path,
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
    ) -> Template:
        """Make a template from a root file system's tar archive.

        Raises `BadRequest` (a bad name or archive) or `Conflict` (the name is taken).
        """
        check_name(name)
        if self.find(name) is not None:
            raise Conflict(f"template {name!r} exists already", remedy="delete it first or take another name")

        return await asyncio.to_thread(self.unpack_tarball, name, archive, env, workdir, user)

    def unpack_tarball(
        self,
        name: str,
        archive: Path,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
    ) -> Template:
        """`import_tarball`, also in place of a template of that name. Blocking."""
        with self.building() as (scratch, _):
            size = unpack(archive, scratch / "rootfs", self.settings.container.uid_base)
            origin = Origin(f"tarball {archive}", "", size, env or {}, workdir, user)
            return self.install(name, scratch / "rootfs", origin)

    def delete(self, name: str) -> None:
        """Forget a template. Sandboxes that run from it keep what they have open only: stop them first.

        Raises `NotFound`, and `Conflict` where another template is made from it."""
        if self.find(name) is None:
            raise NotFound(f"template {name!r} does not exist")
        for other in self.list():
            if other.name != name and any((self.home / name) in layer.parents for layer in other.rootfs.layers):
                raise Conflict(f"template {other.name!r} is made from {name!r}", remedy="delete that one first")
        (self.home / name / "template.json").unlink()
        shutil.rmtree(self.home / name)

    @contextmanager
    def building(self) -> Iterator[tuple[Path, int]]:
        """A scratch directory for one build, and the descriptor of the lock that covers it.

        Blocking while another process builds. A child that writes into the directory should
        inherit the descriptor, so that the lock outlives a killed parent.
        """
        self.home.mkdir(mode=0o711, parents=True, exist_ok=True)
        with open(self.home / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for entry in self.home.glob(f"{_BUILDING}*"):
                shutil.rmtree(entry)  # of a build that was killed: the lock says it runs no more
            scratch = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self.home))
            try:
                yield scratch, lock.fileno()
            finally:
                shutil.rmtree(scratch, ignore_errors=False)

    def install(self, name: str, rootfs: Path | None, origin: Origin) -> Template:
        """Make a finished tree (or a layer that a runtime made) the current template `name`, or what `origin.below`
        has where there is none. Call inside `building`.

        The one before stays, since sandboxes may run from it, and so do those that other templates are
        made from; what is older goes.
        """
        check_name(name)
        before = self.find(name)
        template_id = os.urandom(8).hex()
        home = self.home / name
        (home / template_id).mkdir(mode=0o711, parents=True)
        if rootfs is not None:
            write_index(rootfs, home / template_id / INDEX)
            rootfs.rename(home / template_id / "rootfs")
        record: dict[str, Any] = {
            "name": name,
            "template_id": template_id,
            "created_at": time.time(),
            "size_bytes": origin.size_bytes,
            "source": origin.source,
            "recipe": origin.recipe,
            "env": dict(origin.env),
            "workdir": origin.workdir,
            "user": origin.user,
            "own": rootfs is not None,
            "below": [os.path.relpath(layer, self.home) for layer in origin.below],
            "aliases": list(origin.aliases),
            "start_cmd": origin.start_cmd,
            "ready_cmd": origin.ready_cmd,
            "memory_mb": origin.memory_mb,
        }
        draft = home / ".template.json"
        draft.write_text(json.dumps(record, indent=1))
        draft.rename(home / "template.json")
        keep = {template_id, before.template_id if before else ""}
        keep |= {layer.parent.name for template in self.list() for layer in template.rootfs.layers}
        for entry in list(os.scandir(home)):
            if entry.is_dir(follow_symlinks=False) and entry.name not in keep:
                shutil.rmtree(entry.path)
        return self._parse(record)

    def leftovers(self) -> Sequence[Path]:
        """What builds left that were killed: the next one removes it. Blocking, and for a moment nobody can build."""
        with open(self.home / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return []  # one is at work, and it is its own
            return list(self.home.glob(f"{_BUILDING}*"))

    def read(self, record: Path) -> Template:
        """What a `template.json` says, whether or not what it names is there.

        Raises `OSError`, and `ValueError`, `KeyError` or `TypeError` for a damaged one."""
        return self._parse(json.loads(record.read_text()))

    def _load(self, name: str) -> Template | None:
        try:
            template = self.read(self.home / name / "template.json")
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None  # half deleted, or never finished
        return template if all(layer.exists() for layer in template.rootfs.layers) else None

    def _parse(self, record: Mapping[str, Any]) -> Template:
        layers = [self.home / record["name"] / record["template_id"] / "rootfs"] if record.get("own", True) else []
        layers += [Path(os.path.normpath(self.home / name)) for name in record.get("below", ())]
        return Template(
            name=record["name"],
            template_id=record["template_id"],
            rootfs=Rootfs(layers, record["env"], record["workdir"], record["user"]),
            created_at=record["created_at"],
            size_bytes=record["size_bytes"],
            source=record["source"],
            recipe=record["recipe"],
            aliases=tuple(record.get("aliases", ())),
            start_cmd=record.get("start_cmd"),
            ready_cmd=record.get("ready_cmd"),
            memory_mb=record.get("memory_mb"),
        )


def check_name(name: str) -> None:
    """Raise `BadRequest` unless `name` can name a template."""
    if not _NAME.fullmatch(name):
        raise BadRequest(f"template name {name!r}: use a-z, 0-9, '.', '_' and '-', up to 63", field="name")


def _what_there_is(templates: Sequence[Template]) -> str:
    if not templates:
        return "there is none yet: run sandyard setup"
    return f"there are: {', '.join(template.name for template in templates[:8])}"
