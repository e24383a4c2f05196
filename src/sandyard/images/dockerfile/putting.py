"""COPY, ADD and bind mounts: which entries of an archive go where, and their way there."""

from __future__ import annotations

import asyncio
import copy
import posixpath
import tarfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from e2b_dockerfile_utils import PatternMatcher

from sandyard.errors import BadRequest
from sandyard.guest.base import Agent
from sandyard.images.build.accounts import is_dir, make_dir, resolve_owner
from sandyard.images.build.archive import Picked, Reader, pick
from sandyard.images.build.copying import CopyFailed, owner_text, write_entries
from sandyard.images.dockerfile.actions import Put
from sandyard.images.dockerfile.tree import FILE, HARD, Found, Tree

_COMPRESSIONS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0")
_TAR_MAGIC = (257, b"ustar")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Supply:
    """An archive and its tree. `owner`: of what has no other; None: as the archive says."""

    archive: Path
    tree: Tree
    owner: tuple[int, int] | None = (0, 0)


async def put(agent: Agent, supply: Supply, wanted: Put, scratch: Path, limit: int) -> int:
    """Put files where they are wanted; how many entries that were. `limit`: bytes that archives may unpack to.

    Raises `NoSource`, `CopyFailed`, `BadRequest`, `GuestError`, and `ValueError` for an owner nobody knows."""
    found = [(source, each) for source in wanted.sources for each in supply.tree.find(source)]
    given = await owner_of(agent, wanted.owner) if wanted.owner else None
    owner = given or supply.owner
    into = wanted.target.endswith("/") or await is_dir(agent, wanted.target)
    target = wanted.target.rstrip("/")
    if len(found) > 1 and not into and any(not supply.tree.is_folder(each.path) for _, each in found):
        raise CopyFailed(
            f"{len(found)} sources: the destination '{wanted.target}' is no directory, and ends in no slash"
        )
    count = 0
    for source in wanted.sources:
        routes: dict[str, list[str]] = {}
        for each in [each for named, each in found if named == source]:
            inner = await _unpackable(supply, each, scratch) if wanted.unpack else None
            if inner is not None:
                await make_dir(agent, target or "/", owner_text(given or (0, 0)))
                count += await _write(agent, _within(inner, target, limit), given, wanted.mode, archive_wins=True)
                await asyncio.to_thread(inner.unlink)
                continue
            folder = target if into or supply.tree.is_folder(each.path) else posixpath.dirname(target)
            await make_dir(agent, folder or "/", owner_text(given or (0, 0)))
            _route(supply.tree, each, target, into, wanted.exclude, routes)
        count += await _write(agent, _routed(supply.archive, routes), owner, wanted.mode)
    return count


async def owner_of(agent: Agent, text: str) -> tuple[int, int]:
    """Of `--chown`: a number alone is that of the group too. Raises `ValueError`."""
    name, _, group = text.partition(":")
    if name.isdecimal() and group.isdecimal():
        return int(name), int(group)
    if name.isdecimal() and not group:
        return int(name), int(name)
    return await resolve_owner(agent, text)


async def _write(
    agent: Agent,
    entries: Generator[Picked, None, None],
    owner: tuple[int, int] | None,
    mode: int | None,
    *,
    archive_wins: bool = False,
) -> int:
    with closing(Reader(entries)) as reader:
        return await write_entries(agent, reader, owner, mode, archive_wins=archive_wins)


def _route(
    tree: Tree, found: Found, target: str, into: bool, exclude: Sequence[str], routes: dict[str, list[str]]
) -> None:
    """Note where everything that a source names goes; names without the first slash."""
    hidden = PatternMatcher(list(exclude)) if exclude else None
    base = target.lstrip("/")
    if not tree.is_folder(found.path):
        if hidden is None or not hidden.matches(found.name):
            name = f"{base}/{found.name}" if into and base else found.name if into else base
            routes.setdefault(_content(tree, found.path), []).append(name)
        return
    for path in tree.below(found.path):
        inner = path.removeprefix(f"{found.path}/") if found.path else path
        if hidden is None or not hidden.matches(inner):
            routes.setdefault(_content(tree, path), []).append(f"{base}/{inner}" if base else inner)


def _content(tree: Tree, path: str) -> str:
    """The entry that holds a file's bytes."""
    node = tree.nodes[path]
    return node.target if node.kind == HARD else path


def _routed(archive: Path, routes: Mapping[str, Sequence[str]]) -> Generator[Picked, None, None]:
    """Entries under the names of their destinations; a file with several is one file with several names."""
    if not routes:
        return
    for entry in pick(archive, ""):
        first, *more = routes.get(entry.name, ("",))
        if not first or entry.member.islnk():
            continue
        yield Picked(first, entry.member, entry.content)
        for name in more:
            member = copy.copy(entry.member)
            if entry.member.isreg():
                member.type, member.linkname, member.size = tarfile.LNKTYPE, first, 0
            yield Picked(name, member, None)


def _within(archive: Path, target: str, limit: int) -> Generator[Picked, None, None]:
    """All entries of an archive, below the target; what it says of its root is said of the target."""
    base = target.lstrip("/")
    size = 0
    for entry in pick(archive, "", root_too=True):
        size += entry.member.size if entry.member.isreg() else 0
        if size > limit:
            raise BadRequest(f"the archive unpacks to more than {limit >> 20} MiB")
        name = "/".join(part for part in (base, entry.name) if part) or "."
        if entry.member.islnk() and base:
            entry.member.linkname = f"{base}/{entry.member.linkname}"
        yield replace(entry, name=name)


async def _unpackable(supply: Supply, found: Found, scratch: Path) -> Path | None:
    """The file, on its own, if it is a tar archive, packed or not."""
    node = supply.tree.nodes.get(found.path)
    if node is None or node.kind not in (FILE, HARD):
        return None
    return await asyncio.to_thread(_spool, supply.archive, _content(supply.tree, found.path), scratch / "added")


def _spool(archive: Path, name: str, target: Path) -> Path | None:
    """Only what looks like an archive is written out."""
    with closing(pick(archive, name)) as entries:
        for entry in entries:
            if entry.name or entry.content is None:
                continue
            start = entry.content.read(_BLOCKS)
            at, magic = _TAR_MAGIC
            if not start.startswith(_COMPRESSIONS) and start[at : at + len(magic)] != magic:
                return None
            with target.open("wb") as file:
                file.write(start)
                while data := entry.content.read(_CHUNK):
                    file.write(data)
            if _is_tar(target):
                return target
            target.unlink()
            return None
    return None


_BLOCKS = 1024


def _is_tar(path: Path) -> bool:
    try:
        with tarfile.open(path, "r|*") as tar:
            return tar.next() is not None
    except (tarfile.TarError, EOFError, OSError):
        return False
