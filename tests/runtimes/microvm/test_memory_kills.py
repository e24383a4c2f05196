"""A server that is killed or stopped, or a VMM that is killed, at any point of what they do with memory: the old or
the new, nothing between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import SandboxError
from sandyard.runtimes.base import Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.qmp import Qmp
from sandyard.runtimes.microvm.record import load_running
from tests.runtimes.microvm import victim
from tests.runtimes.microvm.victim import NAME, SMALL

pytestmark = [pytest.mark.root, pytest.mark.timeout(3600)]
COUNTER = "i=0; while :; do i=$((i+1)); echo $i >> /root/lines; sleep 0.02; done"
MOVES = ("suspend", "wake", "snapshot", "fork")
LONGEST = 1.5  # seconds that a move may take here


class Campaign:
    """One sandbox, killed and looked after. `pid` is that of its counter."""

    def __init__(self, settings: Settings, base: Rootfs, layers: Path, seed: int) -> None:
        self.settings = settings
        self.base = base
        self.layers = layers
        self.dice = random.Random(seed)
        self.pid = 0
        self.count = 0
        self.came_back = 0
        self.in_time = 0  # moves that were over before they could be stopped

    async def round(self, runtime: MicroVMRuntime, move: str, *, stop: bool = False) -> None:
        """`stop`: nothing is killed, but the server is to stop."""
        await self._prepare(runtime, move)
        await runtime.close()
        layer = self.layers / f"layer{self.count}"
        self.count += 1
        vmm = await self._strike(move, layer, stop)
        if stop:
            await self._is_whole(runtime, layer)
        await self._look(runtime, vmm, layer)

    async def _prepare(self, runtime: MicroVMRuntime, move: str) -> None:
        """The state that the move starts from."""
        spec = SandboxSpec(NAME, self.base, SMALL, hostname=NAME)
        suspended = NAME in await runtime.suspended()
        if not suspended and await runtime.adopt(NAME) is None:
            await runtime.destroy(NAME)
            instance = await runtime.create(spec)
            kit = Kit(runtime, self.base, instance)
            self.pid = (await kit.start(COUNTER)).pid
            await kit.output("while [ ! -s /root/lines ]; do sleep 0.05; done")
        if move == "wake" and not suspended:
            await runtime.suspend(NAME)
        if move != "wake" and suspended:
            await runtime.wake(spec)

    async def _strike(self, move: str, layer: Path, stop: bool) -> bool:
        """Let a server begin, and stop it, or kill it or a VMM, at some moment; whether a VMM was killed."""
        words = [str(self.settings.paths.state), str(self.settings.paths.run), move, str(layer)]
        source = os.pathsep.join(path for path in sys.path if path)
        server = await asyncio.create_subprocess_exec(
            *(sys.executable, victim.__file__, *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": source},
        )
        assert server.stdout is not None
        vmm = not stop and self.dice.random() < 0.3
        try:
            said = await server.stdout.readline()
            assert said == b"go\n", (await server.communicate())[1].decode()
            await asyncio.sleep(self.dice.uniform(0, LONGEST))
            if vmm:
                name = "child" if move == "fork" and self.dice.random() < 0.5 else NAME
                record = await asyncio.to_thread(load_running, self.settings.paths.run / "microvm" / name)
                if record is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(record.pid, signal.SIGKILL)
                await asyncio.wait_for(server.communicate(), 120)
            if stop:
                with contextlib.suppress(ProcessLookupError):
                    server.terminate()
                said, wrong = await asyncio.wait_for(server.communicate(), 120)
                done = said == b"done\n"
                assert server.returncode == 0 or done, wrong.decode()
                self.in_time += done
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
            await server.communicate()
        return vmm

    async def _is_whole(self, runtime: MicroVMRuntime, layer: Path) -> None:
        """Before any other server comes: it runs, or it is suspended and no VMM is left; of the snapshot there is all
        or nothing."""
        layout = runtime.host.layout
        home = layout.home(NAME)
        if NAME in await runtime.suspended():
            assert not home.exists()
        else:
            control = await Qmp.connect(layout.qmp_socket(NAME), 20)
            try:
                assert (await control.execute("query-status"))["status"] == "running"
            finally:
                await control.close()
        beside = await asyncio.to_thread(lambda: list(layer.parent.glob(f"{layer.name}.*")))
        left = sorted(path.name for path in (layer, *beside) if path.exists())
        assert not left or image.exists(layer), left
        assert not list(layout.disk(NAME).glob("state-*"))

    async def _look(self, runtime: MicroVMRuntime, vmm: bool, layer: Path) -> None:
        assert set(await runtime.list()) <= {NAME, "child"}
        await runtime.destroy("child")
        if NAME in await runtime.suspended():
            await runtime.suspend(NAME)  # what is left of the move
            instance = await runtime.wake(SandboxSpec(NAME, self.base, SMALL, hostname=NAME))
        else:
            found = await runtime.adopt(NAME)
            if found is None:
                assert vmm, "a sandbox died with its server"
                await self._check_layer(runtime, layer)
                return
            if found.paused:
                await found.resume()
            instance = found
        self.came_back += 1
        await self._counts(Kit(runtime, self.base, instance))
        await self._check_layer(runtime, layer)

    async def _counts(self, kit: Kit) -> None:
        assert self.pid in await kit.agent.processes()
        lines = [int(line) for line in (await kit.output("cat /root/lines")).split()]
        assert lines == list(range(1, len(lines) + 1))
        await kit.output(f"while [ $(wc -l < /root/lines) -le {len(lines)} ]; do sleep 0.05; done; sync")

    async def _check_layer(self, runtime: MicroVMRuntime, layer: Path) -> None:
        """Half a snapshot has no manifest; one that has it can be started from."""
        if await asyncio.to_thread(image.exists, layer):
            spec = victim.copy_of(self.base, layer)
            await self._counts(Kit(runtime, self.base, await runtime.create(spec)))
            await runtime.destroy("child")
        await asyncio.to_thread(layer.unlink, missing_ok=True)
        await asyncio.to_thread(image.remove, layer)


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.full)])
async def test_kills_leave_the_old_or_the_new(
    runtime: MicroVMRuntime, settings: Settings, base: Rootfs, kills: int
) -> None:
    layers = settings.paths.state / "layers"
    layers.mkdir(exist_ok=True)
    seed = random.randrange(1 << 32) if kills > 10 else 2  # of few, all may be of VMMs, after which nothing comes back
    print(f"seed {seed}")
    campaign = Campaign(settings, base, layers, seed)
    for number in range(kills):
        move = MOVES[number % len(MOVES)]
        try:
            await campaign.round(runtime, move)
        except (AssertionError, SandboxError) as error:
            raise AssertionError(f"kill {number} of {kills}, in {move}, seed {seed}: {error}") from error
    assert campaign.came_back > kills // 2
    print(f"{campaign.came_back} of {kills} came back")


@pytest.mark.parametrize("stops", [4, pytest.param(60, marks=pytest.mark.full)])
async def test_a_server_that_stops_leaves_nothing_half(
    runtime: MicroVMRuntime, settings: Settings, base: Rootfs, stops: int
) -> None:
    layers = settings.paths.state / "layers"
    layers.mkdir(exist_ok=True)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    campaign = Campaign(settings, base, layers, seed)
    for number in range(stops):
        move = MOVES[number % len(MOVES)]
        try:
            await campaign.round(runtime, move, stop=True)
        except (AssertionError, SandboxError) as error:
            raise AssertionError(f"stop {number} of {stops}, in {move}, seed {seed}: {error}") from error
    assert campaign.came_back == stops
    print(f"{campaign.in_time} of {stops} were over before")
