"""What each action does in the sandbox of its stage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest.base import Agent, Process, ProcessSpec
from sandyard.images.build.accounts import ensure_user, find_user, is_dir, make_dir, resolve_owner
from sandyard.images.build.base import BuildFailed, Log
from sandyard.images.build.shell import watch
from sandyard.images.dockerfile.actions import Action, MakeFolder, MakeUser, Mount, Put, Run
from sandyard.images.dockerfile.mounts import mounted
from sandyard.images.dockerfile.putting import Supply, put

_SCRIPT = "/dev/.sandyard-script"  # below a tmpfs of the sandbox: in no layer

Provide = Callable[[Put], Awaitable[Supply]]
"""The archive that has a Put's files."""


class Performer:
    """`scratch`: a directory for archives on their way; `limit`: bytes that such may hold, or unpack to."""

    def __init__(self, agent: Agent, provide: Provide, scratch: Path, limit: int, log: Log) -> None:
        self._agent = agent
        self._provide = provide
        self._scratch = scratch
        self._limit = limit
        self._log = log

    async def perform(self, action: Action, step: str) -> bool:
        """Whether files may have changed. Raises `BuildFailed`, and what `put` and the agent raise."""
        match action:
            case Run():
                await self._run(action, step)
                return True
            case Put():
                await self._put(action)
                return True
            case MakeFolder():
                user = await process_user(self._agent, action.user)
                return await make_dir(self._agent, action.path, user)
            case MakeUser():
                return await ensure_user(self._agent, action.name)

    async def _put(self, action: Put) -> None:
        """Heredocs have an archive of their own."""
        names = tuple(name for name, _ in action.inline)
        for part in (replace(action, sources=names), replace(action, inline=())):
            if part.sources:
                await put(self._agent, await self._provide(part), part, self._scratch, self._limit)

    async def _fill(self, mount: Mount) -> None:
        await self._put(mount.put())

    async def _run(self, run: Run, step: str) -> None:
        async with mounted(self._agent, run.mounts, self._fill):
            argv = list(run.argv)
            user = await process_user(self._agent, run.user)
            if run.script is not None:
                argv = [_SCRIPT]
                await self._agent.write_file(_SCRIPT, run.script.encode("utf-8", "surrogateescape"), "0:0", 0o755)
            process = await self._spawn(ProcessSpec(argv, run.env, run.cwd, user), step)
            await watch(process, self._log, step)

    async def _spawn(self, spec: ProcessSpec, step: str) -> Process:
        assert spec.cwd is not None  # Docker's default is the root
        if not await is_dir(self._agent, spec.cwd):  # an image may name a directory that it does not have
            await make_dir(self._agent, spec.cwd, "0:0")
        try:
            return await self._agent.spawn(spec)
        except GuestError as error:
            if error.code is GuestErrorCode.NOT_FOUND:
                raise BuildFailed(step, f"the image has no {spec.argv[0]}") from error
            raise


async def process_user(agent: Agent, text: str) -> str:
    """The user of a process by what USER says: numbers need no account. Raises `ValueError`."""
    name, colon, _ = text.partition(":")
    if name in ("", "root", "0") and not colon:
        return "0:0"
    if colon:
        uid, gid = await resolve_owner(agent, text)
        return f"{uid}:{gid}"
    known = await find_user(agent, name)
    return f"{name}:0" if name.isdecimal() and (known is None or known.name == name) else name
