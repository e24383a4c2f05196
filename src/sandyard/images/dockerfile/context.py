"""A build context on the client's side: which of its files a Dockerfile needs, and these as one archive.

Only what some COPY, ADD or bind mount names is read; `.dockerignore` counts as Docker's reference has it (a file beside
the Dockerfile, `NAME.dockerignore`, before the context's own). The archive is the same for the same files, whenever
and wherever it is made: its hash is its name.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from e2b_dockerfile_utils import PatternMatcher

from sandyard.errors import BadRequest
from sandyard.images.dockerfile.config import ImageSettings
from sandyard.images.dockerfile.plan import Planner
from sandyard.images.dockerfile.stages import Stage, Stages, split
from sandyard.images.dockerfile.syntax import Dockerfile, DockerfileError
from sandyard.images.dockerfile.tree import FILE, FOLDER, HARD, LINK, Node, NoSource, Tree

_IGNORE_LIMIT = 1 << 20
_VARIABLE = re.compile(r"\$\{?(\w+)")

Digest = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Source:
    """A COPY's source, and the line that names it."""

    pattern: str
    line: int


def ignored(context: Path, dockerfile: Path | None) -> PatternMatcher:
    """Raises `BadRequest` for a pattern that is none."""
    own = dockerfile.with_name(f"{dockerfile.name}.dockerignore") if dockerfile is not None else None
    path = own if own is not None and own.is_file() else context / ".dockerignore"
    if not path.is_file():
        return PatternMatcher([])
    if path.stat().st_size > _IGNORE_LIMIT:
        raise BadRequest(f"{path}: more than {_IGNORE_LIMIT} bytes")
    text = path.read_text("utf-8", "surrogateescape").removeprefix("\ufeff")
    try:
        return PatternMatcher(text.replace("\r\n", "\n").split("\n"))
    except ValueError as error:
        raise BadRequest(f"{path}: {error}") from error


def scan(context: Path, hidden: PatternMatcher) -> Tree:
    """The files of a context that are not ignored; links are not followed.

    Raises `BadRequest` where the context is no directory or a folder cannot be read."""
    if not context.is_dir():
        raise BadRequest(f"build context '{context}' is not a directory", field="path")
    nodes: dict[str, Node] = {}
    firsts: dict[tuple[int, int], str] = {}
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            found = sorted(os.scandir(context / folder), key=lambda entry: entry.name)
        except OSError as error:
            raise BadRequest(f"build context: '{folder or '.'}' cannot be read: {error.strerror}") from error
        for entry in found:
            name = f"{folder}/{entry.name}" if folder else entry.name
            out = hidden.matches(name)
            folded = entry.is_dir(follow_symlinks=False)
            if folded and (not out or hidden.may_match_under(name)):
                waiting.append(name)
            if not out and (node := _node(entry, name, firsts)) is not None:
                nodes[name] = node
    return Tree(nodes)


def sources(file: Dockerfile, build_args: Mapping[str, str], target: str | None) -> Sequence[Source] | None:
    """What a Dockerfile takes from its context; None where that hangs on an image that only the server knows.

    Raises `BadRequest` for a target that is no stage, and `DockerfileError`."""
    stages = split(file, build_args)
    wanted = stages.needed(stages.target(target))
    if _hangs_on_images(wanted):
        return None
    finder = _Finder(stages)
    settings: dict[int, ImageSettings] = {}
    try:
        for stage in wanted:
            base = settings[stage.base] if isinstance(stage.base, int) else ImageSettings()
            settings[stage.index] = finder.plan(stage, base, 1).settings
    except DockerfileError:
        return None  # it may be none, with the variables of the image
    return finder.found


def select(tree: Tree, wanted: Sequence[Source]) -> Sequence[str]:
    """Every name that an archive needs to have, in its order: sources, what is below them, where their links lead.

    Raises `DockerfileError` for a source that is not there."""
    names: set[str] = set()
    for source in wanted:
        try:
            found = tree.find(source.pattern)
        except NoSource as error:
            raise DockerfileError(
                source.line, f"{error} in the build context", remedy="check the path, and .dockerignore"
            ) from error
        for each in found:
            names |= {each.path, *tree.below(each.path)}
    names |= tree.passed
    for name in list(names):
        if (node := tree.nodes.get(name)) is not None and node.kind == HARD:
            names.add(node.target)
    parents = {name[:at] for name in names for at, letter in enumerate(name) if letter == "/"}
    return sorted(name for name in names | parents if name)


def pack(context: Path, tree: Tree, names: Sequence[str], target: IO[bytes]) -> str:
    """Write the archive and return its hash. Owners and times are left out: they are no part of a context.

    Raises `BadRequest` where a file cannot be read, or changes meanwhile."""
    total = hashlib.sha256()
    # A file comes before the names that are one with it.
    ordered = sorted(names, key=lambda name: (tree.nodes[name].kind == HARD, name))
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in ordered:
            _add(tar, context / name, name, tree.nodes[name], total.update)
    return total.hexdigest()


class _Finder(Planner):
    """A plan that asks for no file: it notes what would be asked for. The image's own variables are unknown here."""

    def __init__(self, stages: Stages) -> None:
        super().__init__(stages, None, lambda _: "", network=False)
        self.found: list[Source] = []

    def digest(self, origin: int | str | None, sources: Sequence[str], line: int) -> str:
        if origin is None:
            self.found += [Source(source, line) for source in sources]
        return ""


def _hangs_on_images(wanted: Sequence[Stage]) -> bool:
    """Whether a source has a variable that the Dockerfile does not set."""
    steps = [step for stage in wanted for step in stage.steps]
    own = {word.partition("=")[0] for step in steps if step.name == "ARG" for word in step.args}
    own |= {name for step in steps if step.name == "ENV" for name in step.args[::3]}
    texts = [word for step in steps if step.name in ("COPY", "ADD") for word in step.args[:-1]]
    texts += [value for step in steps if step.name == "RUN" for value in step.all_of("mount")]
    return any(name not in own for text in texts for name in _VARIABLE.findall(text))


def _node(entry: os.DirEntry[str], name: str, firsts: dict[tuple[int, int], str]) -> Node | None:
    found = entry.stat(follow_symlinks=False)
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        return Node(LINK, 0o777, os.readlink(entry.path))
    if stat.S_ISDIR(found.st_mode):
        return Node(FOLDER, mode)
    if not stat.S_ISREG(found.st_mode):
        return None  # sockets, pipes and devices are no part of a context
    if found.st_nlink > 1:
        first = firsts.setdefault((found.st_dev, found.st_ino), name)
        if first != name:
            return Node(HARD, mode, first)
    return Node(FILE, mode)


def _add(tar: tarfile.TarFile, path: Path, name: str, node: Node, digest: Digest) -> None:
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = node.mode, 0
    digest("\0".join((name, node.kind, oct(node.mode), node.target, "")).encode("utf-8", "surrogateescape"))
    if node.kind == FOLDER:
        member.type = tarfile.DIRTYPE
    elif node.kind in (LINK, HARD):
        member.type = tarfile.SYMTYPE if node.kind == LINK else tarfile.LNKTYPE
        member.linkname = node.target
    else:
        _add_file(tar, member, path, digest)
        return
    tar.addfile(member)


def _add_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, digest: Digest) -> None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadRequest(f"build context: '{member.name}' changes while it is read")
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, _Digesting(file, digest, member))
    except OSError as error:
        raise BadRequest(f"build context: '{member.name}' cannot be read: {error.strerror or error}") from error


class _Digesting:
    def __init__(self, file: IO[bytes], digest: Digest, member: tarfile.TarInfo) -> None:
        digest(member.size.to_bytes(8, "big"))
        self._file = file
        self._digest = digest

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._digest(data)
        return data
