"""Start commands: in every sandbox of a template, before its caller has it, and again where it boots."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from sandyard.errors import CreateFailed
from sandyard.guest.base import ProcessSpec
from sandyard.guest.memory import MemoryAgent
from sandyard.runtimes.base import Resources, Rootfs
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.sandboxes import Build, Sandbox, SandboxManager
from sandyard.sandboxes.log import Level

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Until, Wanted

Result = tuple[bytes, bytes, int]


class Guest(MemoryAgent):
    """`serve` runs until its sandbox ends; `check` succeeds the third time."""

    def __init__(self) -> None:
        super().__init__({"serve": self._serve, "check": self._check_ready, "burst": self._burst, "crash": self._crash})
        self.served: list[ProcessSpec] = []
        self.checks = 0

    async def _serve(self, spec: ProcessSpec, stdin: bytes) -> Result:
        self.served.append(spec)
        await asyncio.Event().wait()
        return b"", b"", 0

    async def _check_ready(self, spec: ProcessSpec, stdin: bytes) -> Result:
        self.checks += 1
        return b"", b"", 0 if self.checks >= 3 else 1

    async def _burst(self, spec: ProcessSpec, stdin: bytes) -> Result:
        return b"one\ntwo\r\n\xc3", b"bad", 3

    async def _crash(self, spec: ProcessSpec, stdin: bytes) -> Result:
        return b"", b"no such thing\n", 7


class Runtime(MemoryRuntime):
    def __init__(self) -> None:
        super().__init__(Guest)

    def guest(self, sandbox: Sandbox) -> Guest:
        agent = self.instances[sandbox.id].agent
        assert isinstance(agent, Guest)
        return agent


async def template(yard: SandboxManager, **config: Any) -> str:
    made = await yard.catalog.add_template("t", "template", ["app"])
    rootfs = Rootfs((), {"PORT": "80"}, "/home/user", "user")
    build = Build(str(uuid.uuid4()), made.id, "ready", rootfs, config, 1.0, 1.0)
    await yard.catalog.put_build(build)
    await yard.catalog.set_tags(made, build.id, ["default"])
    return "app"


async def test_it_runs_as_the_template_says_and_is_ready(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = Runtime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted(await template(yard, start_cmd="serve", ready_cmd="check")))
        guest = runtime.guest(made)
        assert guest.checks == 3
        (spec,) = guest.served
        assert (spec.user, spec.cwd, spec.env["PORT"]) == ("user", "/home/user", "80")
        messages = [entry.message for entry in made.log.read()]
        assert messages[:2] == ["start command runs", "ready"]


async def test_warm_ones_are_ready_before_they_are_handed_out(
    open_yard: OpenYard, wanted: Wanted, until: Until
) -> None:
    runtime = Runtime()
    async with open_yard(runtime, low=1) as yard:
        name = await template(yard, start_cmd="serve", ready_cmd="check")
        first = await yard.create(wanted(name))
        await until(lambda: yard.pool.ready >= 2)  # base's and ours
        before = len(runtime.instances)
        second = await yard.create(wanted(name))
        assert len(runtime.instances) == before
        assert runtime.guest(second).checks == 3
        assert "ready" in [entry.message for entry in second.log.read()]
        assert first.id != second.id


async def test_it_runs_again_where_processes_do_not_come_along(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = Runtime()
    async with open_yard(runtime, keep=True) as yard:
        made = await yard.create(wanted(await template(yard, start_cmd="serve", ready_cmd="check")))
        (child,) = await yard.copying.fork(made, 1, 60)
        assert isinstance(child, Sandbox)
        copy = await yard.create(wanted((await yard.copying.snapshot(made)).id))
        for each in (child, copy):
            assert len(runtime.guest(each).served) == 1
        await yard.pausing.pause(made)
        await yard.pausing.resume(made, 60)
        assert len(runtime.guest(made).served) == 1  # it never stopped
        await yard.pausing.pause(made, memory=False)
    async with open_yard(runtime) as yard:
        again = yard.get("t", made.id)
        await yard.pausing.resume(again, 60)
        (spec,) = runtime.guest(again).served
        assert (spec.user, spec.cwd) == ("user", "/home/user")


async def test_one_that_fails_fails_the_create_and_leaves_nothing(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = Runtime()
    async with open_yard(runtime) as yard:
        name = await template(yard, start_cmd="crash", ready_cmd="sleep 0.2")
        with pytest.raises(CreateFailed, match="exit code 7"):
            await yard.create(wanted(name))
        assert await runtime.list() == []
        assert yard.admission.count == 0


async def test_readiness_is_not_waited_for_without_end(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = Runtime()
    async with open_yard(runtime) as yard:
        yard.starter._seconds = 0.1
        name = await template(yard, start_cmd="serve", ready_cmd="false")
        with pytest.raises(CreateFailed, match="ready command did not succeed within"):
            await yard.create(wanted(name))
        assert await runtime.list() == []


@pytest.mark.parametrize(
    ("start", "ready", "least", "most"),
    [("serve", "sleep 0.4", 0.4, 3.0), ("true", "sleep 30", 0.0, 3.0), (None, "sleep 30", 0.0, 3.0)],
)
async def test_a_sleep_gives_a_start_command_time_as_long_as_it_runs(
    open_yard: OpenYard, wanted: Wanted, start: str | None, ready: str, least: float, most: float
) -> None:
    async with open_yard(Runtime()) as yard:
        config = {"ready_cmd": ready, **({"start_cmd": start} if start else {})}
        name = await template(yard, **config)
        began = time.monotonic()
        await yard.create(wanted(name))
        assert least <= time.monotonic() - began < most


async def test_a_sleep_does_not_hide_a_start_command_that_fails(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(Runtime()) as yard:
        name = await template(yard, start_cmd="crash", ready_cmd="sleep 30")
        with pytest.raises(CreateFailed, match="7"):
            await yard.create(wanted(name))


async def test_its_output_is_kept_line_by_line(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    async with open_yard(Runtime()) as yard:
        made = await yard.create(wanted(await template(yard, start_cmd="burst")))
        await until(lambda: any("ended" in entry.message for entry in made.log.read()))
        said = {entry.message: entry for entry in made.log.read()}
        assert {"one", "two", "\ufffd", "bad"} <= said.keys()
        assert (said["bad"].level, said["bad"].fields["stream"]) == (Level.WARN, "stderr")
        assert said["start command ended with exit code 3"].level is Level.ERROR


async def test_a_build_s_own_size_is_used(open_yard: OpenYard, wanted: Wanted) -> None:
    sizes = {"cpu": 2.0, "memory_mb": 64, "disk_mb": 32, "pids": 16}
    async with open_yard(Runtime()) as yard:
        name = await template(yard, resources=sizes)
        made = await yard.create(wanted(name))
        assert made.resources == Resources(2.0, 64, 32, 16)
        asked = Resources(1.0, 48, 32, 16)
        assert (await yard.create(wanted(name, resources=asked))).resources == asked
