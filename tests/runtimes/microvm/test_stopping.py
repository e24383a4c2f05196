"""What reaches a machine while it stands still, in what order it goes on, and what a failure of that leaves: before
a VMM and an agent that only answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from sandyard.config import PathSettings, Settings
from sandyard.errors import (
    AgentLinkError,
    CreateFailed,
    DeathReason,
    GuestError,
    GuestErrorCode,
    HostFull,
    SandboxError,
)
from sandyard.guest import ProcessSpec
from sandyard.guest.wire import FIN, HEADER, MAGIC, VERSION, Frame, Op, u16, u32
from sandyard.runtimes.base import Rootfs, SandboxSpec
from sandyard.runtimes.microvm import MicroVMRuntime, bringup, commits, stall
from sandyard.runtimes.microvm import instance as instances
from sandyard.runtimes.microvm import runtime as runtimes
from sandyard.runtimes.microvm.assets import Assets
from sandyard.runtimes.microvm.bringup import identify
from sandyard.runtimes.microvm.choice import Choice, Engine
from sandyard.runtimes.microvm.commits import Swap
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.record import save_running
from tests.yard import node_home

NAME = "fake"
STOPPED = {"device": "disk", "operation": "write", "action": "stop", "nospace": True}
CHOICE = Choice(Engine("qemu", "1"), Assets(Path("kernel"), Path("initrd"), "1", "agent", "digest"), "tcg", 1.0)


async def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.005)


class Machine:
    """A process in place of a VMM, and both its sockets. `heard` is what came through them, in order. Commands in
    `silent` have no answer, those in `refused` an error; `errors` are the agent's, by what it was asked."""

    def __init__(self, home: Path) -> None:
        self.runtime = MicroVMRuntime(Settings(paths=PathSettings(state=home / "state", run=home / "run")))
        self.runtime.host.layout.prepare()
        self.home = self.runtime.host.layout.home(NAME)
        self.home.mkdir()
        self.spec = SandboxSpec(NAME, Rootfs([]), hostname=NAME)
        self.heard: list[str] = []
        self.silent: set[str] = set()
        self.mute = False  # the agent does not greet
        self.refused: set[str] = set()
        self.errors: dict[str, bytes] = {}
        self.states: list[str] = []
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec("sleep", "600")
        save_running(self.home, self.spec, self.process.pid)
        for name, serve in (("qmp", self._control), ("agent", self._agent)):
            self._servers.append(await asyncio.start_unix_server(serve, self.home / name))

    async def hold(self) -> MicroVMInstance:
        instance = self.runtime._bring_up.hold(self.spec, self.process.pid)
        self.runtime.host.instances[NAME] = instance
        await instance.open_control(self.home / "qmp", 5)
        await self.runtime._bring_up.relink(instance, CHOICE)
        self.heard.clear()
        return instance

    async def stop(self) -> None:
        await self.runtime.close()
        for server in self._servers:
            server.close()
        for writer in self._writers.values():
            writer.close()
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    def hang_up(self, name: str) -> None:
        self._writers[name].close()

    def event(self, name: str, data: dict[str, object]) -> None:
        self._writers["qmp"].write(json.dumps({"event": name, "data": data}).encode() + b"\n")

    def says(self, frame: int, channel: int, stream: int, payload: bytes = b"", flags: int = 0) -> None:
        self._writers["agent"].write(HEADER.pack(len(payload), frame, channel, flags, stream) + payload)

    async def until(self, *said: str) -> None:
        """`said` was heard, one after the other."""

        def has() -> bool:
            return any(tuple(self.heard[at : at + len(said)]) == said for at in range(len(self.heard)))

        await eventually(has)

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers["qmp"] = writer
        writer.write(b'{"QMP": {"version": {}, "capabilities": []}}\n')
        while line := await reader.readline():
            request = json.loads(line)
            name = request["execute"]
            self.heard.append(name)
            if name in self.silent:
                continue
            answer: dict[str, object] = {"return": self._returned(name)}
            if name in self.refused:
                answer = {"error": {"class": "GenericError", "desc": f"no {name} here"}}
            writer.write(json.dumps({**answer, "id": request["id"]}).encode() + b"\n")

    def _returned(self, name: str) -> object:
        if name == "query-status":
            return {"status": self.states.pop(0) if self.states else "running"}
        if name == "query-block":
            return [{"qdev": "/machine/peripheral/dev-disk/virtio-backend", "inserted": {"node-name": "disk"}}]
        return {}

    async def _agent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers["agent"] = writer
        if self.mute:
            await reader.read()
            writer.close()
            return
        greeting = MAGIC + u16(VERSION) + u32(2) + b"id" + u32(1)
        self.says(Frame.HELLO, 0, 0, greeting)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length, frame, channel, _, stream = HEADER.unpack(await reader.readexactly(HEADER.size))
                self._take(frame, channel, stream, await reader.readexactly(length))
        writer.close()

    def _take(self, frame: int, channel: int, stream: int, payload: bytes) -> None:
        name = Frame(frame).name.lower()
        if frame == Frame.OPEN:
            name = Op(channel).name.lower() + (str(payload[0]) if channel == Op.FREEZE else "")
        self.heard.append(name)
        if frame != Frame.OPEN or name in self.silent:
            return
        fields, flags = {"identify": u32(0) * 3, "spawn": u32(7) + u32(1000)}.get(name, b""), FIN
        if name == "ping":
            fields = u32(1) + b"1" + u32(2) + b"id" + u32(1) * 3 + bytes(8)
        if name == "spawn":
            flags = 0
        self.says(Frame.RESULT, 0, stream, self.errors.get(name, u16(0) + fields), flags)


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    with node_home() as home:
        made = Machine(home)
        await made.start()
        try:
            yield made
        finally:
            await made.stop()


async def test_nothing_reaches_a_machine_that_stands_still(machine: Machine) -> None:
    instance = await machine.hold()
    process = await instance.agent.spawn(ProcessSpec(["cat"], stdin=True))
    output = process.output()
    await instance.pause()
    assert machine.heard == ["spawn", "freeze3", "stop"]
    machine.says(Frame.DATA, 1, 1, b"late")
    reading = asyncio.ensure_future(anext(output))
    asking = asyncio.ensure_future(instance.agent.hello())
    await process.close_stdin()
    await asyncio.wait((reading, asking), timeout=0.2)
    assert not reading.done(), "it was read, and with that QEMU writes to the guest's memory"
    assert machine.heard == ["spawn", "freeze3", "stop"]
    await instance.resume()
    assert machine.heard[3:] == ["cont", "eof", "ping", "identify", "freeze0"]
    assert (await reading)[1] == b"late"
    assert (await asking)["boot_id"] == "id"


@pytest.mark.parametrize("step", ["freeze3", "stop"])
async def test_a_pause_that_fails_lets_it_go_on(machine: Machine, step: str) -> None:
    instance = await machine.hold()
    machine.refused.add(step)
    machine.errors = {"freeze3": u16(13) + u32(25) + u32(6) + b"freeze"} if step == "freeze3" else {}
    with pytest.raises((SandboxError, GuestError)):
        await instance.pause()
    assert not instance.paused
    stopped = ["freeze3", "stop"] if step == "stop" else ["freeze3"]
    assert machine.heard == [*stopped, "cont", "freeze0"]
    assert (await instance.agent.hello())["boot_id"] == "id"


async def test_a_resume_says_where_the_guest_does_not_go_on(machine: Machine) -> None:
    instance = await machine.hold()
    machine.errors["freeze0"] = u16(13) + u32(5) + u32(4) + b"thaw"
    await instance.pause()
    with pytest.raises(GuestError, match="thaw"):
        await instance.resume()


@pytest.mark.parametrize("part", ["hostname", "time", "seed"])
async def test_a_guest_without_time_or_seed_of_its_own_is_none(machine: Machine, part: str) -> None:
    instance = await machine.hold()
    codes = [u32(1 if name == part else 0) for name in ("hostname", "time", "seed")]
    machine.errors["identify"] = u16(0) + b"".join(codes)
    if part == "hostname":
        await identify(instance, b"x" * 64)
        return
    with pytest.raises(CreateFailed, match=f"{part}: EPERM") as caught:
        await identify(instance, b"x" * 64)
    assert caught.value.stage == "identity"


async def test_an_image_goes_only_where_it_was_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "STOP_TIMEOUT", 0.1)
    instance = await machine.hold()
    image = machine.home / "disk1.qcow2"

    async def fails(said: str) -> bool:
        image.touch()
        with pytest.raises(SandboxError, match=said):
            await Swap(instance, 0, image).do()
        return not image.exists()

    machine.refused = {"query-block"}
    assert await fails("no query-block here")
    machine.refused = {"blockdev-snapshot-sync"}
    assert await fails("no blockdev-snapshot-sync here")
    machine.silent = {"blockdev-snapshot-sync"}
    assert not await fails("did not answer")
    monkeypatch.setattr(commits, "STOP_TIMEOUT", 60)
    machine.heard.clear()
    failing = asyncio.ensure_future(fails("closed its control connection"))
    await machine.until("query-block", "blockdev-snapshot-sync")
    machine.hang_up("qmp")
    assert not await failing


@pytest.mark.root
async def test_a_guest_that_does_not_answer_is_destroyed_at_once(machine: Machine) -> None:
    instance = await machine.hold()
    machine.silent = {"freeze3"}
    pausing = asyncio.ensure_future(instance.pause())
    await machine.until("freeze3")
    destroying = asyncio.ensure_future(machine.runtime.destroy(NAME))
    assert (await asyncio.wait_for(instance.wait_dead(), 20)).reason is DeathReason.KILLED
    assert not pausing.done()
    machine.hang_up("agent")  # as its VMM's end does
    machine.hang_up("qmp")
    with pytest.raises(AgentLinkError):
        await pausing
    await destroying
    assert not machine.home.exists()


async def test_a_guest_stopped_by_a_full_host_is_tried_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "PAUSE", 0.02)
    instance = await machine.hold()
    machine.event("BLOCK_IO_ERROR", {**STOPPED, "action": "report"})
    await asyncio.sleep(0.1)
    assert machine.heard == []
    machine.states, machine.refused = ["io-error"] * 3, {"cont"}
    machine.event("BLOCK_IO_ERROR", STOPPED)
    await machine.until("query-status", "cont", "query-status")
    machine.refused = set()
    await machine.until("query-status", "cont", "query-status", "cont", "query-status")
    await eventually(lambda: not instance.stall.lasts)
    said = list(machine.heard)
    await asyncio.sleep(0.1)
    assert machine.heard == said
    await instance.pause()
    machine.states = ["io-error"] * 9
    machine.event("BLOCK_IO_ERROR", STOPPED)
    await asyncio.sleep(0.2)
    assert "cont" not in machine.heard[len(said) :], "it is paused"


async def test_a_stopped_guest_is_found_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def choose() -> Choice:
        return CHOICE

    monkeypatch.setattr(stall, "PAUSE", 0.02)
    monkeypatch.setattr(machine.runtime, "choose", choose)
    machine.states = ["io-error"] * 3
    instance = await machine.runtime.adopt(NAME)
    assert isinstance(instance, MicroVMInstance)
    assert not instance.linked
    assert await machine.runtime.adopt(NAME) is instance
    await machine.until("cont", "query-status", "cont", "query-status", "hello", "freeze0")
    assert (await instance.agent.hello())["boot_id"] == "id"


async def test_a_start_that_takes_long_takes_no_place(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_SLOW", 0.05)
    runtime, order = machine.runtime, []
    runtime._slots = asyncio.Semaphore(1)

    async def start(name: str, seconds: float) -> None:
        async with runtime._slot():
            order.append(name)
            await asyncio.sleep(seconds)
        order.append(f"{name} ended")

    await asyncio.gather(start("quick", 0.01), start("silent", 1.0), start("next", 0.01), start("last", 0.01))
    assert order == ["quick", "quick ended", "silent", "next", "next ended", "last", "last ended", "silent ended"]
    assert runtime._slots._value == 1


def test_a_guest_does_not_write_to_a_terminal() -> None:
    panic = "ok\n\x1b[2J\x07Kernel panic - not syncing: \x9b31m\u202eall is well\n"
    death = instances._death_of("guest-panicked", panic)
    assert death.detail == "?[2J?Kernel panic - not syncing: ?31m?all is well"
    assert instances._death_of("shut\x1bdown", "\x1b]0;title\x07").detail == "the guest ended: shut?down (?]0;title?)"


async def test_what_a_guest_says_in_a_stall_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "PAUSE", 0.001)
    tried: list[int] = []

    async def retry() -> bool:
        tried.append(len(tried))
        if len(tried) < 12:
            raise GuestError(GuestErrorCode.IO, f"thaw: {len(tried)}")
        return False

    with structlog.testing.capture_logs() as logs:
        stalled = stall.Stall(NAME, retry)
        stalled.begin(stall.NOT_ON)
        await eventually(lambda: not stalled.lasts)
    assert [each["log_level"] for each in logs] == ["error", *["warning"] * 3, "info"]


async def test_a_stall_in_the_middle_of_another_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "PAUSE", 0.01)
    tried: list[int] = []

    async def retry() -> bool:
        tried.append(len(tried))
        if len(tried) == 1:
            stalled.begin()  # it goes on, and stands still again before that was said
        return False

    stalled = stall.Stall(NAME, retry)
    stalled.begin()
    await eventually(lambda: not stalled.lasts)
    assert tried == [0, 1]
    stalled.end()
    stalled.begin()  # by what comes to its end after the sandbox
    assert not stalled.lasts


async def test_a_pause_says_at_once_that_the_host_is_full(machine: Machine) -> None:
    instance = await machine.hold()
    machine.event("BLOCK_IO_ERROR", STOPPED)
    await eventually(lambda: instance.stall.lasts)
    machine.states = ["io-error"] * 9
    for move in (instance.pause(), instance.commit(machine.home / "layer"), machine.runtime.halt(NAME)):
        with pytest.raises(HostFull, match="no room") as caught:
            await asyncio.wait_for(move, 5)
        assert caught.value.remedy is not None
        assert "free space" in caught.value.remedy
    assert set(machine.heard) == {"query-status"}, "it was touched"
    assert not instance.paused
    machine.states = []
    machine.event("RESUME", {})
    await eventually(lambda: not instance.stall.full.is_set())
    await instance.pause()


async def test_a_host_that_is_full_in_the_middle_of_a_pause(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "PAUSE", 0.02)
    instance = await machine.hold()
    machine.silent, machine.states = {"freeze3"}, ["io-error"] * 3
    pausing = asyncio.ensure_future(instance.pause())
    await machine.until("freeze3")
    machine.event("BLOCK_IO_ERROR", STOPPED)
    with pytest.raises(HostFull):
        await asyncio.wait_for(pausing, 5)
    assert not instance.paused
    await machine.until("query-status", "cont", "query-status", "freeze0")  # there is room: it goes on, and all in it
    await eventually(lambda: not instance.stall.lasts)
    assert not instance.frozen
    machine.silent = set()
    await instance.pause()


async def test_a_host_that_is_full_while_one_is_looked_for(machine: Machine) -> None:
    """It is not taken for one that does not answer, which would be killed."""
    instance = await machine.hold()
    machine.mute, machine.runtime._choice = True, CHOICE
    looking = asyncio.ensure_future(machine.runtime.adopt(NAME))
    await eventually(lambda: not instance.linked)
    machine.states = ["io-error"] * 99
    machine.event("BLOCK_IO_ERROR", STOPPED)
    assert await asyncio.wait_for(looking, 5) is instance


@pytest.mark.parametrize("step", ["cont", "identify", "freeze0"])
async def test_a_resume_that_fails_leaves_it_paused(machine: Machine, step: str) -> None:
    instance = await machine.hold()
    await instance.pause()
    if step == "cont":
        machine.refused = {"cont"}
    else:
        machine.errors[step] = u16(13) + u32(5) + u32(4) + b"thaw"
    machine.heard.clear()
    with pytest.raises((SandboxError, GuestError)):
        await instance.resume()
    assert instance.paused
    assert machine.heard[-2:] == (["cont", "stop"] if step == "cont" else ["freeze3", "stop"])
    machine.refused, machine.errors = set(), {}
    machine.heard.clear()
    await instance.resume()
    assert not instance.paused
    assert machine.heard == ["cont", "identify", "freeze0"]
    assert (await instance.agent.hello())["boot_id"] == "id"


async def test_a_resume_that_is_called_off_leaves_it_paused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def choose() -> Choice:
        return CHOICE

    monkeypatch.setattr(machine.runtime, "choose", choose)
    monkeypatch.setattr(instances, "_AGAIN", 0.1)
    instance = await machine.hold()
    await instance.pause()
    machine.silent = {"identify", "freeze3"}
    resuming = asyncio.ensure_future(instance.resume())
    await machine.until("identify")
    resuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resuming
    assert instance.paused
    assert not instance.linked
    await machine.until("stop")
    machine.silent = set()
    await instance.resume()
    assert machine.heard[-4:] == ["cont", "hello", "identify", "freeze0"]


@pytest.mark.parametrize("step", ["cont", "freeze0"])
async def test_a_guest_that_does_not_go_on_is_tried_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(stall, "PAUSE", 0.02)
    instance = await machine.hold()
    await instance.stand_still()
    machine.refused = {"cont"} if step == "cont" else set()
    machine.errors = {"freeze0": u16(13) + u32(5) + u32(4) + b"thaw"} if step == "freeze0" else {}
    machine.states = ["paused"] * 2 if step == "cont" else []
    with pytest.raises((SandboxError, GuestError)):
        await instance.go_on()
    await machine.until("query-status", step)
    machine.refused, machine.errors = set(), {}
    await eventually(lambda: not instance.stall.lasts)
    assert not instance.frozen
    assert machine.heard[-1] == "freeze0"


@pytest.mark.parametrize("how", ["mute", "freeze0"])
async def test_a_server_does_not_wait_long_for_a_guest(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def choose() -> Choice:
        return CHOICE

    monkeypatch.setattr(stall, "PAUSE", 0.02)
    monkeypatch.setattr(bringup, "_REJOIN_TIMEOUT", {"tcg": 0.2})
    monkeypatch.setattr(bringup, "_GREETING", 0.3)
    monkeypatch.setattr(bringup, "_CALL_TIMEOUT", {"tcg": 0.6})
    monkeypatch.setattr(machine.runtime, "choose", choose)
    machine.mute, machine.silent = how == "mute", {how}
    instance = await asyncio.wait_for(machine.runtime.adopt(NAME), 5)
    assert isinstance(instance, MicroVMInstance)
    assert not instance.linked
    assert instance.stall.lasts
    assert await machine.runtime.adopt(NAME) is instance
    machine.mute, machine.silent = False, set()
    await eventually(lambda: not instance.stall.lasts)
    assert machine.heard[-1] == "freeze0"
    assert (await instance.agent.hello())["boot_id"] == "id"


async def test_a_guest_that_cannot_thaw_does_not_keep_its_server_from_starting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def choose() -> Choice:
        return CHOICE

    monkeypatch.setattr(stall, "PAUSE", 0.02)
    monkeypatch.setattr(machine.runtime, "choose", choose)
    machine.errors["freeze0"] = u16(13) + u32(5) + u32(4) + b"thaw"
    instance = await machine.runtime.adopt(NAME)
    assert isinstance(instance, MicroVMInstance)
    assert instance.stall.lasts
    await machine.until("query-status", "freeze0", "query-status", "freeze0")
    machine.errors = {}
    await eventually(lambda: not instance.stall.lasts)
