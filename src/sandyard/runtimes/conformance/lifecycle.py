"""Checks of making, finding, and destroying sandboxes."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sandyard.errors import AgentLinkError, CreateFailed, DeathReason
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit, eventually, expect, patience
from sandyard.runtimes.conformance.runner import check


def _new(kit: Kit) -> SandboxSpec:
    sandbox_id = f"check{secrets.token_hex(6)}"
    kit.made.append(sandbox_id)
    return SandboxSpec(sandbox_id, kit.rootfs)


def _mounts_and_fds() -> tuple[Sequence[str], int]:
    """What this process sees mounted, and how many descriptors it has."""
    return Path("/proc/self/mountinfo").read_text().splitlines(), len(os.listdir("/proc/self/fd"))


@check("a bad spec fails at a named stage and leaves nothing")
async def _bad_spec(kit: Kit) -> None:
    good = _new(kit)
    bad = [
        replace(good, sandbox_id="../escape"),
        replace(good, sandbox_id=""),
        replace(good, rootfs=Rootfs([Path("/does/not/exist")])),
    ]
    for spec in bad:
        try:
            await kit.runtime.create(spec)
        except CreateFailed as error:
            expect(error.stage, "no stage is named")
        else:
            raise AssertionError(f"{spec} was made")
        expect(spec.sandbox_id not in await kit.runtime.list(), f"{spec.sandbox_id} is left")


@check("an id is used once at a time")
async def _same_id(kit: Kit) -> None:
    try:
        await kit.runtime.create(kit.sandbox.spec)
    except CreateFailed:
        await kit.agent.hello()
    else:
        raise AssertionError("a second sandbox of the same id was made")


@check("destroy is idempotent")
async def _destroy_twice(kit: Kit) -> None:
    spec = _new(kit)
    await kit.runtime.create(spec)
    for _ in range(3):
        await kit.runtime.destroy(spec.sandbox_id)
    await kit.runtime.destroy("neverwasthere")
    expect(spec.sandbox_id not in await kit.runtime.list(), "it is still listed")


@check("destroy twice at once is one destroy")
async def _destroy_at_once(kit: Kit) -> None:
    spec = _new(kit)
    await kit.runtime.create(spec)
    await asyncio.gather(*(kit.runtime.destroy(spec.sandbox_id) for _ in range(4)))
    expect(spec.sandbox_id not in await kit.runtime.list(), "it is still listed")


@check("destroy is quick, also of a busy sandbox")
async def _destroy_busy(kit: Kit) -> None:
    busy = await kit.make()
    await kit.start("for i in $(seq 40); do sleep 100 & done; while :; do :; done", agent=busy.agent)
    await asyncio.sleep(0.2)
    began = time.monotonic()
    await kit.runtime.destroy(busy.spec.sandbox_id)
    expect(time.monotonic() - began < patience(2), f"took {time.monotonic() - began:.1f} s")


@check("nothing is left after destroy")
async def _nothing_left(kit: Kit) -> None:
    await kit.runtime.rest()
    mounts, fds = await asyncio.to_thread(_mounts_and_fds)
    for _ in range(3):
        spec = _new(kit)
        sandbox = await kit.runtime.create(spec)
        await kit.start("sleep 100", agent=sandbox.agent)
        await kit.runtime.destroy(spec.sandbox_id)
        expect(spec.sandbox_id not in await kit.runtime.list(), "it is still listed")
        expect(await kit.runtime.adopt(spec.sandbox_id) is None, "it can still be adopted")

    await kit.runtime.rest()

    async def as_before() -> bool:
        now = await asyncio.to_thread(_mounts_and_fds)
        return now[0] == mounts and now[1] <= fds

    await eventually(as_before, "mounts or descriptors are left")


@check("every waiter hears of a destroy as killed")
async def _killed(kit: Kit) -> None:
    spec = _new(kit)
    sandbox = await kit.runtime.create(spec)
    waiters = [asyncio.ensure_future(sandbox.wait_dead()) for _ in range(3)]
    await asyncio.sleep(0.05)
    expect(not any(waiter.done() for waiter in waiters), "dead before it was destroyed")
    await kit.runtime.destroy(spec.sandbox_id)
    async with asyncio.timeout(patience(5)):
        deaths = await asyncio.gather(*waiters, sandbox.wait_dead())
    expect(all(death.reason is DeathReason.KILLED for death in deaths), f"heard {deaths}")


@check("a command in flight learns that its sandbox is gone")
async def _in_flight(kit: Kit) -> None:
    spec = _new(kit)
    sandbox = await kit.runtime.create(spec)
    process = await kit.start("sleep 100", agent=sandbox.agent)
    waiting = asyncio.ensure_future(process.wait())
    await asyncio.sleep(0.05)
    await kit.runtime.destroy(spec.sandbox_id)
    try:
        async with asyncio.timeout(patience(5)):
            await waiting
    except AgentLinkError:
        return
    raise AssertionError("it heard of an end that nobody saw")


@check("a sandbox can be adopted and an unknown one cannot")
async def _adopt(kit: Kit) -> None:
    expect(await kit.runtime.adopt("neverwasthere") is None, "an unknown one was adopted")
    await kit.output("echo kept > /tmp/kept")
    adopted = await kit.runtime.adopt(kit.sandbox.spec.sandbox_id)
    expect(adopted is not None, "a live one was not adopted")
    if adopted is not None:
        kit.sandbox = adopted
        expect(await kit.output("cat /tmp/kept") == "kept", "it is another sandbox")


@check("eight are made at once")
async def _burst(kit: Kit) -> None:
    specs = [_new(kit) for _ in range(8)]
    made = await asyncio.gather(*(kit.runtime.create(spec) for spec in specs))
    for sandbox, spec in zip(made, specs, strict=True):
        await sandbox.agent.hello()
        expect(spec.sandbox_id in await kit.runtime.list(), f"{spec.sandbox_id} is not listed")


@check("a cancelled create leaves nothing")
async def _cancelled(kit: Kit) -> None:
    for delay in (0.0, 0.002, 0.01, 0.02):
        spec = _new(kit)
        making = asyncio.ensure_future(kit.runtime.create(spec))
        await asyncio.sleep(delay)
        making.cancel()
        try:
            await making
        except asyncio.CancelledError:
            expect(spec.sandbox_id not in await kit.runtime.list(), "something is left")


@check("the template is never changed")
async def _template(kit: Kit) -> None:
    first = await kit.make()
    await kit.output("echo changed > /etc/os-release; rm -rf /usr/share; touch /new", agent=first.agent)
    second = await kit.make(Resources())
    script = "grep -c changed /etc/os-release; ls -d /usr/share; ls /new"
    got = (await kit.run(script, agent=second.agent)).text.split()
    expect(got == ["0", "/usr/share"], f"the second sandbox sees {got}")
