"""The minimal root in which the fork server and its sessions live: an allow-list, read-only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from sandyard.envs.process.inside.kernel import (
    ATTR_NODEV,
    ATTR_NOSUID,
    ATTR_RDONLY,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    mount,
    pivot_root,
    restrict_mount,
)

DEVICES = ("null", "zero", "full", "random", "urandom")


class Plan(TypedDict):
    """What is in the root. `scratch` is an empty directory of the host, free again afterwards."""

    scratch: str
    binds: Sequence[tuple[str, str]]  # (path on the host, path in the root)
    hidden: Sequence[str]  # directories of binds that are empty in the root
    links: Mapping[str, str]
    files: Mapping[str, str]
    rootless: bool


def enter(plan: Plan) -> None:
    """Build the root in this mount namespace and make it "/". Raises `OSError` naming the step."""
    root = plan["scratch"]
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=4m")
    for name in ("tmp", "proc", "dev", "etc"):
        os.mkdir(f"{root}/{name}", 0o755)
    for source, target in plan["binds"]:
        _bind(source, root + target, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}", ATTR_RDONLY | ATTR_NOSUID)
    for path in plan["hidden"]:
        mount("tmpfs", root + path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=4k")
    for path, target in plan["links"].items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    os.symlink("/tmp", f"{root}/dev/shm")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    for path, text in plan["files"].items():
        _write(root + path, text)
    if plan["rootless"]:
        # Without privileges /proc can only be mounted where another one is: sessions mount theirs over it.
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    pivot_root(root)
    restrict_mount("/", ATTR_RDONLY | ATTR_NOSUID)


def _bind(source: str, target: str, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "")
    mount(source, target, "", MS_BIND | MS_REC)
    restrict_mount(target, attributes)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
