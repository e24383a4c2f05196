"""The names within an archive, or a build context, as a tree: what a source of COPY names there.

Links are followed within the tree and never out of it: `/` is the tree's own root, and `..` ends there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.errors import BadRequest
from sandyard.images.build.archive import clean, pick
from sandyard.images.dockerfile.match import BadPattern, has_magic, matcher

FILE, FOLDER, LINK, HARD = "file", "folder", "link", "hard"
_HOPS = 40
_CHUNK = 1 << 20


class NoSource(ValueError):
    """A source that is not there, in one line."""


@dataclass(frozen=True, slots=True)
class Node:
    """`target` of a link, or (within the tree) of a hard link; `digest` of a file's bytes."""

    kind: str
    mode: int = 0o755
    target: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """`name`: the last part as it was asked for; `path`: where that leads."""

    name: str
    path: str


class Tree:
    """`passed`: the links that were followed so far."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = dict(nodes)
        self.passed: set[str] = set()
        self._children: dict[str, set[str]] = {"": set()}
        for path in list(self.nodes):
            while path and path not in self._children.setdefault(parent := path.rpartition("/")[0], set()):
                self._children[parent].add(path)
                if parent and parent not in self.nodes:
                    self.nodes[parent] = Node(FOLDER)
                path = parent

    def find(self, pattern: str) -> Sequence[Found]:
        """What a source names, by name. Raises `NoSource` and `BadRequest` (it leaves the tree)."""
        parts = clean(pattern)
        at = [Found("", "")]
        for part in parts:
            at = [found for place in at for found in self._step(place, part)]
        if not at:
            raise NoSource(f"'{pattern}' is not there")
        return [Found(each.name, self.resolve(each.path)) for each in at]

    def resolve(self, path: str) -> str:
        """Where a path leads. Raises `NoSource`."""
        return self._follow(path, _HOPS)

    def below(self, path: str) -> Iterator[str]:
        """All that lies below a folder, each folder before what it holds; nothing is followed."""
        waiting = sorted(self._children.get(path, ()), reverse=True)
        while waiting:
            found = waiting.pop()
            yield found
            waiting += sorted(self._children.get(found, ()), reverse=True)

    def is_folder(self, path: str) -> bool:
        return not path or self.nodes[path].kind == FOLDER

    def digest(self, path: str) -> str:
        """Of everything at and below a path: names, kinds, modes, bytes."""
        total = hashlib.sha256()
        for each in (path, *self.below(path)):
            node = self.nodes.get(each, Node(FOLDER))
            parts = (each, node.kind, oct(node.mode), node.target, node.digest)
            total.update("\0".join(parts).encode("utf-8", "surrogateescape") + b"\1")
        return total.hexdigest()

    def _step(self, place: Found, part: str) -> Iterator[Found]:
        folder = self.resolve(place.path)
        children = self._children.get(folder, set())
        direct = f"{folder}/{part}" if folder else part
        if direct in children:  # also a name with what would be a wildcard
            yield Found(part, direct)
        elif has_magic(part):
            try:
                matches = matcher(part)
            except BadPattern as error:
                raise NoSource(f"'{part}' is not a pattern") from error
            for child in sorted(children):
                name = child.rpartition("/")[2]
                if matches(name):
                    yield Found(name, child)

    def _follow(self, path: str, hops: int) -> str:
        done = ""
        for part in clean(path):
            done = f"{done}/{part}" if done else part
            node = self.nodes.get(done)
            if node is None:
                raise NoSource(f"'{path}' leads to '{done}', which is not there")
            if node.kind == LINK:
                if hops <= 0:
                    raise NoSource(f"'{path}' leads in a circle")
                self.passed.add(done)
                done = self._follow(scoped(done, node.target), hops - 1)
        return done


def scoped(link: str, target: str) -> str:
    """Where a link of a tree points, within the tree."""
    parts = [] if target.startswith("/") else link.split("/")[:-1]
    for part in target.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def read_tree(archive: Path, limit: int, *, digests: bool = True) -> Tree:
    """The tree of an archive whose files have at most `limit` bytes. Blocking. Raises `BadRequest`."""
    nodes: dict[str, Node] = {}
    size = 0
    for entry in pick(archive, ""):
        member = entry.member
        size += member.size if member.isreg() else 0
        if size > limit:
            raise BadRequest(f"the files of the archive pass {limit} bytes")
        if member.islnk():
            nodes[entry.name] = Node(HARD, member.mode, _first(nodes, member.linkname))
        elif member.issym():
            nodes[entry.name] = Node(LINK, 0o777, member.linkname)
        elif member.isdir():
            nodes[entry.name] = Node(FOLDER, member.mode)
        else:
            total = hashlib.sha256()
            while digests and entry.content is not None and (data := entry.content.read(_CHUNK)):
                total.update(data)
            nodes[entry.name] = Node(FILE, member.mode, "", total.hexdigest())
    return Tree(nodes)


def _first(nodes: Mapping[str, Node], name: str) -> str:
    """The file that a hard link is one with."""
    node = nodes.get(name)
    if node is None or node.kind not in (FILE, HARD):
        raise BadRequest(f"a hard link to '{name}', which comes later or never")
    return node.target if node.kind == HARD else name
