"""What each kind of step does."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

from sandyard.errors import BadRequest
from sandyard.images.build.accounts import ensure_user, find_user, make_dir, resolve_owner
from sandyard.images.build.base import Archives, Bench, BuildFailed, Log, State, Step
from sandyard.images.build.copying import Copy, copy_files
from sandyard.images.build.expand import expand
from sandyard.images.build.shell import run_shell

KINDS = frozenset({"COPY", "ADD", "RUN", "WORKDIR", "USER", "ENV", "ARG"})
_MODE = re.compile(r"[0-7]{1,5}")
_ENV_NAME = re.compile(r"[^=\0]+")

Open = Callable[[], Awaitable[Bench]]


def check_step(step: Step, number: int) -> None:
    """Raises `BadRequest` naming the step: a kind nobody knows, or arguments that do not fit."""
    where = f"steps.{number - 1}"
    if step.kind not in KINDS:
        raise BadRequest(f"{where}.type: '{step.kind}' is not one of {', '.join(sorted(KINDS))}", field=f"{where}.type")
    least = {"COPY": 2, "ADD": 2, "ENV": 2, "ARG": 1}.get(step.kind, 1)
    if len(step.args) < least:
        raise BadRequest(f"{where}.args: {step.kind} takes at least {least}", field=f"{where}.args")
    if any("\0" in arg for arg in step.args):
        raise BadRequest(f"{where}.args: a NUL character", field=f"{where}.args")
    if step.kind in ("COPY", "ADD"):
        if not step.files_hash:
            raise BadRequest(f"{where}.filesHash: {step.kind} needs the hash of its files", field=f"{where}.filesHash")
        if len(step.args) > 3 and step.args[3] and not _MODE.fullmatch(step.args[3]):
            raise BadRequest(f"{where}.args: '{step.args[3]}' is not an octal mode", field=f"{where}.args")
    if step.kind in ("ENV", "ARG"):
        if len(step.args) % 2 and not (step.kind == "ARG" and len(step.args) == 1):
            raise BadRequest(f"{where}.args: {step.kind} takes names and values in turn", field=f"{where}.args")
        if not all(_ENV_NAME.fullmatch(name) for name in step.args[::2]):
            raise BadRequest(f"{where}.args: a name is empty or has '=' in it", field=f"{where}.args")


async def run_step(
    step: Step, number: str, state: State, open_bench: Open, archives: Archives, log: Log
) -> tuple[State, bool]:
    """The state after the step, and whether it may have changed files.

    Raises `BuildFailed`, and what the agent and the archive raise."""
    match step.kind:
        case "RUN":
            user = step.args[1] if len(step.args) > 1 and step.args[1] else state.user
            await run_shell((await open_bench()).agent, step.args[0], state, user, log, number)
            return state, True
        case "COPY" | "ADD":
            await _copy(step, number, state, await open_bench(), archives)
            return state, True
        case "WORKDIR":
            return await _workdir(step, number, state, await open_bench())
        case "USER":
            return await _user(step, number, state, await open_bench())
        case _:
            return _env(step, state), False


def _env(step: Step, state: State) -> State:
    args = [*step.args, ""] if len(step.args) == 1 else step.args
    for name, value in zip(args[::2], args[1::2], strict=True):
        state = state.with_env({name: expand(value, state.env)})
    return state


async def _workdir(step: Step, number: str, state: State, bench: Bench) -> tuple[State, bool]:
    path = await _absolute(expand(step.args[0], state.env), state, bench)
    made = await make_dir(bench.agent, path, state.user)
    return replace(state, workdir=path), made


async def _user(step: Step, number: str, state: State, bench: Bench) -> tuple[State, bool]:
    name = expand(step.args[0], state.env).strip()
    plain, colon, _ = name.partition(":")
    if colon:
        await resolve_owner(bench.agent, name)
        return replace(state, user=name), False
    if plain.isdigit() and await find_user(bench.agent, plain) is None:
        raise BuildFailed(number, f"failed to run USER {name}: no user has this number; give one with a name")
    made = await ensure_user(bench.agent, plain)
    return replace(state, user=plain), made


async def _copy(step: Step, number: str, state: State, bench: Bench, archives: Archives) -> None:
    source, target = step.args[0], expand(step.args[1], state.env)
    archive = archives.path(step.files_hash or "")
    if archive is None:
        raise BuildFailed(
            number, f"failed to run {step.kind} {source}: its files were not uploaded, or are gone by now"
        )
    owner = step.args[2] if len(step.args) > 2 and step.args[2] else state.user
    path = await _absolute(target, state, bench)
    if target.endswith(("/", "/.")) or target == ".":
        path = path.rstrip("/") + "/"
    mode = int(step.args[3], 8) if len(step.args) > 3 and step.args[3] else None
    await copy_files(bench.agent, archive, Copy(source, path, await resolve_owner(bench.agent, owner), mode))


async def _absolute(path: str, state: State, bench: Bench) -> str:
    if not path:
        raise ValueError("the path is empty")
    if not path.startswith("/"):
        home = state.workdir
        if home is None:
            user = await find_user(bench.agent, state.user)
            home = user.home if user is not None else "/"
        path = posixpath.join(home, path)
    return posixpath.normpath(path)
