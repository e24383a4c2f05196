"""`sandyard upload` and `download`: files and trees with their modes, symlinks and holes.

A plain file goes through the files API. Anything else goes as a tar archive, which `tar` in the sandbox
packs or unpacks; it lies in the sandbox's `/tmp` meanwhile. Holes of a tree need GNU tar there.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer
from e2b import CommandExitException, EntryInfo, FileType, NotFoundException, Sandbox

from sandyard.cli.archive import extents, pack, unpack
from sandyard.cli.rest import lives
from sandyard.connection import resolve_connection
from sandyard.errors import BadRequest, Conflict, NotFound, SandyardError

_BLOCK = 4096
_ZEROS = bytes(_BLOCK)
_SPOOL = 8 << 20  # an archive larger than this lies on disk

SandboxId = Annotated[str, typer.Argument(metavar="ID", help="sandbox id, as `sandyard list` prints it")]
User = Annotated[str | None, typer.Option(help="user in the sandbox; default: the template's")]


def add(target: typer.Typer) -> None:
    target.command("upload")(upload)
    target.command("download")(download)


def upload(
    sandbox_id: SandboxId,
    local: Annotated[Path, typer.Argument(help="file or directory here")],
    remote: Annotated[str, typer.Argument(help="path there; into it, if it is a directory or ends with /")],
    user: User = None,
) -> None:
    """Copy a file or a tree into a sandbox; modes, symlinks and holes are kept. What is there is replaced or joined."""
    if not os.path.lexists(local):
        raise NotFound(f"no such file here: {local}")
    box = _connect(sandbox_id)
    parent, name = _place(box, local, remote, user)
    if local.is_file() and not local.is_symlink() and not _has_holes(local):
        path = posixpath.join(parent, name)
        with local.open("rb") as file:
            box.files.write(path, file, user=user, request_timeout=0)
        _run(box, f"chmod {local.stat().st_mode & 0o7777:o} {shlex.quote(path)}", user, f"keep the mode of {local}")
        return
    kind = _tar(box, user)
    with tempfile.SpooledTemporaryFile(_SPOOL) as archive, _stage(box, user) as stage:
        pack(local, name, archive, sparse=kind == "GNU")
        archive.seek(0)
        box.files.write(stage, archive, user=user, request_timeout=0)
        _run(box, f"tar -xpf {stage} -C {shlex.quote(parent)}", user, f"unpack {local} in {parent}")


def download(
    sandbox_id: SandboxId,
    remote: Annotated[str, typer.Argument(help="file or directory there")],
    local: Annotated[Path, typer.Argument(help="path here; into it, if it is a directory")] = Path(),
    user: User = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="replace what is here")] = False,
) -> None:
    """Copy a file or a tree out of a sandbox; modes, symlinks and holes are kept. Files are this user's."""
    box = _connect(sandbox_id)
    entry = _entry(box, remote, user)
    if entry is None:
        raise NotFound(f"no such file in sandbox {sandbox_id}: {remote}")
    target = local / entry.name if local.is_dir() else local
    if os.path.lexists(target) and not force:
        raise Conflict(f"{target} exists", remedy="--force replaces it")
    with _replacing(target) as fresh:
        # Of a symlink the API tells where it leads in the end, not its own text: that is in the archive.
        if entry.type is FileType.FILE and not entry.symlink_target:
            _download_file(box, entry, fresh, user)
        else:
            _download_tree(box, entry, fresh, user)


def _download_file(box: Sandbox, entry: EntryInfo, target: Path, user: str | None) -> None:
    with target.open("xb") as file:
        write_with_holes(box.files.read(entry.path, format="stream", user=user), file)
    target.chmod(entry.mode & 0o777)  # never setuid: it comes from a machine that is not trusted


def _download_tree(box: Sandbox, entry: EntryInfo, target: Path, user: str | None) -> None:
    parent, name = posixpath.split(entry.path.rstrip("/"))
    sparse = "S" if _tar(box, user) == "GNU" else ""
    with tempfile.TemporaryFile() as archive, _stage(box, user) as stage:
        command = f"tar -c{sparse}f {stage} -C {shlex.quote(parent or '/')} {shlex.quote('./' + name)}"
        _run(box, command, user, f"pack {entry.path}")
        for chunk in box.files.read(stage, format="stream", user=user):
            archive.write(chunk)
        archive.seek(0)
        unpack(archive, name or ".", target)


def write_with_holes(chunks: Iterable[bytes], file: IO[bytes]) -> None:
    """Write a stream, leaving a hole for each block of zeros."""
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        whole = len(rest) - len(rest) % _BLOCK
        _put(file, rest[:whole])
        del rest[:whole]
    _put(file, rest)
    file.truncate()


def _put(file: IO[bytes], data: bytes | bytearray) -> None:
    """Blocks, and what is left of the last one at the end of the stream."""
    if _ZEROS not in data:
        file.write(data)
        return
    for at in range(0, len(data), _BLOCK):
        block = data[at : at + _BLOCK]
        if block == _ZEROS:
            file.seek(_BLOCK, os.SEEK_CUR)
        else:
            file.write(block)


def _place(box: Sandbox, local: Path, remote: str, user: str | None) -> tuple[str, str]:
    """(directory, name) of what is to be made; the directory exists then, and is absolute."""
    entry = _entry(box, remote, user)
    inside = remote.endswith("/") or (entry is not None and entry.type is FileType.DIR)
    name = local.resolve().name if inside else posixpath.basename(remote)
    folder = remote if inside else posixpath.dirname(remote) or "."
    if not name or name in (".", ".."):
        raise BadRequest(f"remote {remote!r} has no name for what is uploaded", field="remote")
    if entry is None or not inside:
        box.files.make_dir(folder, user=user)
    place = _entry(box, folder, user)
    if place is None:
        raise SandyardError(f"{folder} could not be made in the sandbox")
    return place.path, name


def _has_holes(path: Path) -> bool:
    with path.open("rb") as file:
        size = path.stat().st_size
        return sum(length for _, length in extents(file, size)) < size


def _tar(box: Sandbox, user: str | None) -> str:
    """Which tar the sandbox has. Raises `SandyardError` where it has none."""
    try:
        said = box.commands.run("tar --version 2>&1", user=user).stdout
    except CommandExitException as error:
        said = error.stdout
        if error.exit_code in (126, 127):
            raise SandyardError("the sandbox has no tar", remedy="copy file by file, or install tar there") from error
    return "GNU" if "GNU tar" in said else "other"


@contextmanager
def _stage(box: Sandbox, user: str | None) -> Iterator[str]:
    """A path for an archive in the sandbox, gone afterwards."""
    path = f"/tmp/.sandyard-{secrets.token_hex(8)}.tar"
    try:
        yield path
    finally:
        box.files.remove(path, user=user)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A path beside `target` that takes its place when all went well; else what was there stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fresh, old = holder / "new", holder / "old"
        yield fresh
        if os.path.lexists(target):
            target.rename(old)
        fresh.rename(target)
    finally:
        shutil.rmtree(holder, onerror=_unlock)


def _unlock(function: object, path: str, _error: object) -> None:
    """A tree may hold directories that even their owner cannot write to."""
    os.chmod(os.path.dirname(path), 0o700)
    if os.path.isdir(path) and not os.path.islink(path):
        os.chmod(path, 0o700)
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _run(box: Sandbox, command: str, user: str | None, what: str) -> None:
    try:
        box.commands.run(command, user=user, timeout=0)
    except CommandExitException as error:
        raise SandyardError(f"could not {what}: {error.stderr.strip() or f'exit code {error.exit_code}'}") from error


def _entry(box: Sandbox, path: str, user: str | None) -> EntryInfo | None:
    try:
        return box.files.get_info(path, user=user)
    except NotFoundException:
        if not lives(box.sandbox_id):
            raise
        return None


def _connect(sandbox_id: str) -> Sandbox:
    try:
        return Sandbox.connect(sandbox_id, **resolve_connection().sdk_options())
    except NotFoundException as error:
        raise NotFound(f"no such sandbox: {sandbox_id}", remedy="`sandyard list` shows what lives") from error
