"""Templates of the node from images: by name from a registry, or from a file."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import BadRequest
from sandyard.images.oci.pull import Image, Transports, pull
from sandyard.images.progress import Progress, silent
from sandyard.images.templates import Origin, Template, TemplateStore, check_name

_TARBALL = re.compile(r".+\.tar(\.(gz|xz|zst|bz2))?|.+\.tgz")


async def pull_template(
    settings: Settings,
    source: str,
    name: str | None = None,
    progress: Progress = silent,
    *,
    start: bool = False,
    transports: Transports = lambda _registry: None,
) -> Template:
    """Make `source` the template `name` (else what the image is called), in place of one of that name: sandboxes of
    the one before run on. `start`: its entrypoint and command are the start command.

    `source`: what `pull` takes, or the path of a root file system's tar archive. Layers are shared with every other
    template that has them. Raises `BadRequest`, and `HostError` listing each source that was tried and why it
    failed."""
    name = name or name_of(source)
    check_name(name)
    store = TemplateStore(settings)
    if _TARBALL.fullmatch(source):
        return await asyncio.to_thread(_unpacked, store, name, Path(source), progress)
    image = await pull(settings, source, progress, transports=transports)
    made = await asyncio.to_thread(_install, store, name, image, start)
    progress("pull", 1.0, f"template {name}: {image.reference} from {image.source}")
    return made


def name_of(source: str) -> str:
    """What a template of `source` is called: the last part of its name, without tag and digest."""
    plain = source.partition("@")[0].partition(":")[2] if _is_file(source) else source.partition("@")[0]
    last = plain.rstrip("/").rpartition("/")[2]
    last = last.partition(".tar")[0] if _TARBALL.fullmatch(last) else last.partition(":")[0]
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._")


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


def _unpacked(store: TemplateStore, name: str, archive: Path, progress: Progress) -> Template:
    archive = archive.expanduser()
    if not archive.is_file():
        raise BadRequest(f"{archive} does not exist", field="source")
    progress("unpack", 0.0, f"unpacking {archive}")
    made = store.unpack_tarball(name, archive)
    progress("unpack", 1.0, f"template {name}: {made.size_bytes >> 20} MiB")
    return made
