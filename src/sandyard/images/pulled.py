"""Templates of the node from images: by name from a registry, or from a file."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import BadRequest
from sandyard.images.bootstrap import bootstrap, host_sources
from sandyard.images.oci.pull import Image, Transports, needs, pull
from sandyard.images.oci.room import Collect, collect_nothing
from sandyard.images.owners import shift_tree
from sandyard.images.progress import Progress, silent
from sandyard.images.templates import Origin, Template, TemplateStore, check_name

DEBOOTSTRAP = "debootstrap"
_SUITE = re.compile(r"[a-z][a-z0-9-]{1,40}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TARBALL = re.compile(r".+\.tar(\.(gz|xz|zst|bz2))?|.+\.tgz")


async def pull_template(
    settings: Settings,
    source: str,
    name: str | None = None,
    progress: Progress = silent,
    *,
    start: bool = False,
    digest: str | None = None,
    collect: Collect = collect_nothing,
    transports: Transports = lambda _registry: None,
) -> Template:
    """Make `source` the template `name` (else what the image is called), in place of one of that name: sandboxes of
    the one before run on. `start`: its entrypoint and command are the start command. `digest`: of its manifest, or of
    the index that has it; the image must be that.

    `source`: what `pull` takes, the path of a root file system's tar archive, or `debootstrap:SUITE`. Layers are
    shared with every other template that has them. Raises `BadRequest`, and `HostError` listing each source that was
    tried and why it failed; `NoRoom` where `collect` could not make room for it."""
    name = name or name_of(source)
    check_name(name)
    store = TemplateStore(settings)
    kind, _, rest = source.partition(":")
    tarball = _TARBALL.fullmatch(source) and not _is_file(source)
    if digest is not None and (kind == DEBOOTSTRAP or tarball):
        raise BadRequest(f"{source} has no digest", field="digest", remedy="leave --digest out")
    if kind == DEBOOTSTRAP:
        return await _bootstrapped(settings, store, name, rest, progress)
    if tarball:
        return await asyncio.to_thread(_unpacked, store, name, Path(source), progress)
    source = source if digest is None else pinned(source, digest)
    async with needs(settings, collect, transports) as given:
        image = await pull(settings, source, progress, given)
        made = await asyncio.to_thread(_install, store, name, image, start)
    progress("pull", 1.0, f"template {name}: {image.reference} from {image.source}")
    return made


def name_of(source: str) -> str:
    """What a template of `source` is called: the last part of its name, without tag and digest."""
    plain = source.partition("@")[0].partition(":")[2] if _is_file(source) else source.partition("@")[0]
    last = plain.rstrip("/").rpartition("/")[2]
    last = last.partition(".tar")[0] if _TARBALL.fullmatch(last) else last.partition(":")[0]
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._")


def pinned(source: str, digest: str) -> str:
    """The source with its digest, in place of a tag. Raises `BadRequest` where it has another."""
    if not _DIGEST.fullmatch(digest):
        raise BadRequest(f"digest {digest!r} is not sha256: and 64 hexadecimal digits", field="digest")
    plain, _, known = source.rpartition("@sha256:") if "@sha256:" in source else (source, "", "")
    known = known and f"sha256:{known}"
    if known and known != digest:
        raise BadRequest(f"image '{source}' names another digest than {digest}", field="digest")
    return f"{plain}@{digest}"


def start_command(image: Image) -> str | None:
    """What the image runs, as a shell command."""
    words = [*image.config.entrypoint, *image.config.command]
    return shlex.join(words) if words else None


def _is_file(source: str) -> bool:
    return source.partition(":")[0] in ("oci", "oci-archive", "docker-archive")


def _install(store: TemplateStore, name: str, image: Image, start: bool) -> Template:
    config = image.config
    if not image.layers:
        raise BadRequest(f"image '{image.reference}' has no layers")
    # An image that names no user runs as root: unlike a template of ours it has no other.
    user = (config.user or "root").partition(":")[0]
    origin = Origin(
        source=f"{image.source} ({image.digest})",
        recipe=image.digest,
        size_bytes=image.size_bytes,
        env=dict(config.env),
        workdir=config.workdir,
        user=user,
        below=list(image.trees),
        start_cmd=start_command(image) if start else None,
    )
    with store.building():
        return store.install(name, None, origin)


async def _bootstrapped(
    settings: Settings, store: TemplateStore, name: str, suite: str, progress: Progress
) -> Template:
    """A minimal Debian of `suite`, from `images.mirror` or where this host gets its packages."""
    if not _SUITE.fullmatch(suite):
        raise BadRequest(f"suite {suite!r}: name one, such as debootstrap:bookworm", field="source")
    mirror = settings.images.mirror
    sources = [f"deb {mirror} {suite} main"] if mirror else await host_sources(suite)
    entered = store.building()
    scratch, lock = await asyncio.to_thread(entered.__enter__)
    try:
        source = await bootstrap(scratch / "rootfs", suite, sources, ["ca-certificates"], progress, lock)
        size = await asyncio.to_thread(shift_tree, scratch / "rootfs", settings.container.uid_base)
        made = await asyncio.to_thread(store.install, name, scratch / "rootfs", Origin(source, "", size, user="root"))
    finally:
        await asyncio.to_thread(entered.__exit__, None, None, None)
    progress("bootstrap", 1.0, f"template {name}: {size >> 20} MiB")
    return made


def _unpacked(store: TemplateStore, name: str, archive: Path, progress: Progress) -> Template:
    archive = archive.expanduser()
    if not archive.is_file():
        raise BadRequest(f"{archive} does not exist", field="source")
    progress("unpack", 0.0, f"unpacking {archive}")
    made = store.unpack_tarball(name, archive)
    progress("unpack", 1.0, f"template {name}: {made.size_bytes >> 20} MiB")
    return made
