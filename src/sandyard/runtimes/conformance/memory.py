"""Checks of memory that outlives its sandbox's processes: suspended ones, snapshots and copies that go on."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from pathlib import Path

from sandyard.errors import CreateFailed
from sandyard.runtimes.base import Instance, SandboxSpec
from sandyard.runtimes.conformance.commits import end, layer_home
from sandyard.runtimes.conformance.kit import Kit, expect
from sandyard.runtimes.conformance.runner import check

CLOCK = 0.5  # seconds that a copy's clock may be off
_COUNT = "i=0; while :; do i=$((i+1)); echo $i >> /root/lines; sync /root/lines; done"
_WAIT = "while [ ! -s /root/lines ]; do sleep 0.02; done"


async def _copy(kit: Kit, layer: Path) -> Instance:
    """A sandbox that goes on with the memory of `layer`, committed of the check's own."""
    sandbox_id = f"check{secrets.token_hex(6)}"
    kit.made.append(sandbox_id)
    source = kit.sandbox.spec
    rootfs = replace(source.rootfs, layers=[layer, *source.rootfs.layers])
    spec = SandboxSpec(sandbox_id, rootfs, source.resources, sandbox_id, memory=layer)
    return await kit.runtime.create(spec)


async def _lines(kit: Kit, sandbox: Instance) -> int:
    """How far it has counted: without a gap, and without a number twice, or memory and disk are not of one instant."""
    lines = [int(line) for line in (await kit.output("cat /root/lines", agent=sandbox.agent)).split()]
    expect(lines == list(range(1, len(lines) + 1)), f"it wrote {lines[:3]} to {lines[-3:]}, {len(lines)} of them")
    return len(lines)


async def _goes_on(kit: Kit, sandbox: Instance, pid: int) -> None:
    expect(pid in await sandbox.agent.processes(), "the process is gone")
    before = await _lines(kit, sandbox)
    await kit.output(f"while [ $(wc -l < /root/lines) -le {before} ]; do sleep 0.02; done", agent=sandbox.agent)


@check("a suspended sandbox goes on where it stood, with the host's time", own=True, needs="memory_snapshot")
async def _suspended(kit: Kit) -> None:
    runtime, sandbox_id = kit.runtime, kit.sandbox.spec.sandbox_id
    process = await kit.start(_COUNT)
    await kit.output(f"{_WAIT}; echo kept > /dev/shm/kept")
    for _ in range(2):
        await runtime.suspend(sandbox_id)
        await runtime.suspend(sandbox_id)
        expect(sandbox_id in await runtime.suspended(), "it is not listed")
        expect(await runtime.adopt(sandbox_id) is None, "it lives")
        woken = await runtime.wake(kit.sandbox.spec)
        expect(sandbox_id not in await runtime.suspended(), "it is still listed")
        off = float(await kit.output("date +%s.%N", agent=woken.agent)) - time.time()
        expect(abs(off) < CLOCK, f"its clock is {off:.2f} s off")
        await _goes_on(kit, woken, process.pid)
    expect(await kit.output("cat /dev/shm/kept", agent=woken.agent) == "kept", "what was in memory is gone")


@check("the memory of a suspended sandbox can be given up", own=True, needs="memory_snapshot")
async def _given_up(kit: Kit) -> None:
    runtime, sandbox_id = kit.runtime, kit.sandbox.spec.sandbox_id
    await kit.output("echo kept > /root/kept")
    await runtime.suspend(sandbox_id)
    await runtime.halt(sandbox_id)
    expect(sandbox_id not in await runtime.suspended(), "it is still suspended")
    try:
        await runtime.wake(kit.sandbox.spec)
    except CreateFailed:
        pass
    else:
        raise AssertionError("it was woken")
    booted = await runtime.boot(kit.sandbox.spec)
    expect(await kit.output("cat /root/kept", agent=booted.agent) == "kept", "its files are gone")
    expect(await booted.agent.processes() == [], "it has processes")


@check("memory and files of a snapshot are of one instant, and its source goes on", own=True, needs="memory_snapshot")
async def _instant(kit: Kit) -> None:
    process = await kit.start(_COUNT)
    await kit.output(_WAIT)
    async with layer_home() as home:
        await kit.sandbox.commit(home / "one", memory=True)
        await kit.sandbox.commit(home / "two", memory=True, parent=home / "one")
        for name in ("one", "two"):
            copy = await _copy(kit, home / name)
            await _goes_on(kit, copy, process.pid)
            await end(kit, copy)
        await _goes_on(kit, kit.sandbox, process.pid)


@check("copies are told apart before anything runs in them", own=True, needs="memory_snapshot")
async def _apart(kit: Kit) -> None:
    mine = await kit.output("hostname")
    await kit.start(
        f"while [ $(hostname) = {mine} ]; do sleep 0.01; done;"
        " { hostname; cat /proc/sys/kernel/random/uuid; date +%s.%N; } > /root/draft; mv /root/draft /root/first"
    )
    seen = set()
    async with layer_home() as home:
        await kit.sandbox.commit(home / "one", durable=False, memory=True)
        for _ in range(3):
            copy = await _copy(kit, home / "one")
            command = (
                "while [ ! -e /root/first ]; do sleep 0.02; done; cat /root/first; head -c 16 /dev/urandom | od -tx1"
            )
            name, uuid, _at, *random = (await kit.output(command, agent=copy.agent)).split()
            expect(name == copy.spec.sandbox_id, f"it ran as {name}")
            off = float(await kit.output("date +%s.%N", agent=copy.agent)) - time.time()
            expect(abs(off) < CLOCK, f"its clock is {off:.2f} s off")
            seen |= {uuid, " ".join(random)}
            await end(kit, copy)
    expect(len(seen) == 6, f"copies share randomness: {seen}")
    expect(await kit.output("hostname") == mine, "the source has another name")


@check("what has no memory is refused, and nothing is left", own=True, needs="memory_snapshot")
async def _refused(kit: Kit) -> None:
    async with layer_home() as home:
        await kit.sandbox.commit(home / "files")
        before = set(await kit.runtime.list())
        try:
            await _copy(kit, home / "files")
        except CreateFailed as error:
            expect(error.stage == "snapshot", f"it failed at {error.stage}: {error}")
        else:
            raise AssertionError("it was made")
        expect(set(await kit.runtime.list()) == before, "something is left")
