"""Checks that what a sandbox uses is counted, and bounded."""

from __future__ import annotations

import asyncio
import signal
import time

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.runtimes.base import Resources
from sandyard.runtimes.conformance.kit import Kit, eventually, expect, patience, read_until
from sandyard.runtimes.conformance.runner import check

MIB = 1 << 20


@check("a memory bomb dies alone and is counted", own=True)
async def _memory_bomb(kit: Kit) -> None:
    small = await kit.make(Resources(memory_mb=64))
    ran = await kit.run(["python3", "-c", "x=[bytearray(1<<20) for _ in range(4096)]"], agent=small.agent)
    expect(ran.status.signal == signal.SIGKILL, f"the bomb ended with {ran.status}")
    usage = await small.usage()
    expect(usage.oom_kills >= 1, "no kill was counted")
    expect(usage.memory_bytes <= 64 * MIB, f"{usage.memory_bytes >> 20} MiB in use")
    expect(await kit.output("echo alive", agent=small.agent) == "alive", "the sandbox did not survive")


@check("files in memory count as memory", own=True)
async def _memory_files(kit: Kit) -> None:
    small = await kit.make(Resources(memory_mb=48))
    ran = await kit.run("head -c 60M /dev/zero > /dev/shm/fill", agent=small.agent)
    expect(ran.status.code != 0, "60 MiB of shared memory fit into 48 MiB")
    await small.agent.hello()


@check("a fork bomb is contained", own=True)
async def _fork_bomb(kit: Kit) -> None:
    small = await kit.make(Resources(pids=48))
    bomb = await kit.start("f() { f | f & f; }; f", agent=small.agent)
    await asyncio.sleep(0.5)
    async with asyncio.timeout(patience(10)):
        await small.agent.hello()
        expect((await small.usage()).pids <= 48, "more processes than allowed")
        await bomb.signal(signal.SIGKILL)
    expect(await kit.output("echo fine") == "fine", "a neighbour suffered")
    began = time.monotonic()
    await kit.runtime.destroy(small.spec.sandbox_id)
    expect(time.monotonic() - began < patience(10), "destroying it took too long")


@check("at the limit of processes a spawn says so, and works again after", own=True)
async def _process_limit(kit: Kit) -> None:
    small = await kit.make(Resources(pids=24))
    source = "import os,time\ntry:\n while os.fork(): pass\nexcept OSError: print('full',flush=True)\ntime.sleep(60)"
    hog = await kit.start(["python3", "-c", source], agent=small.agent)
    await read_until(hog, b"full")
    try:
        ran = await kit.run("true", agent=small.agent)
    except GuestError as error:
        expect(error.code is GuestErrorCode.LIMIT, f"refused as {error.code}: {error}")
    else:
        expect(ran.status.code != 0, "a shell started beyond the limit")
    await hog.signal(signal.SIGKILL)
    await hog.wait()

    async def runs() -> bool:
        try:
            return (await kit.run("echo fine", agent=small.agent)).text == "fine"
        except GuestError:
            return False

    await eventually(runs, "a command runs after the hog is gone")


@check("CPU is limited to the share given", own=True)
async def _cpu(kit: Kit) -> None:
    slow = await kit.make(Resources(cpu=0.25))
    before = await slow.usage()
    began = time.monotonic()
    await kit.run("timeout 1 bash -c 'while :; do :; done'", agent=slow.agent)
    used = (await slow.usage()).cpu_seconds - before.cpu_seconds
    share = used / (time.monotonic() - began)
    expect(0.05 < share < 0.4, f"used {share:.2f} of a core")


@check("use is told: memory, CPU, disk, processes")
async def _usage(kit: Kit) -> None:
    busy = await kit.make()
    before = await busy.usage()
    source = (
        "import time\nx=bytearray(b'x')*(50<<20)\nopen('/home/user/f','wb').write(bytes(20<<20))\nt=time.time()\n"
        "while time.process_time()<0.3: pass\ntime.sleep(60)"
    )
    process = await kit.start(["python3", "-c", source], agent=busy.agent)

    async def all_grown() -> bool:
        now = await busy.usage()
        memory, cpu = now.memory_bytes - before.memory_bytes, now.cpu_seconds - before.cpu_seconds
        return memory > 40 * MIB and cpu > 0.2 and now.pids > before.pids

    await eventually(all_grown, "memory, CPU and processes grow", 20)
    expect((await busy.usage()).disk_bytes >= before.disk_bytes, "the disk shrank")
    await process.signal(signal.SIGKILL)


@check("open files are limited generously")
async def _open_files(kit: Kit) -> None:
    limit = int(await kit.output("ulimit -n"))
    expect(1024 <= limit <= MIB, f"ulimit -n is {limit}")
