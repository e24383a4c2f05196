"""COPY and ADD: files of an uploaded archive into the sandbox, by its own tar or file by file."""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest.base import Agent, ExitStatus, Process, ProcessSpec
from sandyard.images.build.accounts import is_dir, make_dir
from sandyard.images.build.archive import END, Picked, Reader, content, header, pick, source_root
from sandyard.images.build.shell import describe, end, output_of

_BATCH = 256 * 1024


class CopyFailed(Exception):
    """What a COPY could not do, in one line."""


@dataclass(frozen=True, slots=True)
class Copy:
    """`target` is absolute; with a slash at its end it is a directory. `mode` and `owner` None: the archive's own."""

    source: str
    target: str
    owner: tuple[int, int] | None
    mode: int | None = None


async def copy_files(agent: Agent, archive: Path, wanted: Copy) -> int:
    """Put what the archive has of `wanted.source` below `wanted.target`; how many entries that were.

    A single file becomes `target`, or lands in it where that is a directory. Directories merge: what is
    there already keeps its owner and mode. Symlinks are copied as they are. Missing directories are made
    and belong to the owner. Raises `CopyFailed`, `GuestError` and `BadRequest`."""
    with closing(Reader(pick(archive, source_root(wanted.source)))) as reader:
        first = await asyncio.to_thread(reader.entry)
        if first is None:
            raise CopyFailed(f"no files match '{wanted.source}'")
        directory, rename = await _destination(agent, wanted, first)
        await make_dir(agent, directory, owner_text(wanted.owner or (0, 0)))
        return await _write(_Job(agent, reader, first, directory, rename, wanted))


async def write_entries(
    agent: Agent, reader: Reader, owner: tuple[int, int] | None, mode: int | None, *, archive_wins: bool = False
) -> int:
    """Write entries whose names are those of their destinations, without the first slash; how many they were.

    As `copy_files` does: directories merge, and what is there keeps its owner and mode, unless `archive_wins`.
    Raises the same."""
    first = await asyncio.to_thread(reader.entry)
    if first is None:
        return 0
    return await _write(_Job(agent, reader, first, "/", None, Copy("", "/", owner, mode), archive_wins))


def owner_text(owner: tuple[int, int]) -> str:
    return f"{owner[0]}:{owner[1]}"


async def _write(job: _Job) -> int:
    gnu = await tar_kind(job.agent)
    return await job.one_by_one() if gnu is None else await job.by_tar(gnu)


async def _destination(agent: Agent, wanted: Copy, first: Picked) -> tuple[str, str | None]:
    """The directory that everything goes below, and the name of the file where it is just one."""
    target = posixpath.normpath(wanted.target)
    if first.name:
        return target, None
    if wanted.target.endswith("/") or await is_dir(agent, target):
        return target, posixpath.basename(first.member.name.rstrip("/"))
    return posixpath.dirname(target), posixpath.basename(target)


async def tar_kind(agent: Agent) -> bool | None:
    """True: GNU tar; False: another one; None: the image has none."""
    try:
        _, said = await output_of(agent, "tar", "--version")
    except GuestError as error:
        if error.code is not GuestErrorCode.NOT_FOUND:
            raise
        return None
    return b"GNU tar" in said


@dataclass(slots=True)
class _Job:
    agent: Agent
    reader: Reader
    first: Picked
    directory: str
    rename: str | None
    wanted: Copy
    archive_wins: bool = False
    count: int = 0
    links: dict[str, list[str]] = field(default_factory=dict)  # by owner: those that tar leaves to root

    async def entries(self) -> AsyncIterator[tuple[Picked, str]]:
        """Each entry with its name below the directory."""
        entry: Picked | None = self.first
        while entry is not None:
            self.count += 1
            yield entry, self.rename or entry.name
            entry = await asyncio.to_thread(self.reader.entry)

    async def content(self, entry: Picked, *, padded: bool) -> AsyncIterator[bytes]:
        parts = content(entry, padded=padded)
        while data := await asyncio.to_thread(self.reader.read, parts):
            yield data

    async def by_tar(self, gnu: bool) -> int:
        options = ["--keep-directory-symlink", "--numeric-owner"] if gnu else []
        options += ["--no-overwrite-dir"] if gnu and not self.archive_wins else []
        argv = ["tar", "-x", "-p", *options, "-f", "-", "-C", self.directory]
        process = await self.agent.spawn(ProcessSpec(argv, cwd="/", stdin=True))
        listening = asyncio.create_task(last_words(process))
        try:
            with suppress(GuestError):  # tar ended before its input did: its own words say why
                async for data in self._stream(gnu):
                    await process.write_stdin(data)
                await process.close_stdin()
            words = await listening
            status = await process.wait()
        except BaseException:
            listening.cancel()
            await end(process)
            raise
        if status != ExitStatus(code=0):
            raise CopyFailed(f"tar in the sandbox failed: {words or describe(status)}")
        for owner, paths in self.links.items():
            await _own_links(self.agent, owner, paths)
        return self.count

    async def _stream(self, gnu: bool) -> AsyncIterator[bytes]:
        batch = bytearray()
        async for entry, name in self.entries():
            # GNU tar leaves a directory that is there alone; others would give it the archive's mode.
            kept = not gnu and not self.archive_wins
            if entry.member.isdir() and kept and await is_dir(self.agent, posixpath.join(self.directory, name)):
                continue
            owner = self.wanted.owner or (entry.member.uid, entry.member.gid)
            if entry.member.issym() and not gnu and owner != (0, 0):
                self.links.setdefault(owner_text(owner), []).append(posixpath.join(self.directory, name))
            batch += header(entry, name, self.wanted.owner, self.wanted.mode)
            async for data in self.content(entry, padded=True):
                batch += data
                if len(batch) >= _BATCH:
                    yield bytes(batch)
                    batch.clear()
        yield bytes(batch) + END

    async def one_by_one(self) -> int:
        """For images that have no tar."""
        async for entry, name in self.entries():
            owner = owner_text(self.wanted.owner or (entry.member.uid, entry.member.gid))
            path = posixpath.join(self.directory, name)
            mode = self.wanted.mode if self.wanted.mode is not None else entry.member.mode
            if entry.member.isdir():
                if not await is_dir(self.agent, path):
                    await self.agent.make_dir(path, owner, mode)
            elif entry.member.isreg():
                await self.agent.remove(path)
                await self.agent.write_file(path, self.content(entry, padded=False), owner, mode)
                if mode & 0o6000 and entry.member.size:
                    await _set_bits(self.agent, path, mode)
            else:
                await _link(self.agent, entry, path, self.directory)
        return self.count


async def last_words(process: Process) -> str:
    """The first line of the last that a process said."""
    said = b""
    async for _, data in process.output():
        said = (said + data)[-4096:]
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return lines[0] if lines else ""


async def _own_links(agent: Agent, owner: str, paths: list[str]) -> None:
    """In an image without chown they are root's."""
    for at in range(0, len(paths), 256):
        await _ask(agent, "chown", "-h", owner, *paths[at : at + 256])


async def _set_bits(agent: Agent, path: str, mode: int) -> None:
    """Writing to a file takes its set-id bits, whoever writes."""
    if not await _ask(agent, "chmod", f"{mode:o}", path):
        raise CopyFailed(f"'{path}' is set-id, and the image has neither tar nor chmod to make it so")


async def _link(agent: Agent, entry: Picked, path: str, directory: str) -> None:
    if entry.member.issym():
        argv = ["ln", "-s", "-f", "-n", entry.member.linkname, path]
    else:
        argv = ["ln", "-f", posixpath.join(directory, entry.member.linkname), path]
    if not await _ask(agent, *argv):
        raise CopyFailed(f"'{entry.member.name}' is a link, and the image has neither tar nor ln to make it")


async def _ask(agent: Agent, *argv: str) -> bool:
    """Run a program of the image; whether it has one. Raises `CopyFailed` where that fails."""
    try:
        status, said = await output_of(agent, *argv)
    except GuestError as error:
        if error.code is not GuestErrorCode.NOT_FOUND:
            raise
        return False
    if status != ExitStatus(code=0):
        raise CopyFailed(f"{shlex.join(argv)[:500]}: {said.decode('utf-8', 'replace').strip()}")
    return True
