"""VMMs that stand ready: what is started with one, what goes wrong with one, what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import SandboxError
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime, claim, spares
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.layout import user_of
from sandyard.runtimes.microvm.spare import Spare
from tests.runtimes.microvm import claimant
from tests.runtimes.microvm.victim import NAME, SMALL

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /run/n; sleep 0.05; done"
SERVER = """
import socket
with socket.create_server(("10.200.0.1", 7777)) as listener:
    while True:
        listener.accept()[0].sendall(b"here\\n")
"""


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.02)


async def ready(runtime: MicroVMRuntime, count: int = 2) -> list[Spare]:
    """Those that there are once there are so many."""
    await eventually(lambda: len(runtime.host.spares.ready()) >= count)
    return runtime.host.spares.ready()


def spec_of(base: Rootfs, name: str) -> SandboxSpec:
    return SandboxSpec(name, base, SMALL, hostname=name)


async def made(runtime: MicroVMRuntime, spec: SandboxSpec) -> Kit:
    return Kit(runtime, spec.rootfs, await runtime.create(spec))


def vmm_of(kit: Kit) -> MicroVMInstance:
    assert isinstance(kit.sandbox, MicroVMInstance)
    return kit.sandbox


def left(runtime: MicroVMRuntime) -> list[str]:
    """Everything that has the name of one."""
    layout, cgroups = runtime.host.layout, runtime.host.cgroups
    places = [layout.homes, layout.disks, layout.memories]
    places += [root / cgroups.parent for root in cgroups.roots.values()]
    return [str(path) for place in places if place.is_dir() for path in place.iterdir() if "spare" in path.name]


def owners(path: Path) -> set[int]:
    """Of the images, and whom their directory is for."""
    return {user_of(path), *(each.stat().st_uid for each in path.glob("disk*.qcow2"))}


def status(pid: int, name: str) -> list[str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}:")).split()[1:]


async def test_what_is_started_is_one_that_stood_ready(
    runtime: MicroVMRuntime, base: Rootfs, settings: Settings
) -> None:
    layout = runtime.host.layout
    await made(runtime, spec_of(base, "first"))
    await runtime.destroy("first")
    spares = await ready(runtime)
    pids, users = {spare.pid: spare.name for spare in spares}, {spare.pid: spare.uid for spare in spares}
    kit = await made(runtime, spec_of(base, "box"))
    vmm = vmm_of(kit)
    assert vmm.pid in pids
    uid = layout.uid("box")
    assert uid == users[vmm.pid]
    assert len({*users.values()}) == len(users)
    assert await asyncio.to_thread(status, vmm.pid, "Uid") == [str(uid)] * 4
    assert await asyncio.to_thread(status, vmm.pid, "CapEff") == ["0" * 16]
    assert await asyncio.to_thread(owners, layout.disk("box")) == {uid}
    for root in dict.fromkeys(runtime.host.cgroups.roots.values()):
        group = root / runtime.host.cgroups.parent / "box"
        assert not group.exists() or (group / "cgroup.procs").read_text().split() == [str(vmm.pid)]
    await eventually(lambda: not any(pids[vmm.pid] in path for path in left(runtime)))
    assert not [name for name in os.listdir(f"/proc/{vmm.pid}/fd") if _is_memory(vmm.pid, name)]
    counter = await kit.start(COUNTER)
    await kit.output("echo kept > /root/kept; sync")
    layer = settings.paths.state / "layer"
    await vmm.commit(layer, memory=True, durable=False)
    # A fork, and the sandbox itself after a pause.
    pids = {spare.pid: spare.name for spare in await ready(runtime)}
    stack = replace(base, layers=[layer, *base.layers])
    fork = await made(runtime, SandboxSpec("fork", stack, SMALL, hostname="fork", memory=layer))
    assert vmm_of(fork).pid in pids
    assert await fork.output("cat /root/kept; hostname") == "kept\nfork"
    assert counter.pid in await fork.agent.processes()
    await runtime.destroy("fork")
    await runtime.suspend("box")
    pids = {spare.pid: spare.name for spare in await ready(runtime)}
    kit = Kit(runtime, base, await runtime.wake(vmm.spec))
    assert vmm_of(kit).pid in pids
    assert layout.uid("box") != uid
    assert await asyncio.to_thread(owners, layout.disk("box")) == {layout.uid("box")}
    assert await kit.output("cat /root/kept; echo more > /root/more; sync; cat /root/more") == "kept\nmore"
    assert counter.pid in await kit.agent.processes()
    # Another server finds it, its disk can be exchanged again, and it can be asleep and awake once more there.
    await runtime.close()
    assert left(runtime) == []
    later = MicroVMRuntime(settings)
    try:
        adopted = await later.adopt("box")
        assert adopted is not None
        await adopted.commit(settings.paths.state / "files")
        await later.suspend("box")
        kit = Kit(later, base, await later.wake(vmm.spec))
        assert await kit.output("cat /root/kept /root/more") == "kept\nmore"
        assert counter.pid in await kit.agent.processes()
        await later.destroy("box")
    finally:
        await later.close()


def _is_memory(pid: int, name: str) -> bool:
    """Whether it still holds a file of an image of memory."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/{pid}/fd/{name}").endswith((".ram", ".state", ".pages0"))
    return False


async def test_one_that_was_killed_is_no_loss(runtime: MicroVMRuntime, base: Rootfs) -> None:
    await made(runtime, spec_of(base, "first"))
    for spare in await ready(runtime):
        os.kill(spare.pid, signal.SIGKILL)
    kit = await made(runtime, spec_of(base, "second"))  # it may be known by now, or not yet
    assert await kit.output("hostname") == "second"
    await runtime.destroy("second")
    for spare in await ready(runtime):
        os.kill(spare.pid, signal.SIGKILL)
    await eventually(lambda: runtime.host.spares.ready() == [])
    kit = await made(runtime, spec_of(base, "third"))
    assert await kit.output("hostname") == "third"


async def test_where_it_comes_to_nothing_another_is_started(
    runtime: MicroVMRuntime, base: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = await made(runtime, spec_of(base, "box"))
    counter = await kit.start(COUNTER)
    await kit.output("echo kept > /root/kept; sync")
    pids = list[int]()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async def kill(*_: object) -> None:
        os.kill(pids[0], signal.SIGKILL)

    for step in ("exchange", "save_below", "_give_place", "_give_disks", "save_running", "killed", ""):
        await runtime.suspend("box")
        pids[:] = [spare.pid for spare in await ready(runtime)]
        if step:
            monkeypatch.setattr(claim, *(("_give_disks", kill) if step == "killed" else (step, fail)))
        kit = Kit(runtime, base, await runtime.wake(kit.sandbox.spec))
        assert (vmm_of(kit).pid in pids) == (not step), step
        assert await kit.output("cat /root/kept") == "kept", step
        assert counter.pid in await kit.agent.processes(), step
        monkeypatch.undo()


@asynccontextmanager
async def namespace(home: Path) -> AsyncIterator[Path]:
    """A network namespace as the server makes one: with what its sandbox is told of it beside."""
    name = f"syspare-{secrets.token_hex(3)}"
    await asyncio.to_thread(subprocess.run, ["ip", "netns", "add", name], check=True)
    try:
        path = home / name
        path.mkdir()
        (path / "resolv.conf").write_text("nameserver 10.200.0.1\n")
        (path / "net").symlink_to(Path("/run/netns") / name)
        yield path / "net"
    finally:
        await asyncio.to_thread(subprocess.run, ["ip", "netns", "delete", name], check=True)


@contextlib.contextmanager
def serving(network: Path) -> Iterator[None]:
    """Only while there is an interface can its address be had."""
    server = subprocess.Popen(["ip", "netns", "exec", network.parent.name, sys.executable, "-c", SERVER])
    try:
        yield
    finally:
        server.kill()
        server.wait()


async def test_one_with_an_interface_comes_to_the_network_of_its_sandbox(
    runtime: MicroVMRuntime, base: Rootfs, tmp_path: Path
) -> None:
    ask = "until exec 3<>/dev/tcp/10.200.0.1/7777; do sleep 0.1; done 2>/dev/null; cat <&3"
    async with namespace(tmp_path) as network, namespace(tmp_path) as other:
        await made(runtime, replace(spec_of(base, "first"), network=other))
        pids = [spare.pid for spare in await ready(runtime)]
        spec = replace(spec_of(base, "box"), network=network)
        kit = await made(runtime, spec)
        assert vmm_of(kit).pid in pids
        with serving(network):
            assert await kit.output(ask) == "here"
        await runtime.destroy("first")
        await runtime.suspend("box")
        pids = [spare.pid for spare in await ready(runtime)]
        kit = Kit(runtime, base, await runtime.wake(spec))  # where the interface of the VMM before it still is
        assert vmm_of(kit).pid in pids
        with serving(network):
            assert await kit.output(ask) == "here"
        await runtime.destroy("box")


async def test_it_is_held_to_the_rate_of_the_disk(settings: Settings, base: Rootfs) -> None:
    slow = settings.model_copy(update={"microvm": settings.microvm.model_copy(update={"disk_mb_s": 4})})
    runtime = MicroVMRuntime(slow)
    try:
        await made(runtime, spec_of(base, "first"))
        pids = [spare.pid for spare in await ready(runtime)]
        kit = await made(runtime, spec_of(base, "slow"))
        assert vmm_of(kit).pid in pids
        ran = await kit.run("dd if=/dev/zero of=/big bs=1M count=24 oflag=direct conv=fsync", timeout=60)
        assert ran.status.code == 0
        assert ran.seconds > 3  # a burst of a second's worth is let through
        assert await kit.output("fallocate -l 64M /more 2>&1 | grep -o 'No space left'") == "No space left"
    finally:
        for name in ("first", "slow"):
            await runtime.destroy(name)
        await runtime.close()
    assert left(runtime) == []


async def test_none_stands_ready_where_none_is_wanted(settings: Settings, base: Rootfs) -> None:
    none = settings.model_copy(update={"microvm": settings.microvm.model_copy(update={"spares": 0})})
    runtime = MicroVMRuntime(none)
    try:
        kit = await made(runtime, spec_of(base, "alone"))
        await asyncio.sleep(1)
        assert (runtime.host.spares.ready(), left(runtime)) == ([], [])
        assert await kit.output("hostname") == "alone"
    finally:
        await runtime.destroy("alone")
        await runtime.close()


async def test_what_they_take_is_counted_and_given_back(runtime: MicroVMRuntime, base: Rootfs) -> None:
    assert runtime.ready_bytes() == 0
    await made(runtime, spec_of(base, "first"))
    await runtime.destroy("first")
    spares = await ready(runtime)
    pids = [spare.pid for spare in spares]
    anon = [int((await asyncio.to_thread(status, pid, "RssAnon"))[0]) << 10 for pid in pids]
    taken, together = runtime.ready_bytes(), runtime.host_memory()
    assert 0.9 * sum(anon) < taken < 2 * (96 << 20)  # the kernel counts in batches
    assert together.bytes - together.cache >= taken
    kit = await made(runtime, spec_of(base, "box"))
    vmm = vmm_of(kit)
    assert vmm.pid in pids
    if runtime.host.cgroups.version == 1:  # version 2 leaves what it took until then where it was
        used = runtime.host.cgroups.read("box")
        anonymous = int((await asyncio.to_thread(status, vmm.pid, "RssAnon"))[0]) << 10
        assert used.memory - used.cache > 0.9 * anonymous
    await ready(runtime)
    await runtime.rest()
    assert runtime.ready_bytes() == 0
    assert runtime.host.spares.ready() == []
    await eventually(lambda: not [path for path in left(runtime) if ".spares" not in path])
    assert await kit.output("echo alive") == "alive"
    await runtime.destroy("box")
    await made(runtime, spec_of(base, "box"))
    await ready(runtime)  # there are some again


async def test_none_is_made_where_memory_is_short(
    runtime: MicroVMRuntime, base: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "host_memory", lambda: (8192, 400))
    await made(runtime, spec_of(base, "box"))
    making = runtime.host.spares._making
    assert making is not None
    await asyncio.wait_for(making, 20)
    assert (runtime.host.spares.ready(), runtime.ready_bytes()) == ([], 0)
    monkeypatch.undo()
    await runtime.destroy("box")
    await made(runtime, spec_of(base, "box"))
    await ready(runtime)


async def test_few_kinds_have_some(runtime: MicroVMRuntime, base: Rootfs) -> None:
    choice, spares = await runtime.choose(), runtime.host.spares
    for memory_mb in (128, 144, 160, 176):
        spec = SandboxSpec("none", base, Resources(memory_mb=memory_mb))
        spares.want(runtime.host.starter.kind(choice, spec))
    found = await ready(runtime, 6)
    assert {spare.kind.memory_mb - runtime.host.settings.microvm.guest_mb for spare in found} == {144, 160, 176}
    with spares.start():
        os.kill(found[0].pid, signal.SIGKILL)
        await eventually(lambda: len(spares.ready()) == 5)
        spares.want(found[0].kind)
        await asyncio.sleep(1)
        assert len(spares.ready()) == 5  # not while something else is started
    await ready(runtime, 6)


async def test_what_is_another_servers_stays(runtime: MicroVMRuntime, base: Rootfs, settings: Settings) -> None:
    await made(runtime, spec_of(base, "box"))
    pids = [spare.pid for spare in await ready(runtime)]
    beside = MicroVMRuntime(settings)
    await beside.probe()
    await beside.close()
    assert [spare.pid for spare in await ready(runtime)] == pids
    kit = await made(runtime, spec_of(base, "other"))
    assert vmm_of(kit).pid in pids


STEPS = (claimant.READY, "exchange", "Disks.hand_to", "save_below", "move_groups", "_give_disks", "save_running")


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[pytest.mark.full] if step in STEPS[1:4] else []) for step in STEPS]
)
async def test_a_server_that_is_killed_leaves_none_and_loses_nothing(
    runtime: MicroVMRuntime, base: Rootfs, settings: Settings, step: str
) -> None:
    kit = await made(runtime, spec_of(base, NAME))
    counter = await kit.start(COUNTER)
    await kit.output("echo kept > /root/kept; sync")
    await runtime.suspend(NAME)
    await runtime.close()
    words = [str(settings.paths.state), str(settings.paths.run), step]
    source = os.pathsep.join(path for path in sys.path if path)
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, claimant.__file__, *words),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    )
    said = (await server.communicate())[1].decode()
    assert server.returncode == -signal.SIGKILL, said
    assert left(runtime), "it left none to be removed"
    assert await runtime.list() == [NAME]
    later = MicroVMRuntime(settings)
    try:
        await later.choose()
        await eventually(lambda: left(later) == [])
        assert await later.suspended() == [NAME]
        kit = Kit(later, base, await later.wake(kit.sandbox.spec))
        assert await kit.output("cat /root/kept") == "kept"
        assert counter.pid in await kit.agent.processes()
        await later.destroy(NAME)
    finally:
        await later.close()
    assert left(later) == []
    with pytest.raises(SandboxError):
        await runtime.suspend(NAME)
