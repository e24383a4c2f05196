"""The start command of a template: tried once, until its ready command says that it is up."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import Agent, ExitStatus, Process
from sandyard.images.build.base import FINAL_STEP, BuildFailed, Cache, Cached, Log, State
from sandyard.images.build.chain import then
from sandyard.images.build.shell import Lines, describe, end, start_shell
from sandyard.images.build.stack import Stack

POLL_SECONDS = 0.5
_SLEEP = re.compile(r"\s*sleep\s+(\d+(?:\.\d+)?)\s*")
DEFAULT_READY = "sleep 20"  # a start command that nothing else is known of gets that long to fail


async def settle(
    stack: Stack,
    cache: Cache,
    log: Log,
    key: str,
    state: State,
    start: str | None,
    ready: str | None,
    *,
    fresh: bool,
    ready_seconds: float,
) -> str | None:
    """Try the start command above a finished stack, unless the cache knows how that went (`fresh`: whatever it
    knows); the ready command that sandboxes of the template are to wait for. Raises `BuildFailed`."""
    if start is None and ready is None:
        return None
    tried = then(key, "START", [start, ready])
    over = then(tried, "OVER", [])
    if not fresh and cache.get(tried) is not None:
        log("CACHED START", step=FINAL_STEP)
        is_over = cache.get(over) is not None
    else:
        is_over = await _finish(stack, state, start, ready, log, ready_seconds)
        for known in [tried, over] if is_over else [tried]:
            cache.put(known, Cached(tuple(stack.layers), state, stack.size))
    # SDKs write the default where nothing is known: no sandbox is to wait for what was seen to come up.
    return None if is_over or ready == DEFAULT_READY else ready


async def _finish(
    stack: Stack, state: State, start: str | None, ready: str | None, log: Log, ready_seconds: float
) -> bool:
    """Whether there is nothing to wait for after the start command. Its changes are thrown away."""
    try:
        await stack.close()
        bench = await stack.open(state)
        return await try_start(bench.agent, state, start, ready, log, ready_seconds)
    except (GuestError, AgentLinkError) as error:
        raise await stack.failure(FINAL_STEP, error) from error
    finally:
        await stack.close()


async def try_start(
    agent: Agent, state: State, start: str | None, ready: str | None, log: Log, ready_seconds: float
) -> bool:
    """Run `start` and repeat `ready` until it succeeds. True where the start command is over, and `ready` would
    only have let time pass: then there is nothing to wait for, here or in any sandbox of the template.

    Raises `BuildFailed` where the start command fails first or is not ready in `ready_seconds`."""
    process = await _start(agent, state, start, log) if start is not None else None
    watching = asyncio.create_task(_watch(process, log)) if process is not None else None
    polling = asyncio.create_task(_poll(agent, state, ready or DEFAULT_READY))
    try:
        waiting = {polling} if watching is None else {polling, watching}
        deadline = time.monotonic() + ready_seconds
        while not polling.done():
            left = deadline - time.monotonic()
            await asyncio.wait(waiting, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
            if watching is not None and watching.done():
                status = watching.result()
                if status != ExitStatus(code=0):
                    raise BuildFailed(FINAL_STEP, f"the start command failed: {describe(status)}")
                if _SLEEP.fullmatch(ready or DEFAULT_READY):
                    log("the start command is over", step=FINAL_STEP)
                    return True
                waiting = {polling}
            if not polling.done() and time.monotonic() >= deadline:
                raise BuildFailed(FINAL_STEP, f"the ready command did not succeed within {ready_seconds:g} s")
        polling.result()
        log("ready", step=FINAL_STEP)
        return False
    finally:
        for task in (polling, watching):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


async def _start(agent: Agent, state: State, start: str, log: Log) -> Process:
    log(f"START {start}", step=FINAL_STEP)
    try:
        return await start_shell(agent, start, state, state.user)
    except GuestError as error:
        raise BuildFailed(FINAL_STEP, f"the start command failed: {error.message}") from error


async def _watch(process: Process, log: Log) -> ExitStatus:
    await Lines(log, FINAL_STEP).take(process)
    return await process.wait()


async def _poll(agent: Agent, state: State, ready: str) -> None:
    while True:
        try:
            process = await start_shell(agent, ready, state, state.user)
        except GuestError as error:
            if error.code is not GuestErrorCode.NOT_FOUND or (seconds := _SLEEP.fullmatch(ready)) is None:
                raise
            await asyncio.sleep(float(seconds[1]))  # in an image that cannot wait by itself
            return
        try:
            async for _ in process.output():
                pass
            if await process.wait() == ExitStatus(code=0):
                return
        except BaseException:
            await end(process)
            raise
        await asyncio.sleep(POLL_SECONDS)
