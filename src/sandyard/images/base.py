"""The `base` template: a small Debian with bash, Python, git, curl and sudo for user `user`.

Sources, in this order: a given root file system tarball, a registry reference (skopeo and umoci),
the host's own package mirror. It is made once per recipe and kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import HostError, SandyardError
from sandyard.images.bootstrap import bootstrap, host_sources, host_suite
from sandyard.images.finish import USER, finish, missing_commands
from sandyard.images.owners import shift_tree
from sandyard.images.progress import Progress, run_watched, silent
from sandyard.images.tarball import unpack
from sandyard.images.templates import Origin, Template, TemplateStore

BASE = "base"
PACKAGES = ("bash", "python3", "git", "curl", "sudo", "ncurses-bin", "procps", "ca-certificates")
_FORMAT = 2  # change when the making changes


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that a base template depends on."""

    packages: tuple[str, ...]
    uid_base: int
    tarball: str = ""  # path, size and time of change
    reference: str = ""
    suite: str = ""
    mirror: str = ""
    format: int = _FORMAT

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def recipe_of(settings: Settings) -> Recipe:
    """The recipe that `settings` ask for. Raises `HostError` where a tarball is missing."""
    images = settings.images
    plain = Recipe(PACKAGES, settings.container.uid_base, suite=images.suite or "", mirror=images.mirror or "")
    if not images.base:
        return plain
    path = _archive(settings)
    if path.is_file():
        stat = path.stat()
        return replace(plain, tarball=f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}")
    if images.base.startswith((".", "/", "~")) or ".tar" in path.suffixes:
        raise HostError(f"images.base: {images.base} does not exist", remedy="give a tarball's path or unset it")
    return replace(plain, reference=images.base)


async def build_base(settings: Settings, progress: Progress = silent, *, force: bool = False) -> Template:
    """Return the base template, made first if there is none of this recipe (or `force`).

    Raises `HostError` listing why each source failed; nothing half made is left.
    """
    store = TemplateStore(settings)
    recipe = recipe_of(settings)
    if not force and (kept := _kept(store, recipe)) is not None:
        progress("base", 1.0, f"template base is there ({kept.source})")
        return kept
    if os.geteuid() != 0:
        raise HostError("building the base template needs root", remedy="run as root (sudo sandyard setup)")
    progress("base", 0.0, "building the base template")
    entered = store.building()
    scratch, lock = await asyncio.to_thread(entered.__enter__)
    try:
        if not force and (kept := _kept(store, recipe)) is not None:
            return kept  # another process built it while we waited for the lock
        source = await _fill(scratch, lock, settings, recipe, progress)
        progress("base", 0.95, "setting owners")
        size = await asyncio.to_thread(_complete, scratch / "rootfs", settings.container.uid_base)
        origin = Origin(source, recipe.digest(), size, {}, f"/home/{USER}", USER)
        template = await asyncio.to_thread(store.install, BASE, scratch / "rootfs", origin)
    finally:
        await asyncio.to_thread(entered.__exit__, None, None, None)
    progress("base", 1.0, f"template base is ready: {source}, {size >> 20} MiB")
    return template


def _kept(store: TemplateStore, recipe: Recipe) -> Template | None:
    kept = store.find(BASE)
    return kept if kept is not None and kept.recipe == recipe.digest() else None


async def _fill(scratch: Path, lock: int, settings: Settings, recipe: Recipe, progress: Progress) -> str:
    """Put a root file system at `scratch/rootfs` and return its source."""
    root = scratch / "rootfs"
    if recipe.tarball:  # asked for by name: another source would not be what was asked
        archive = _archive(settings)
        progress("unpack", 0.1, f"unpacking {archive}")
        await asyncio.to_thread(unpack, archive, root, 0)
        _require(root)
        return f"tarball {archive}"
    failures: list[str] = []
    if recipe.reference:
        try:
            await _pull(scratch, recipe.reference, progress, lock)
            _require(root)
            return f"registry {recipe.reference}"
        except SandyardError as error:
            failures.append(f"{recipe.reference}: {error.message}")
            progress("pull", None, f"{recipe.reference}: {error.message}; taking the package mirror instead")
            await asyncio.to_thread(shutil.rmtree, root, True)
    try:
        suite = recipe.suite or host_suite()
        sources = [f"deb {recipe.mirror} {suite} main"] if recipe.mirror else await host_sources(suite)
        source = await bootstrap(root, suite, sources, recipe.packages, progress, lock)
        _require(root)
        return source
    except SandyardError as error:
        failures.append(f"package mirror: {error.message}")
        remedy = error.remedy or "set images.base to a root file system tarball, or images.mirror"
        raise HostError(f"no source for the base template: {'; '.join(failures)}", remedy=remedy) from error


def _archive(settings: Settings) -> Path:
    return Path(settings.images.base or "").expanduser()


async def _pull(scratch: Path, reference: str, progress: Progress, lock: int) -> None:
    missing = [name for name in ("skopeo", "umoci") if not shutil.which(name)]
    if missing:
        raise HostError(f"{' and '.join(missing)} not installed", remedy=f"apt-get install {' '.join(missing)}")
    name = reference if "://" in reference else f"docker://{reference}"
    image = f"{scratch}/oci:base"

    def on_line(line: str) -> None:
        progress("pull", None, line)

    await run_watched(["skopeo", "copy", name, f"oci:{image}"], on_line, pass_fds=[lock])
    unpacking = ["umoci", "raw", "unpack", "--image", image, f"{scratch}/rootfs"]
    await run_watched(unpacking, on_line, pass_fds=[lock])


def _complete(root: Path, uid_base: int) -> int:
    finish(root)
    return shift_tree(root, uid_base)


def _require(root: Path, commands: Sequence[str] | None = None) -> None:
    missing = missing_commands(root) if commands is None else missing_commands(root, commands)
    if missing:
        raise HostError(f"the root file system has no {', '.join(missing)}", remedy="use one that has them")
