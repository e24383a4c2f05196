"""The images that the disk of a sandbox consists of, each above the one before, the lowest above a blank one.

Those that nothing writes to any more lie in a directory of root's (`kept`), which its VMM can read; what it writes
to, and what it wrote since it was started, lies in its own (`own`). What a VMM wrote comes to `kept` as a copy while
it runs, as the very file when it has ended. What lies in `own` counts only where `kept` has no such image. Files in
`kept` may have more names: as parts of snapshots, and in other sandboxes' `kept`.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sandyard.errors import SandboxError
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.durable import sync
from sandyard.runtimes.microvm import disk
from sandyard.runtimes.microvm.disk import image
from sandyard.runtimes.microvm.launch import OWN, SHARED
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.qcow2 import Image, header_of, opened

BLANK = "blank.img"
DEEPEST = 8
"""Images of one sandbox: then they are made one while it runs."""
MOST = 16
"""Images of one sandbox: then they are made one before anything else."""
KEPT = "disks"  # below `SHARED`
_IMAGE = re.compile(r"disk([0-9]{1,9})\.qcow2")
_DIGEST = ".digest"
_SLACK = 64 << 20
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _of_the_host(work: Callable[Concatenate[Disks, _P], _T]) -> Callable[Concatenate[Disks, _P], _T]:
    @functools.wraps(work)
    def named(self: Disks, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return work(self, *args, **kwargs)
        except OSError as error:
            raise SandboxError(f"disk of sandbox {self.sandbox_id}: {error}") from error

    return named


class Disks:
    """Of the sandbox of `spec`. All is blocking. Raises `SandboxError`, also for what a VMM made of its directory."""

    def __init__(self, layout: Layout, spec: SandboxSpec) -> None:
        self.own = layout.disk(spec.sandbox_id)
        self.kept = layout.kept(spec.sandbox_id)
        self.sandbox_id = spec.sandbox_id
        self.most = most_bytes(spec.resources.disk_mb)
        self._layout = layout
        self._spec = spec

    @_of_the_host
    def prepare(self) -> None:
        """Make the directory. Its VMM must be able to walk to what is in it."""
        self.kept.mkdir(exist_ok=True)
        self.kept.chmod(0o755)

    @_of_the_host
    def top(self) -> int:
        """The number of the uppermost image; -1 where there is none."""
        return max([*_numbers(self.kept), *_numbers(self.own)], default=-1)

    def depth(self) -> int:
        return len([path for path in self.chain() if path.name != BLANK])

    @_of_the_host
    def chain(self, number: int | None = None) -> Sequence[Path]:
        """The files of image `number`, else of the uppermost one, the lowest first: that is blank where the first
        image does not stand for itself."""
        number = self.top() if number is None else number
        found: list[Path] = []
        while True:
            path = self._path(number)
            header = header_of(path)
            found.insert(0, path)
            if header.whole:
                return found
            if number == 0:
                return [self._blank(), *found]
            number -= 1

    def images(self, number: int | None = None) -> Sequence[Image]:
        """`chain`, as its VMM sees it."""
        found = []
        for path in self.chain(number):
            where = OWN if path.parent == self.own else SHARED / KEPT
            found.append(Image(where / path.name, "raw" if path.name == BLANK else "qcow2"))
        return found

    @_of_the_host
    def lent(self, number: int) -> tuple[Sequence[Image], dict[str, Path]]:
        """`images`, as a tool sees them that is another user than its VMM; and, by names below `SHARED`, what that gets
        to see, and cannot change. What lies in its own directory is lent only while it has no VMM."""
        found, shared = [], {KEPT: self.kept}
        for path in self.chain(number):
            where = SHARED / KEPT / path.name
            if path.parent == self.own:
                with opened(path) as descriptor:
                    os.fchmod(descriptor, 0o644)  # nobody else comes to its directory
                where = SHARED / f"own-{path.name}"
                shared[where.name] = path
            found.append(Image(where, "raw" if path.name == BLANK else "qcow2"))
        return found, shared

    def writable(self) -> bool:
        """Whether its VMM may write to the uppermost image."""
        return self.top() in _numbers(self.own) and self.top() not in _numbers(self.kept)

    @_of_the_host
    def add(self) -> Path:
        """A new image above all others, to be written to."""
        number = self.top() + 1
        below, kind = (image(number - 1), "qcow2") if number else (BLANK, "raw")
        size = header_of(self._path(number - 1)).size if number else self._blank().stat().st_size
        if size > self.most:  # a VMM can write any into a header
            raise SandboxError(f"{image(number - 1)} says that it is a disk of {size} bytes")
        return disk.above(self.own, below, kind, size, number)

    @_of_the_host
    def keep(self, number: int, *, ended: bool, durable: bool = False) -> None:
        """Bring what its VMM wrote, up to image `number`, to where nothing can write to it. `ended`: there is no VMM.
        What it costs is what was written since the last time."""
        self.prepare()
        for source in self.chain(number):  # each is looked at, and refused, before anything is copied
            if source.parent != self.own:
                continue
            target = self.kept / source.name
            if ended:
                disk.take(source, target, durable)
                source.unlink()
            else:
                self._copy(source, target)
            if durable:
                sync(target)
        if durable:
            sync(self.kept)

    @_of_the_host
    def give(self, files: Sequence[Path], digests: Sequence[str], *, blank: bool) -> None:
        """Be a disk of these files, as `chain` has them, with these digests; the first is a `blank` one."""
        self.prepare()
        for number, (path, digest) in enumerate(zip(files, digests, strict=True), -1 if blank else 0):
            name = image(number) if number >= 0 else BLANK
            os.link(path, self.kept / name)
            _write(self.kept / f"{name}{_DIGEST}", digest)

    def retired(self) -> int | None:
        """The uppermost image that its VMM may write to, its guest does not any more, and `kept` has a copy of: while
        others are brought to it none can be made."""
        top, both = self.top(), {*_numbers(self.own)} & {*_numbers(self.kept)}
        return max((number for number in both if number < top), default=None)

    @_of_the_host
    def shortened(self, number: int) -> None:
        """Its VMM, which runs, has brought all that lies below to image `number`, and writes to that no more if the
        guest does not. From here on that one counts, and not what `kept` has of it; what lies below goes."""
        own, copy = self.own / image(number), self.kept / image(number)
        if copy.exists() and header_of(own).whole and not header_of(copy).whole:
            sync(own)
            copy.unlink()
            copy.with_name(f"{copy.name}{_DIGEST}").unlink(missing_ok=True)
        self.prune(ended=False)

    @_of_the_host
    def digest(self, path: Path) -> str:
        """Of a file of `chain` in `kept`, which is read only if that is not known."""
        record = path.with_name(f"{path.name}{_DIGEST}")
        with suppress(FileNotFoundError):
            known = record.read_text()
            if len(known) == disk.DIGEST:  # else the host broke down before it was there
                return known
        digest = disk.digest(path)
        _write(record, digest)
        return digest

    @_of_the_host
    def link(self, target: Path) -> None:
        """Give what lies in its own directory, while it has no VMM, names in the directory `target` too."""
        for path in _files(self.own):
            if stat.S_ISREG(path.lstat().st_mode):  # a VMM may have put anything there
                os.link(path, target / path.name)

    def hand_to(self, uid: int) -> None:
        """Let what lies in its own directory be the user's `uid`, that its next VMM has."""
        for path in _files(self.own):
            descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)  # what is looked at is what is given, and no other
            try:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_uid not in (0, uid):
                    os.chown(f"/proc/self/fd/{descriptor}", uid, uid)
            finally:
                os.close(descriptor)

    def prune(self, *, ended: bool) -> None:
        """Remove what nothing needs: images below one that stands for itself, and, where its VMM has `ended`, those
        of which `kept` has a copy."""
        if self.top() < 0:
            return
        chain = self.chain()
        bottom = self.top() + 1 - len([path for path in chain if path.name != BLANK])
        copied = set(_numbers(self.kept)) if ended else ()
        self._remove(self.own, lambda number: number < bottom or number in copied)
        self._remove(self.kept, lambda number: number < bottom)
        if chain[0].name != BLANK:
            (self.kept / BLANK).unlink(missing_ok=True)

    @_of_the_host
    def drop_above(self, number: int) -> None:
        """Remove the images above: of a start that failed."""
        for home in (self.own, self.kept):
            self._remove(home, lambda each: each > number)

    @_of_the_host
    def sweep(self) -> None:
        """Remove what a server left that was killed while it copied, or while the VMM wrote for it; in earlier versions
        also a tool."""
        for path in (*self.own.glob("layer-*"), *self.own.glob("state-*"), *self.kept.glob(".*")):
            path.unlink(missing_ok=True)

    @_of_the_host
    def used_bytes(self) -> int:
        """What it takes on the host's disk, without what others take part in."""
        given = {path.lstat().st_ino for path in _files(self._layout.given(self._spec.sandbox_id) / KEPT)}
        found = [path.lstat() for home in (self.own, self.kept) for path in _files(home)]
        return sum(each.st_blocks * 512 for each in found if each.st_nlink == 1 + (each.st_ino in given))

    @_of_the_host
    def sync(self) -> None:
        """Bring all to the host's disk."""
        for home in (self.own, self.kept):
            for path in _files(home):
                with opened(path) as descriptor:
                    os.fsync(descriptor)
            sync(home)

    def _remove(self, home: Path, which: Callable[[int], bool]) -> None:
        for number in _numbers(home):
            if which(number):
                (home / image(number)).unlink(missing_ok=True)
                (home / f"{image(number)}{_DIGEST}").unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        for home in (self.kept, self.own):
            path = home / image(number)
            if os.path.lexists(path):
                return path
        raise SandboxError(f"sandbox {self.sandbox_id}: image {number} of its disk is not there")

    def _blank(self) -> Path:
        path = self.kept / BLANK
        if not path.exists():
            self.prepare()
            os.link(disk.blank(self._layout.images, self._spec.resources.disk_mb), path)
        return path

    def _copy(self, source: Path, target: Path) -> None:
        scratch = self.kept / f".{secrets.token_hex(4)}"
        try:
            digest = disk.copy(source, scratch, self.most)
            header_of(scratch)  # of what was copied, whatever the VMM did meanwhile
            _write(target.with_name(f"{target.name}{_DIGEST}"), digest)
            scratch.rename(target)
        finally:
            scratch.unlink(missing_ok=True)


def most_bytes(disk_mb: int) -> int:
    """Of an image of a disk that takes `disk_mb` MiB, and more than it ever has."""
    size = disk_mb << 20
    return size + size // 4 + _SLACK


def _numbers(home: Path) -> Sequence[int]:
    """Of the images there. Also a link has one: opening it fails."""
    names = os.listdir(home) if home.is_dir() else []
    return [int(found[1]) for name in names if (found := _IMAGE.fullmatch(name))]


def _files(home: Path) -> Sequence[Path]:
    return [home / image(number) for number in _numbers(home)]


def _write(record: Path, digest: str) -> None:
    scratch = record.with_name(f".{secrets.token_hex(4)}")
    scratch.write_text(digest)
    scratch.rename(record)
