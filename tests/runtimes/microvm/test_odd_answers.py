"""What a VMM that was broken into answers and tells: whatever it is, it fails the one operation, by the VMM's name."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import closing, suppress
from io import FileIO
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from sandyard.config import PathSettings, Settings
from sandyard.errors import DeathReason, SandboxError
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.microvm import MicroVMRuntime, shortening
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import capture as capturing
from sandyard.runtimes.microvm.memory import rebasing
from sandyard.runtimes.microvm.memory.capture import Capture
from sandyard.runtimes.microvm.memory.image import part
from sandyard.runtimes.microvm.memory.inject import Mapper
from sandyard.runtimes.microvm.memory.opened import Opened
from sandyard.runtimes.microvm.memory.pages import Region
from sandyard.runtimes.microvm.memory.restore import Restorer
from sandyard.runtimes.microvm.qmp import QmpError, _version
from tests.runtimes.microvm.paper import FIT
from tests.yard import node_home

NAME = "odd"
DEVICE = "/machine/peripheral/dev-disk/virtio-backend"
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
JUNK: Sequence[Any] = (None, True, 7, -1, 2**70, 0.5, "x", "\ud800", [], {}, [[]], [7], [None], {"return": {}}, DEEP)
Operation = Callable[[MicroVMInstance], Awaitable[object]]


class Liar:
    """A process in place of a VMM, that takes every command and answers with what is in `answers` for it."""

    def __init__(self, home: Path) -> None:
        self.runtime = MicroVMRuntime(Settings(paths=PathSettings(state=home / "state", run=home / "run")))
        self.answers: dict[str, Any] = {}
        self.raw: list[dict[str, Any]] = []
        """What is said as an answer to the next commands, with their id."""
        self.writers: list[asyncio.StreamWriter] = []

    async def hold(self) -> MicroVMInstance:
        layout = self.runtime.host.layout
        layout.prepare()
        layout.home(NAME).mkdir()
        self.process = await asyncio.create_subprocess_exec("sleep", "600")
        self.server = await asyncio.start_unix_server(self._serve, layout.qmp_socket(NAME))
        spec = SandboxSpec(NAME, Rootfs([]), Resources(disk_mb=16))
        instance = self.runtime._bring_up.hold(spec, self.process.pid)
        self.answers["query-status"] = {"status": "running"}
        await instance.open_control(layout.qmp_socket(NAME), 5)
        return instance

    async def say(self, *messages: object) -> None:
        for message in messages:
            self.writers[-1].write(json.dumps(message).encode() + b"\n")
        await self.writers[-1].drain()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        writer.write(b'{"QMP": {}}\n')
        while line := await reader.readline():
            request = json.loads(line)
            said = self.raw.pop(0) if self.raw else {"return": self.answers.get(request["execute"], {})}
            writer.write(json.dumps({**said, "id": request["id"]}).encode() + b"\n")
        writer.close()

    async def close(self, instance: MicroVMInstance) -> None:
        with suppress(ProcessLookupError):  # it was let go
            self.process.kill()
        await self.process.wait()
        await instance.release()
        self.server.close()
        await self.server.wait_closed()


@pytest_asyncio.fixture
async def liar() -> AsyncIterator[tuple[Liar, MicroVMInstance]]:
    with node_home() as home:
        made = Liar(home)
        instance = await made.hold()
        yield made, instance
        await made.close(instance)


def restorer(instance: MicroVMInstance) -> Restorer:
    runtime = instance._runtime
    return Restorer(runtime.host, runtime._bring_up)


async def send(instance: MicroVMInstance) -> object:
    with FileIO(os.devnull) as file:
        return await Opened(Path("x"), cast(Any, None), file.fileno(), [file.fileno()]).send(instance.control)


async def rebase(instance: MicroVMInstance) -> object:
    home = instance._runtime.host.layout.home(NAME)
    (home / "draft").touch()
    with closing(Mapper()) as mapper:
        return await rebasing.rebase(instance, Region(0, 0, 0), [(0, 99)], home / "draft", home, "1", mapper)


OPERATIONS: dict[str, tuple[str, Operation]] = {
    "status": ("query-status", lambda instance: instance.status()),
    "room": ("query-status", lambda instance: _room(instance)),
    "limit": ("query-block", lambda instance: instance.limit_disk(1)),
    "node": ("query-block", lambda instance: instance.disk_node()),
    "console": ("ringbuf-read", lambda instance: instance.console()),
    "settle": ("query-jobs", lambda instance: shortening._until(instance, shortening._AT_REST)),
    "call off": ("query-jobs", lambda instance: shortening.call_off(instance._runtime.host, instance)),
    "load": ("query-migrate", lambda instance: restorer(instance)._load(instance, "state")),
    "send": ("add-fd", send),
    "rebase": ("add-fd", rebase),
    "nodes": ("query-named-block-nodes", lambda instance: shortening._nodes(instance)),
}


def of(name: str, *said: Any) -> Sequence[tuple[str, Any]]:
    return [(name, each) for each in said]


ODD: Sequence[tuple[str, Any]] = (
    *of("status", {}, [], "running", {"status": ["running"]}, {"status": None}),
    *of("room", {}, [], {"status": {}}),
    *of("limit", {}, "x", [7], [{"qdev": [DEVICE]}], [{"qdev": 7}]),
    *of("node", [{"qdev": DEVICE}], [{"qdev": DEVICE, "inserted": []}], [], DEEP),
    ("node", [{"qdev": DEVICE, "inserted": {"node-name": ["disk"]}}]),
    ("node", [{"qdev": DEVICE, "inserted": {"node-name": DEEP}}]),
    *of("console", {}, [], 7, None),
    *of("settle", {}, "x", [7], [{}], [{"id": []}], [{"id": "shorten"}]),
    ("settle", [{"id": "shorten", "status": ["concluded"]}]),
    ("call off", [{"id": "shorten", "status": DEEP}]),
    *of("nodes", {}, [7], [{}], [{"node-name": 7}], DEEP),
    *of("load", [], "completed", {"status": []}, {"status": {}}, {"status": "failed"}),
    *of("send", {}, [], 7, {"fd": "7"}, {"fd": True}, {"fd": -1}, {"fd": 2**40}, {"fd": 7.0}),
    *of("rebase", {}, {"fd": 7}, {"fdset-id": 7}, {"fd": 7, "fdset-id": "7"}),
    ("rebase", {"fd": [], "fdset-id": 7}),
)  # fmt: skip


def _short(said: object) -> str:
    return ascii(said)[:40]


async def _room(instance: MicroVMInstance) -> None:
    instance.stall.full.set()
    await instance.check_room()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number is said is taken; what never ends is not waited for."""
    monkeypatch.setattr(rebasing, "_choose", lambda *_: [(0, 99)])
    monkeypatch.setattr("sandyard.runtimes.microvm.memory.restore._LOAD_TIMEOUT", 0.05)


@pytest.mark.parametrize(("name", "said"), ODD, ids=_short)
async def test_what_is_no_answer_is_an_error(liar: tuple[Liar, MicroVMInstance], name: str, said: Any) -> None:
    machine, instance = liar
    command, work = OPERATIONS[name]
    machine.answers[command] = said
    with pytest.raises(SandboxError, match=f"{NAME}|did not take the device state"):
        await work(instance)
    machine.answers["query-status"] = {"status": "running"}
    assert await instance.status() == "running"  # it was the one operation


@pytest.mark.parametrize("name", OPERATIONS)
async def test_no_answer_is_an_accident(liar: tuple[Liar, MicroVMInstance], name: str) -> None:
    machine, instance = liar
    command, work = OPERATIONS[name]
    for said in JUNK:
        machine.answers[command] = said
        (found,) = await asyncio.gather(work(instance), return_exceptions=True)
        if isinstance(found, BaseException):
            assert isinstance(found, SandboxError)
            assert len(found.message) < 500
            assert found.message.isprintable()


@pytest.mark.parametrize(
    "said",
    [
        *({}, {"error": "x"}, {"error": DEEP}, {"error": {}}, {"error": {"class": [], "desc": DEEP}}),
        {"error": {"class": "x" * 9999, "desc": "\x1b[31m\ud800" * 9999}},
    ],
)  # fmt: skip
async def test_a_refusal_is_short_and_can_be_written(liar: tuple[Liar, MicroVMInstance], said: dict[str, Any]) -> None:
    machine, instance = liar
    machine.raw.append(said)
    with pytest.raises(QmpError, match=NAME) as caught:
        await instance.control.execute("x")
    caught.value.message.encode()
    assert caught.value.message.isprintable()
    assert len(caught.value.message) + len(caught.value.kind) < 1000
    assert await instance.control.execute("x") == {}


async def test_odd_events_are_none(liar: tuple[Liar, MicroVMInstance]) -> None:
    machine, instance = liar
    for said in JUNK:
        events = [{"event": said}, {"event": said, "data": said}]
        events += [{"event": name, "data": said} for name in ("RESUME", "BLOCK_IO_ERROR", "STOP")]
        events += [{"event": "BLOCK_IO_ERROR", "data": {"action": said}}, {"id": said}, {"timestamp": said}]
        await machine.say(*events)
    assert await instance.control.execute("x") == {}
    assert not instance.stall.lasts


@pytest.mark.parametrize("reason", [*JUNK, "\x1b[31m" * 9999], ids=_short)
async def test_a_death_is_told_whatever_it_is_told_of(liar: tuple[Liar, MicroVMInstance], reason: Any) -> None:
    machine, instance = liar
    machine.answers["ringbuf-read"] = ["no", "text"]
    await machine.say({"event": "SHUTDOWN", "data": {"reason": reason}})
    death = await asyncio.wait_for(instance.wait_dead(), 20)
    assert death.reason is DeathReason.CRASHED
    assert death.detail.isprintable()
    assert len(death.detail) < 500


@pytest.mark.parametrize(
    "version", [*JUNK, {"qemu": {"major": "7" * 9999, "minor": 2, "micro": 0}}, {"qemu": DEEP}], ids=_short
)
def test_a_version_is_numbers_or_none(version: Any) -> None:
    assert _version({"version": version}) == ""
    assert _version({"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}}}) == "7.2.0"


@pytest.mark.parametrize("left", ["fifo", "link", "directory", "nothing", "empty", "huge"])
async def test_what_is_no_device_state_is_refused(
    liar: tuple[Liar, MicroVMInstance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """Also by a VMM whose directory is its own, as earlier versions made it."""
    _, instance = liar
    layout, image = instance._runtime.host.layout, tmp_path / "image"
    own, secret = layout.disk(NAME), tmp_path / "secret"
    own.mkdir()
    secret.write_text("of the host")
    monkeypatch.setattr(capturing, "find_region", lambda *_: None)
    monkeypatch.setattr(capturing, "copy_whole", lambda _, target: target.touch())

    async def execute(command: str, *_: object, **__: object) -> object:
        if command == "xen-save-devices-state":
            (path,) = own.iterdir()
            if left == "huge":
                os.truncate(path, 1 << 40)
            elif left != "empty":
                path.unlink()
            if left == "fifo":
                os.mkfifo(path)
            elif left == "link":
                path.symlink_to(secret)
            elif left == "directory":
                path.mkdir()
        return {}

    monkeypatch.setattr(instance.control, "execute", execute)
    with pytest.raises((SandboxError, OSError)):
        await asyncio.wait_for(Capture(instance._runtime.host, instance, image, FIT).take(), 20)
    assert not part(image, "state").exists() or part(image, "state").read_bytes() == b""
