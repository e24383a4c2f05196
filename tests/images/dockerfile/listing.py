"""The files of a tar archive as facts that two builders can be compared by."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass

# What a sandbox or a builder mounts over, or writes for itself: no file of an image.
PLACES = ("dev", "proc", "sys", "run", "etc/hosts", "etc/hostname", "etc/resolv.conf", "tmp/busybox", "etc/mtab")
OPTIONAL = {"etc", "tmp", "run"}  # every sandbox has these, also one of an image that has not


@dataclass(frozen=True)
class Fact:
    kind: str
    mode: int
    owner: tuple[int, int]
    size: int = 0
    digest: str = ""
    target: str = ""


@dataclass(frozen=True)
class Listing:
    """`groups`: sets of names that are one file."""

    files: Mapping[str, Fact]
    groups: frozenset[frozenset[str]]


def read(data: bytes) -> Listing:
    files: dict[str, Fact] = {}
    first: dict[str, set[str]] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            name = member.name.removeprefix("./").strip("/")
            if name in ("", ".") or any(name == place or name.startswith(f"{place}/") for place in PLACES):
                continue
            owner = (member.uid, member.gid)
            if member.islnk():
                origin = member.linkname.removeprefix("./").strip("/")
                files[name] = files[origin]
                first.setdefault(origin, {origin}).add(name)
            elif member.isdir():
                files[name] = Fact("folder", member.mode, owner)
            elif member.issym():
                files[name] = Fact("link", 0o777, owner, target=member.linkname)
            elif member.isreg():
                content = tar.extractfile(member)
                assert content is not None
                digest = hashlib.sha256(content.read()).hexdigest()
                files[name] = Fact("file", member.mode, owner, member.size, digest)
    return Listing(files, frozenset(frozenset(names) for names in first.values()))


def differences(ours: Listing, theirs: Listing) -> list[str]:
    """Empty where both say the same."""
    found: list[str] = []
    for name in sorted(ours.files.keys() | theirs.files.keys()):
        one, other = ours.files.get(name), theirs.files.get(name)
        if one != other and not (other is None and name in OPTIONAL):
            found.append(f"{name}: {one} here, {other} there")
    found += [f"one file: {sorted(group)}" for group in ours.groups ^ theirs.groups]
    return found
