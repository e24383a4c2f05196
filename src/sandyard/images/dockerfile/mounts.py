"""`RUN --mount`: what was asked for, and what a sandbox without mounts makes of it.

A sandbox may not mount. A cache is what Docker's reference lets it be, empty at any time: here it is always. Like a
tmpfs it is a directory that is gone after the command, with whatever lay there before back in its place; a bind is
a copy, whose changes are lost as those of a bind are.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from sandyard.guest.base import Agent
from sandyard.images.build.accounts import exists, make_dir
from sandyard.images.build.copying import owner_text
from sandyard.images.dockerfile.actions import Mount, Origin
from sandyard.images.dockerfile.syntax import DockerfileError, Instruction, assignments

_KNOWN = {
    "bind": {"from", "source", "ro", "rw"},
    "cache": {"id", "from", "source", "sharing", "mode", "uid", "gid", "ro", "rw"},
    "tmpfs": {"size"},
}
_SAME = {"src": "source", "dst": "target", "destination": "target", "readonly": "ro", "readwrite": "rw"}

Fill = Callable[[Mount], Awaitable[None]]


def mounts_of(
    step: Instruction, cwd: str, expand: Callable[[str, int], str], origin: Callable[[str], Origin]
) -> Sequence[Mount]:
    """Raises `DockerfileError` naming a type or option that is not supported."""
    found: list[Mount] = []
    for value in step.all_of("mount"):
        given = {_SAME.get(name, name): expand(text, step.line) for name, text in
                 assignments(value, step.line, "--mount").items()}  # fmt: skip
        kind = given.pop("type", "bind")
        if kind not in _KNOWN:
            raise DockerfileError(step.line, f"RUN --mount=type={kind} is not supported")
        target = given.pop("target", "")
        if unknown := sorted(set(given) - _KNOWN[kind]):
            raise DockerfileError(step.line, f"RUN --mount=type={kind},{unknown[0]} is not supported")
        if not target:
            raise DockerfileError(step.line, f"RUN --mount=type={kind} needs a target")
        if kind == "cache" and ("from" in given or "source" in given):
            raise DockerfileError(step.line, "RUN --mount=type=cache,from is not supported: caches begin empty")
        path = posixpath.normpath(posixpath.join(cwd or "/", target))
        if path == "/":
            raise DockerfileError(step.line, "RUN --mount: its target is the root")
        owner = (_number(given, "uid", 10, step), _number(given, "gid", 10, step))
        mode = _number(given, "mode", 8, step) if "mode" in given else (0o1777 if kind == "tmpfs" else 0o755)
        where = origin(given["from"]) if "from" in given else None
        found.append(Mount(kind, path, where, given.get("source", "."), owner, mode))
    return found


@asynccontextmanager
async def mounted(agent: Agent, mounts: Sequence[Mount], fill: Fill) -> AsyncIterator[None]:
    """The mounts, for as long as the context is open and ends well: after a failure nobody keeps the sandbox."""
    undo: list[Callable[[], Awaitable[None]]] = []
    for number, mount in enumerate(mounts):
        undo.append(await _mount(agent, mount, f"{mount.target}.sandyard-{number}", fill))
    yield
    for step in reversed(undo):
        await step()


async def _mount(agent: Agent, mount: Mount, aside: str, fill: Fill) -> Callable[[], Awaitable[None]]:
    hidden = await exists(agent, mount.target)
    missing: list[str] = []
    if hidden:
        await agent.move(mount.target, aside)
    else:
        parent = posixpath.dirname(mount.target)
        while not await exists(agent, parent):
            missing.append(parent)
            parent = posixpath.dirname(parent)
    if mount.kind == "bind":
        await fill(mount)
    else:
        await make_dir(agent, posixpath.dirname(mount.target), "0:0")
        await agent.make_dir(mount.target, owner_text(mount.owner), mount.mode)

    async def undo() -> None:
        await agent.remove(mount.target)
        if hidden:
            await agent.move(aside, mount.target)
        for path in missing:  # the lowest first; what the command put beside the mount keeps its place
            if await exists(agent, path) and not await agent.list_dir(path):
                await agent.remove(path)

    return undo


def _number(given: dict[str, str], name: str, base: int, step: Instruction) -> int:
    try:
        return int(given.get(name, "0"), base)
    except ValueError as error:
        raise DockerfileError(step.line, f"RUN --mount: {name}={given[name]} is not a number") from error
