"""The start command of a template: tried once, until its ready command says that it is up."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

from sandyard.errors import GuestError
from sandyard.guest.base import Agent, ExitStatus, Process
from sandyard.images.build.base import FINAL_STEP, BuildFailed, Log, State
from sandyard.images.build.shell import Lines, describe, end, start_shell

POLL_SECONDS = 0.5
_SLEEP = re.compile(r"\s*sleep\s+[\d.]+\s*")
DEFAULT_READY = "sleep 20"  # a start command that nothing else is known of gets that long to fail


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
        process = await start_shell(agent, ready, state, state.user)
        try:
            async for _ in process.output():
                pass
            if await process.wait() == ExitStatus(code=0):
                return
        except BaseException:
            await end(process)
            raise
        await asyncio.sleep(POLL_SECONDS)
