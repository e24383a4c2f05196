"""Checks of standing still: pause and resume, halt and boot, the boot id."""

from __future__ import annotations

import asyncio
import time

from sandyard.errors import CreateFailed, DeathReason
from sandyard.runtimes.base import Instance
from sandyard.runtimes.conformance.kit import Kit, eventually, expect, patience
from sandyard.runtimes.conformance.runner import check

BOOT_ID = "/proc/sys/kernel/random/boot_id"


async def _boot_id(kit: Kit, sandbox: Instance) -> str:
    """As a command and as a file transfer see it: the same."""
    shown = await kit.output(f"cat {BOOT_ID}", agent=sandbox.agent)
    read = b"".join([chunk async for chunk in sandbox.agent.read_file(BOOT_ID)])
    expect(read.decode().strip() == shown, f"read as {read!r}, shown as {shown}")
    return shown


async def _ticks(kit: Kit) -> int:
    return int(await kit.output("cat /tmp/ticks 2>/dev/null | wc -l"))


@check("each sandbox has a boot id of its own, which it cannot change", needs="halt")
async def _own_boot_id(kit: Kit) -> None:
    other = await kit.make()
    mine = await _boot_id(kit, kit.sandbox)
    expect(len(mine) == 36, f"boot id {mine!r}")
    expect(mine != await _boot_id(kit, other), "two sandboxes share one")
    await kit.run(f"echo x > {BOOT_ID}; chmod 777 {BOOT_ID}; umount {BOOT_ID}; rm -f {BOOT_ID}")
    expect(await _boot_id(kit, kit.sandbox) == mine, "it was changed")


@check("a pause keeps processes, pids, memory and the boot id", own=True, needs="pause_keeps_memory")
async def _pause_keeps(kit: Kit) -> None:
    process = await kit.start("held=$RANDOM; echo $held; read line; echo $held $line", stdin=True)
    before = await _boot_id(kit, kit.sandbox), await kit.agent.processes(), (await kit.sandbox.usage()).pids
    await kit.sandbox.pause()
    await kit.sandbox.pause()
    expect(kit.sandbox.paused, "it does not say that it is paused")
    used = (await kit.sandbox.usage()).memory_bytes
    expect(used > 0, "its memory is gone")
    await kit.sandbox.resume()
    await kit.sandbox.resume()
    expect(not kit.sandbox.paused, "it still says that it is paused")
    after = await _boot_id(kit, kit.sandbox), await kit.agent.processes(), (await kit.sandbox.usage()).pids
    expect(before == after, f"before {before}, after {after}")
    await process.write_stdin(b"hello\n")
    said = b"".join([data async for _, data in process.output()]).split()
    expect(said[0] == said[1] and said[2] == b"hello", f"the process said {said}")


@check("nothing runs while paused", own=True, needs="pause_keeps_memory")
async def _stands_still(kit: Kit) -> None:
    await kit.start("while :; do echo >> /tmp/ticks; done")
    await kit.start("for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; wait", user="user")

    async def more_than(number: int) -> bool:
        return await _ticks(kit) > number

    await eventually(lambda: more_than(0), "it does not begin")
    await kit.sandbox.pause()
    before = (await kit.sandbox.usage()).cpu_seconds
    await asyncio.sleep(0.4)
    used = (await kit.sandbox.usage()).cpu_seconds - before
    expect(used < 0.02, f"{used:.3f} s of CPU time were used")
    await kit.sandbox.resume()
    seen = await _ticks(kit)
    await eventually(lambda: more_than(seen), "it did not go on")


@check("a paused sandbox is adopted as such, and resumed", own=True, needs="pause_keeps_memory")
async def _adopt_paused(kit: Kit) -> None:
    await kit.output("echo kept > /tmp/kept")
    await kit.sandbox.pause()
    adopted = await kit.runtime.adopt(kit.sandbox.spec.sandbox_id)
    expect(adopted is not None and adopted.paused, "it was not adopted as paused")
    if adopted is not None:
        await adopted.resume()
        expect(await kit.output("cat /tmp/kept", agent=adopted.agent) == "kept", "it is another sandbox")


@check("a paused sandbox is destroyed quickly, and heard of as killed", own=True, needs="pause_keeps_memory")
async def _destroy_paused(kit: Kit) -> None:
    await kit.start("while :; do sleep 0.01; done")
    await kit.sandbox.pause()
    waiting = asyncio.ensure_future(kit.sandbox.wait_dead())
    began = time.monotonic()
    await kit.runtime.destroy(kit.sandbox.spec.sandbox_id)
    expect(time.monotonic() - began < patience(2), f"took {time.monotonic() - began:.1f} s")
    expect((await waiting).reason is DeathReason.KILLED, f"heard {waiting.result()}")
    expect(kit.sandbox.spec.sandbox_id not in await kit.runtime.list(), "it is still listed")


@check("a halted sandbox boots with its files, a new boot id and no process", own=True, needs="halt")
async def _halt_and_boot(kit: Kit) -> None:
    sandbox_id = kit.sandbox.spec.sandbox_id
    await kit.start("sleep 1000")
    script = "echo kept > /root/kept; rm /etc/os-release; ln -s kept /root/link; echo changed >> /etc/hosts; sync"
    await kit.output(script)
    before = await _boot_id(kit, kit.sandbox)
    waiting = asyncio.ensure_future(kit.sandbox.wait_dead())
    for _ in range(2):
        await kit.runtime.halt(sandbox_id)
    await asyncio.wait_for(waiting, 5)
    expect(sandbox_id in await kit.runtime.halted() and sandbox_id in await kit.runtime.list(), "it is not listed")
    expect(await kit.runtime.adopt(sandbox_id) is None, "it was adopted")
    for _ in range(2):
        booted = await kit.runtime.boot(kit.sandbox.spec)
        expect(sandbox_id not in await kit.runtime.halted(), "it is still listed as halted")
        shown = "cat /root/link; ls /etc/os-release 2>&1 | wc -l; tail -n 1 /etc/hosts; hostname"
        said = (await kit.output(shown, agent=booted.agent)).split()
        expect(said == ["kept", "1", "changed", kit.sandbox.spec.hostname], f"it says {said}")
        expect(await booted.agent.processes() == [], "a process came along")
        after = await _boot_id(kit, booted)
        expect(after != before, "the boot id is the same")
        before = after
        await kit.runtime.halt(sandbox_id)


@check("a paused sandbox can be halted", own=True, needs="halt")
async def _halt_paused(kit: Kit) -> None:
    await kit.output("echo kept > /kept")
    if kit.runtime.capabilities.pause_keeps_memory:
        await kit.sandbox.pause()
    await kit.runtime.halt(kit.sandbox.spec.sandbox_id)
    booted = await kit.runtime.boot(kit.sandbox.spec)
    expect(await kit.output("cat /kept", agent=booted.agent) == "kept", "its file is gone")


@check("a halted sandbox is destroyed, and what is not halted does not boot", own=True, needs="halt")
async def _destroy_halted(kit: Kit) -> None:
    try:
        await kit.runtime.boot(kit.sandbox.spec)
    except CreateFailed:
        await kit.agent.hello()
    else:
        raise AssertionError("a running sandbox was booted")
    await kit.runtime.halt(kit.sandbox.spec.sandbox_id)
    for _ in range(2):
        await kit.runtime.destroy(kit.sandbox.spec.sandbox_id)
    expect(kit.sandbox.spec.sandbox_id not in await kit.runtime.list(), "it is still listed")
    expect(kit.sandbox.spec.sandbox_id not in await kit.runtime.halted(), "it is still listed as halted")
    try:
        await kit.runtime.boot(kit.sandbox.spec)
    except CreateFailed:
        return
    raise AssertionError("a destroyed sandbox was booted")
