"""Files out of the sandbox of another stage or image, as an archive on the host. Links are followed in the sandbox's
own terms; those on the way are part of the archive, so that its tree leads where the sandbox's does."""

from __future__ import annotations

import asyncio
import posixpath
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import Agent, Channel, ExitStatus, FileInfo, FileType, ProcessSpec
from sandyard.images.build.accounts import exists
from sandyard.images.build.archive import END, clean
from sandyard.images.build.copying import CopyFailed, tar_kind
from sandyard.images.build.shell import describe, end
from sandyard.images.dockerfile.match import BadPattern, has_magic, matcher
from sandyard.images.dockerfile.tree import NoSource, scoped

MOUNTED = ("dev", "proc", "sys")
_HOPS = 40
_ARGUMENTS = 64 << 10  # characters of names that one command takes
_BLOCK = 512


async def export(agent: Agent, sources: Sequence[str], archive: Path, limit: int) -> None:
    """Write what `sources` name. Raises `NoSource`, `CopyFailed` (also past `limit` bytes) and `GuestError`."""
    names: dict[str, None] = {}
    for source in sources:
        for path in await _matches(agent, source):
            await _follow(agent, path, names, _HOPS)
    if "" in names:
        names = dict.fromkeys([name for name in names if name] + await _of_root(agent))
    listed = list(names)
    with archive.open("xb") as file:
        out = _Bounded(file, limit)
        if sum(map(len, listed)) < _ARGUMENTS and await tar_kind(agent) is not None:
            await _by_tar(agent, listed, out)
        else:
            await _by_hand(agent, listed, out)


async def _of_root(agent: Agent) -> list[str]:
    """All of an image: not what a sandbox has mounted."""
    found = [info.name for info in await agent.list_dir("/") if info.name not in MOUNTED]
    if "run" in found:
        found.remove("run")
        found += [f"run/{info.name}" for info in await agent.list_dir("/run") if info.name != "sandyard"]
    return sorted(found)


class _Bounded:
    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file = file
        self._left = limit
        self._limit = limit

    async def write(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise CopyFailed(f"the files to copy pass {self._limit >> 20} MiB")
        await asyncio.to_thread(self._file.write, data)


async def _matches(agent: Agent, source: str) -> Sequence[str]:
    """Paths without the first slash. Here `..` ends at the root, as everywhere in a container."""
    found = [""]
    for part in clean(posixpath.normpath(f"/{source}")):
        direct = [f"{place}/{part}" if place else part for place in found]
        if not has_magic(part):
            found = direct
            continue
        try:
            matches = matcher(part)
        except BadPattern as error:
            raise NoSource(f"'{source}' is not a pattern") from error
        # A link to a folder is one of its names: what it holds is asked for by that name.
        folders = [place for place in found if await _is_folder(agent, place)]
        lists = [(place, await agent.list_dir(f"/{place}")) for place in folders]
        found = [
            f"{place}/{info.name}" if place else info.name
            for place, infos in lists
            for info in sorted(infos, key=lambda info: info.name)
            if matches(info.name)
        ]
    if not found or not [path for path in found if await exists(agent, f"/{path}")]:
        raise NoSource(f"'{source}' is not there")
    return found


async def _is_folder(agent: Agent, path: str) -> bool:
    if not await exists(agent, f"/{path}"):
        return False
    info = await agent.stat(f"/{path}")
    return FileType.DIRECTORY in (info.type, info.target_type)


async def _follow(agent: Agent, path: str, names: dict[str, None], hops: int) -> str:
    """Note where a path leads, and the links on its way."""
    done = ""
    for part in clean(path):
        done = f"{done}/{part}" if done else part
        try:
            info = await agent.stat(f"/{done}")
        except GuestError as error:
            if error.code not in (GuestErrorCode.NOT_FOUND, GuestErrorCode.NOT_DIRECTORY):
                raise
            raise NoSource(f"'/{path}' is not there") from error
        if info.type is FileType.SYMLINK:
            if hops <= 0:
                raise NoSource(f"'/{path}' leads in a circle")
            names[done] = None
            done = await _follow(agent, scoped(done, info.symlink_target or ""), names, hops - 1)
    names[done] = None
    return done


async def _by_tar(agent: Agent, names: Sequence[str], out: _Bounded) -> None:
    argv = ["tar", "-c", "-f", "-", "-C", "/", *(f"./{name}" for name in names)]
    process = await agent.spawn(ProcessSpec(argv, cwd="/"))
    words = b""
    try:
        async for channel, data in process.output():
            if channel is Channel.STDOUT:
                await out.write(data)
            else:
                words = (words + data)[-4096:]
        status = await process.wait()
    except BaseException:
        await end(process)
        raise
    if status != ExitStatus(code=0):
        lines = words.decode("utf-8", "replace").strip().splitlines()
        raise CopyFailed(f"tar in the sandbox failed: {lines[0] if lines else describe(status)}")


async def _by_hand(agent: Agent, names: Sequence[str], out: _Bounded) -> None:
    """For images that have no tar: hard links become files of their own."""
    waiting = [await agent.stat(f"/{name}") for name in reversed(names)]
    while waiting:
        info = waiting.pop()
        await _entry(agent, info, out)
        if info.type is FileType.DIRECTORY:
            waiting += sorted(await agent.list_dir(info.path), key=lambda each: each.name, reverse=True)
    await out.write(END)


async def _entry(agent: Agent, info: FileInfo, out: _Bounded) -> None:
    kinds = {
        FileType.DIRECTORY: tarfile.DIRTYPE,
        FileType.SYMLINK: tarfile.SYMTYPE,
        FileType.FILE: tarfile.REGTYPE,
    }
    if info.type not in kinds or info.path == "/":
        return
    member = tarfile.TarInfo(info.path.lstrip("/"))
    member.type, member.mode, member.uid, member.gid = kinds[info.type], info.mode, info.uid, info.gid
    member.mtime, member.linkname = info.mtime_ns // 10**9, info.symlink_target or ""
    member.size = info.size if info.type is FileType.FILE else 0
    await out.write(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
    come = 0
    if member.size:
        async for data in agent.read_file(info.path):
            come += len(data)
            if come > member.size:
                break
            await out.write(data)
    if come != member.size:
        raise AgentLinkError(f"'{info.path}' has {come} bytes and not the {member.size} it was said to have")
    await out.write(bytes(-come % _BLOCK))
