"""Every template, snapshot and build this node knows, and the layers they are made of.

A template has builds; a tag names one of them, `default` unless another is asked for. A snapshot is
a template whose only build is the state of a sandbox. Templates of the node itself (`base`) come from
a `TemplateSource`: everyone's to use, nobody's to change.

The catalog is read from memory and written through: what a method returned is in the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sandyard.errors import BadRequest, Conflict, NotFound
from sandyard.runtimes.base import Resources, Rootfs, Runtime
from sandyard.sandboxes.model import new_id
from sandyard.sandboxes.templates import TemplateSource, TemplateView
from sandyard.store import BuildRecord, TagRecord, TemplateRecord
from sandyard.store.catalog import CatalogTables

DEFAULT_TAG = "default"
# What clients ask for by themselves: the node's or one's own, never what somebody else published.
STANDARD_NAMES = frozenset({"base", "code-interpreter", "code-interpreter-v1", "desktop"})
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_TAG = re.compile(r"[a-z0-9_.-]{1,128}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_GOING = "going-"  # no layer has such a name
_NAMESPACE = uuid.UUID("6f1cf4e4-6d1c-4e3e-9b67-2f6a1a1c1f5a")  # for build ids of the node's own templates


@dataclass(frozen=True, slots=True)
class Build:
    """`status`: waiting, building, ready, error. `config` holds start_cmd, ready_cmd and resources where the
    build sets them, and memory where the topmost layer has it."""

    id: str
    template_id: str
    status: str
    rootfs: Rootfs
    config: Mapping[str, Any]
    created_at: float
    finished_at: float | None = None
    reason: Mapping[str, Any] | None = None
    size_bytes: int = 0


@dataclass(slots=True, eq=False)
class Template:
    """`builds` and `tags` (tag to build id and the time it was set) by age, the oldest first."""

    id: str
    tenant: str | None  # None: the node's own
    kind: str
    names: list[str]
    public: bool
    created_at: float
    updated_at: float
    source: str | None = None
    builds: dict[str, Build] = field(default_factory=dict)
    tags: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0] if self.names else self.id

    def visible(self, tenant: str | None) -> bool:
        """`tenant` None: whoever asks on the node's own behalf."""
        return tenant is None or self.public or self.tenant in (None, tenant)

    def build(self, tag: str) -> Build | None:
        """By tag or by build id."""
        build_id, _ = self.tags.get(tag, (tag, 0.0))
        return self.builds.get(build_id)


@dataclass(frozen=True, slots=True)
class Reference:
    """`[namespace/]name[:tag]` as typed; `tag` None where none was."""

    name: str
    tag: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Raises `BadRequest` for a tag no template can have."""
        return cls(*cls.split(text))

    @staticmethod
    def split(text: str) -> tuple[str, str | None]:
        """Name, without its namespace, and tag."""
        name, colon, tag = text.strip().partition(":")
        return name.rpartition("/")[2].lower(), check_tag(tag) if colon else None


def check_tag(tag: str) -> str:
    """The tag in lower case. Raises `BadRequest`. A build id passes, for lookups."""
    tag = tag.strip().lower()
    if not _TAG.fullmatch(tag):
        raise BadRequest(f"tag '{tag}': use a-z, 0-9, '.', '_' and '-', up to 128", field="tag")
    return tag


def check_new_tag(tag: str) -> str:
    """A tag that may be given: not one that looks like a build id. Raises `BadRequest`."""
    tag = check_tag(tag)
    if _UUID.fullmatch(tag):
        raise BadRequest(f"tag '{tag}' is a UUID, as build ids are: take another", field="tag")
    return tag


def check_name(name: str) -> str:
    """Raises `BadRequest`."""
    name = name.strip().lower()
    if not _NAME.fullmatch(name):
        raise BadRequest(f"name '{name}': use a-z, 0-9, '.', '_' and '-', up to 128", field="name")
    return name


class Catalog:
    """Used from one event loop, after `load`."""

    def __init__(self, source: TemplateSource, tables: CatalogTables, layers: Path) -> None:
        self._source = source
        self._tables = tables
        self._layers = layers
        self._templates: dict[str, Template] = {}
        self._node: Sequence[Template] = ()
        self._node_views: dict[str, TemplateView] = {}
        self._node_read_at = -1e9
        self._parents: dict[Path, Path] = {}  # of layers that are differences
        self._shed: set[Path] = set()  # what merged layers do not need any more
        self._reserved: set[Path] = set()
        self._reservations: list[Path] = []  # several may be of one name: it is free after the last
        self._going: set[Path] = set()
        self.on_drop: Callable[[], None] = lambda: None  # there may be layers to collect, or to compact
        # Of builds that no tag names any more, and the one that has their tag now.
        self.on_replace: Callable[[Collection[str], Template, Build], None] = lambda _old, _template, _new: None

    async def load(self) -> None:
        """Read the database. Builds that an earlier server did not finish are errors now."""
        templates, builds, tags = await self._tables.load()
        self._templates = {
            r.id: Template(r.id, r.tenant, r.kind, list(r.names), r.public, r.created_at, r.updated_at, r.source)
            for r in templates
        }
        for record in sorted(builds, key=lambda b: b.created_at):
            if (template := self._templates.get(record.template_id)) is not None:
                template.builds[record.id] = _build(record)
        for tag in sorted(tags, key=lambda t: t.created_at):
            if (template := self._templates.get(tag.template_id)) is not None:
                template.tags[tag.tag] = (tag.build_id, tag.created_at)
        for template in self._templates.values():
            for build in list(template.builds.values()):
                if build.status in ("waiting", "building"):
                    reason = {"message": "the server was stopped while this was being built"}
                    await self.put_build(replace(build, status="error", reason=reason, finished_at=time.time()))

    # --- reading ---

    def all(self, tenant: str | None = None) -> Sequence[Template]:
        """Templates and snapshots that `tenant` sees, the newest first; without a tenant, everyone's."""
        self._read_node(1.0)
        found = [t for t in (*self._node, *self._templates.values()) if t.visible(tenant)]
        return sorted(found, key=lambda t: (t.created_at, t.id), reverse=True)

    def find(self, text: str, tenant: str | None = None) -> Template:
        """By name or id; a tag is ignored. Raises `NotFound` with near names."""
        wanted = Reference.parse(text).name
        self._read_node(1.0)
        found = self._match(wanted, tenant)
        if found is None:
            self._read_node(0.0)  # it may have been made within the last second
            found = self._match(wanted, tenant)
        if found is None:
            raise NotFound(f"template '{text}' not found", remedy=self._hint(wanted, tenant))
        return found

    def by_id(self, template_id: str) -> Template | None:
        """Whosever it is; no name is taken for an id."""
        self._read_node(1.0)
        if (found := self._templates.get(template_id)) is not None:
            return found
        return next((template for template in self._node if template.id == template_id), None)

    def resolve(self, text: str, tenant: str | None = None) -> tuple[Template, Build]:
        """The template and its ready build: by tag, by build id, else by `default`, else the newest.

        Raises `NotFound`."""
        reference = Reference.parse(text)
        template = self.find(text, tenant)
        build = template.build(reference.tag or DEFAULT_TAG)
        if build is None and reference.tag is None and not template.tags:
            build = next((b for b in reversed(template.builds.values()) if b.status == "ready"), None)
        if build is None or build.status != "ready":
            tag = reference.tag or DEFAULT_TAG
            raise NotFound(
                f"tag '{tag}' does not exist for template '{reference.name}'",
                remedy=f"its tags: {', '.join(sorted(template.tags)) or 'none; no build of it is ready'}",
            )
        return template, build

    def get(self, text: str, tenant: str | None = None) -> TemplateView:
        """What to start a sandbox from. Raises `NotFound`."""
        template, build = self.resolve(text, tenant)
        return self.view(template, build)

    def view(self, template: Template, build: Build) -> TemplateView:
        if (node := self._node_views.get(build.id)) is not None:
            return node
        sizes = build.config.get("resources")
        return TemplateView(
            name=template.name,
            template_id=template.id,
            rootfs=build.rootfs,
            created_at=template.created_at,
            size_bytes=build.size_bytes,
            build_id=build.id,
            start_cmd=build.config.get("start_cmd"),
            ready_cmd=build.config.get("ready_cmd"),
            resources=Resources(**sizes) if sizes else None,
            memory=bool(build.config.get("memory")),
        )

    # --- writing ---

    async def add_template(
        self,
        tenant: str,
        kind: str,
        names: Sequence[str] = (),
        *,
        source: str | None = None,
        public: bool = False,
        template_id: str | None = None,
    ) -> Template:
        """`template_id`: one that it has elsewhere, and that no template here has.

        Raises `Conflict` where a name, or that id, is taken and `BadRequest` for a bad name."""
        if template_id is not None and self.by_id(template_id) is not None:
            raise Conflict(f"there is a template {template_id} already", remedy="delete that one first")
        names = [check_name(name) for name in names]
        for name in names:
            if (other := self._taken(name, tenant)) is not None:
                raise Conflict(f"name '{name}' already points to template {other.id}", remedy="delete that one first")
        now = time.time()
        template = Template(template_id or new_id(), tenant, kind, list(names), public, now, now, source)
        self._templates[template.id] = template  # before the wait, so that the name is taken
        try:
            await self._put(template)
        except BaseException:
            self._templates.pop(template.id, None)
            raise
        return template

    async def set_public(self, template: Template, public: bool) -> None:
        template.public = public
        template.updated_at = time.time()
        await self._put(template)

    async def put_build(self, build: Build) -> Build:
        """Add a build, or replace the one of the same id. Raises `NotFound` where its template was deleted."""
        template = self._templates.get(build.template_id)
        if template is None:
            raise NotFound(f"template '{build.template_id}' was deleted")
        await self._tables.put_build(_build_record(build))
        template.builds[build.id] = build
        return build

    async def set_tags(self, template: Template, build_id: str, tags: Sequence[str]) -> None:
        """Point tags to a build, wherever they pointed before."""
        now = time.time()
        left = {template.tags[tag][0] for tag in tags if tag in template.tags}
        await self._tables.put_tags([TagRecord(template.id, tag, build_id, now) for tag in tags])
        for tag in tags:
            template.tags[tag] = (build_id, now)
        template.updated_at = now
        await self._put(template)
        left -= {named for named, _ in template.tags.values()}
        if left and (build := template.builds.get(build_id)) is not None:
            self.on_replace(left, template, build)

    async def drop_tags(self, template: Template, tags: Sequence[str]) -> None:
        """Raises `NotFound` naming the first that does not exist; then none is dropped."""
        for tag in tags:
            if tag not in template.tags:
                raise NotFound(f"tag '{tag}' does not exist for template '{template.name}'")
        await self._tables.drop_tags(template.id, list(tags))
        for tag in tags:
            template.tags.pop(tag, None)

    async def drop_build(self, template: Template, build_id: str) -> None:
        """Forget a build and the tags that name it. Layers go with `collect`."""
        await self._tables.drop_build(build_id)
        template.builds.pop(build_id, None)
        template.tags = {tag: named for tag, named in template.tags.items() if named[0] != build_id}
        self.on_drop()

    async def delete(self, template: Template) -> None:
        """Forget a template with its builds and tags. Layers go with `collect`. Raises `BadRequest` for the node's."""
        if template.id not in self._templates:
            raise BadRequest(f"template '{template.name}' belongs to the node", remedy="remove it on the node itself")
        await self._tables.drop_template(template.id)
        self._templates.pop(template.id, None)
        self.on_drop()

    # --- layers ---

    @property
    def layers_home(self) -> Path:
        return self._layers

    @contextlib.contextmanager
    def new_layer(self, name: str | None = None) -> Iterator[Path]:
        """A path for `Instance.commit`, of a `name` that a layer has elsewhere; `collect` leaves it alone until the
        context ends. By then a build (or a sandbox) names it, or it is nobody's."""
        self._layers.mkdir(mode=0o711, parents=True, exist_ok=True)
        path = self._layers / (name or new_id())
        self._reserved.add(path)
        self._reservations.append(path)
        try:
            yield path
        finally:
            self._reservations.remove(path)
            if path not in self._reservations:
                self._reserved.discard(path)

    async def collect(self, in_use: Collection[Path], runtime: Runtime) -> Sequence[Path]:
        """Remove layers that no build names, that are not `in_use` (by sandboxes) and that no other one needs, and
        what can be made again of those that only builds name; the paths that went. Raises `SandboxError` where it
        cannot be known what a layer needs: then nothing goes."""
        if not self._layers.is_dir():
            return []
        kept = self._named() | set(in_use) | self._reserved
        if not self._reserved:  # else a snapshot may be on its way that saw them in the chain below it
            self._shed.clear()
        kept |= self._shed
        kept |= self.needed(runtime, kept)  # not in a thread: what is kept must not change meanwhile
        # What is being written has its final name with something behind it.
        gone = [path for path in self._layers.iterdir() if path.with_name(path.name.partition(".")[0]) not in kept]
        for path in gone:
            self._parents.pop(path.with_name(path.name.partition(".")[0]), None)
        await self._remove(gone)
        for layer in kept - set(in_use) - self._reserved:
            await asyncio.to_thread(runtime.slim, layer)
        return gone

    async def compact(self, in_use: Collection[Path], runtime: Runtime) -> bool:
        """Let layers have, as their own, what they need of others that nobody names or uses; whether any does now:
        then there is something to `collect`. Those in use, and what is below them, are left alone."""
        named = self._named()
        busy = set(in_use) | self._reserved
        busy |= self.needed(runtime, busy)
        kept = named | busy | self.needed(runtime, named)
        children = Counter(below for layer in kept if (below := self._parents.get(layer)) is not None)
        changed = False
        for layer in kept - busy:
            if layer not in named and children[layer] == 1:
                continue  # it is spare itself
            spare: set[Path] = set()
            below = self._parents.get(layer)
            while below is not None and children[below] == 1 and below not in named | busy:
                spare.add(below)
                below = self._parents.get(below)
            if not spare:
                continue
            if await asyncio.to_thread(runtime.merge, layer, spare):
                self._parents.pop(layer, None)
                self._shed |= spare
                changed = True
        return changed

    def _named(self) -> set[Path]:
        return {layer for t in self._templates.values() for b in t.builds.values() for layer in b.rootfs.layers}

    async def _remove(self, layers: Sequence[Path]) -> None:
        """Their names are free at once, so that a layer may come which had one elsewhere; two may remove at once."""
        going: set[Path] = set()
        for layer in layers:
            if layer not in self._going:
                out = layer.with_name(f"{_GOING}{new_id()}")
                with contextlib.suppress(FileNotFoundError):
                    going.add(layer.rename(out))
        self._going |= going
        try:
            await asyncio.to_thread(_remove_all, list(going))
        finally:
            self._going -= going

    def needed(self, runtime: Runtime, layers: Collection[Path]) -> set[Path]:
        """What these layers are kept as the difference to. Raises `SandboxError` for a damaged one."""
        found: set[Path] = set()
        for layer in layers:
            while (below := self._parents.get(layer) or runtime.needs(layer)) is not None:
                self._parents[layer] = below
                if below in found:
                    break
                found.add(below)
                layer = below
        return found

    # --- within ---

    async def _put(self, template: Template) -> None:
        await self._tables.put_template(
            TemplateRecord(
                id=template.id,
                tenant=template.tenant or "",
                kind=template.kind,
                names=list(template.names),
                public=template.public,
                source=template.source,
                created_at=template.created_at,
                updated_at=template.updated_at,
            )
        )

    def _match(self, wanted: str, tenant: str | None) -> Template | None:
        """One's own comes before everyone's."""
        mine = [t for t in self._templates.values() if t.tenant == tenant or tenant is None]
        for template in (*mine, *self._node):
            if wanted == template.id or wanted in template.names:
                return template
        others = [t for t in self._templates.values() if t.public]
        return next((t for t in others if wanted == t.id or wanted in set(t.names) - STANDARD_NAMES), None)

    def _taken(self, name: str, tenant: str) -> Template | None:
        """Another tenant's name, public or not, is free: one's own is found first."""
        self._read_node(0.0)
        mine = [t for t in self._templates.values() if t.tenant == tenant]
        return next((t for t in (*mine, *self._node) if name == t.id or name in t.names), None)

    def _read_node(self, older_than: float) -> None:
        now = time.monotonic()
        if now - self._node_read_at < older_than:
            return
        views = [
            v if v.build_id else replace(v, build_id=str(uuid.uuid5(_NAMESPACE, v.template_id)))
            for v in self._source.views()
        ]
        before = {template.name: template for template in self._node}
        self._node_views = {view.build_id: view for view in views}
        self._node = [_node_template(view) for view in views]
        self._node_read_at = now
        for template in self._node:
            old = before[template.name].builds.keys() - template.builds.keys() if template.name in before else None
            if old:
                self.on_replace(old, template, next(iter(template.builds.values())))

    def _hint(self, wanted: str, tenant: str | None) -> str:
        names = sorted({name for t in self.all(tenant) for name in t.names})
        if not names:
            return "there is none yet: run 'sandyard setup'"
        near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
        return f"did you mean {', '.join(near)}?" if near else f"there are: {', '.join(names[:8])}"


def _node_template(view: TemplateView) -> Template:
    template = Template(
        view.template_id, None, "template", [view.name, *view.aliases], True, view.created_at, view.created_at
    )
    template.builds[view.build_id] = Build(
        view.build_id,
        view.template_id,
        "ready",
        view.rootfs,
        {},
        view.created_at,
        view.created_at,
        None,
        view.size_bytes,
    )
    template.tags[DEFAULT_TAG] = (view.build_id, view.created_at)
    return template


def _build(record: BuildRecord) -> Build:
    config = dict(record.config)
    rootfs = Rootfs(
        [Path(layer) for layer in record.layers], config.get("env", {}), config.get("workdir"), config.get("user")
    )
    return Build(
        id=record.id,
        template_id=record.template_id,
        status=record.status,
        rootfs=rootfs,
        config=config,
        created_at=record.created_at,
        finished_at=record.finished_at,
        reason=record.reason,
        size_bytes=record.size_bytes,
    )


def _build_record(build: Build) -> BuildRecord:
    rootfs = build.rootfs
    config = {**build.config, "env": dict(rootfs.env), "workdir": rootfs.workdir, "user": rootfs.user}
    return BuildRecord(
        id=build.id,
        template_id=build.template_id,
        status=build.status,
        layers=[str(layer) for layer in rootfs.layers],
        config=config,
        reason=build.reason,
        size_bytes=build.size_bytes,
        created_at=build.created_at,
        finished_at=build.finished_at,
    )


def _remove_all(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
