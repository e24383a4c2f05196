"""Another kernel and another agent come to a host: what has its memory on the disk goes on with those in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import CreateFailed
from sandyard.guest import agent_binary
from sandyard.guest.base import Process
from sandyard.runtimes.base import Instance, Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime, assets
from sandyard.runtimes.microvm.assets import make_assets
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.memory import fitting

pytestmark = [pytest.mark.root, pytest.mark.full, pytest.mark.timeout(900)]
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)
COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /run/n; sleep 0.05; done"


class Upgrade:
    """Another kernel and another agent, each by a byte more, in a state directory that has those before no more."""

    def __init__(self, settings: Settings, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert settings.microvm.kernel is not None
        self._layout = Layout.of(settings)
        self._kernel, self._agent = home / "vmlinuz", home / "agent"
        self._kernel.write_bytes(settings.microvm.kernel.read_bytes() + b"\0")
        self._agent.write_bytes(agent_binary().read_bytes() + b"\0")
        self._monkeypatch = monkeypatch
        microvm = settings.microvm.model_copy(update={"kernel": self._kernel})
        self.settings = settings.model_copy(update={"microvm": microvm})
        self.agents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (agent_binary(), self._agent)]

    async def install(self) -> None:
        before = self._files()
        self._monkeypatch.setattr(assets, "agent_binary", lambda: self._agent)
        made = await make_assets(self.settings)
        assert not before & {made.kernel, made.initrd}
        for path in before:
            path.unlink()
        assert self._files() == {made.kernel, made.initrd}

    def _files(self) -> set[Path]:
        return {path for kind in ("kernel-*", "initrd-*") for path in self._layout.assets.glob(kind)}

    def as_before(self, layer: Path) -> None:
        """Memory as the version before this one wrote it."""
        paths = [*self._layout.memories.rglob("*.memory"), *layer.parent.glob("*.memory")]
        assert len(paths) == 2
        for path in paths:
            record = json.loads(path.read_bytes().partition(b"\n")[2])
            del record["fit"]["protocol"]
            content = json.dumps({**record, "format": 2}).encode()
            path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


async def counts_on(kit: Kit, counter: Process) -> None:
    assert counter.pid in await kit.agent.processes()
    await kit.output("a=$(cat /run/n); while [ $(cat /run/n) -le $a ]; do sleep 0.05; done")


async def agent_of(kit: Kit) -> str:
    """What runs as the guest's first process."""
    return (await kit.output("sha256sum < /proc/1/exe")).split()[0]


async def refused(start: Awaitable[Instance]) -> None:
    with pytest.raises(CreateFailed, match="taken with another protocol of the agent: 1, here it is 2") as caught:
        await start
    assert caught.value.stage == "snapshot"


async def test_memory_outlives_kernel_and_agent(
    settings: Settings, runtime: MicroVMRuntime, base: Rootfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade, layer = Upgrade(settings, tmp_path, monkeypatch), settings.paths.state / "layers" / "kept"
    layer.parent.mkdir()
    before, after = upgrade.agents
    spec = SandboxSpec("counter", base, SMALL, hostname="counter")
    stack = replace(base, layers=[layer, *base.layers])
    copy_of = replace(spec, sandbox_id="copy", rootfs=stack, memory=layer)
    kit = Kit(runtime, base, await runtime.create(spec))
    counter = await kit.start(COUNTER)
    await kit.output("while [ ! -s /run/n ]; do sleep 0.05; done")
    await kit.sandbox.commit(layer, memory=True)
    await runtime.suspend("counter")

    await upgrade.install()
    kit.sandbox = await runtime.wake(spec)  # by the same server
    await counts_on(kit, counter)
    assert await agent_of(kit) == before
    new = Kit(runtime, base, await runtime.create(replace(spec, sandbox_id="new")))
    assert await agent_of(new) == after
    await runtime.destroy("new")
    await runtime.suspend("counter")
    await runtime.close()

    upgrade.as_before(layer)
    later = MicroVMRuntime(upgrade.settings)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(fitting, "VERSION", 2)
            await refused(later.create(copy_of))
            await refused(later.wake(spec))
        assert await later.list() == await later.suspended() == ["counter"]
        kit = Kit(later, base, await later.wake(spec))
        await counts_on(kit, counter)
        fork = layer.with_name("fork")
        await kit.sandbox.commit(fork, memory=True, durable=False)
        await later.destroy("counter")
        for name in (layer, fork):
            each = replace(copy_of, rootfs=replace(base, layers=[name, *base.layers]), memory=name)
            copy = Kit(later, base, await later.create(each))
            await counts_on(copy, counter)
            assert await agent_of(copy) == before
            await later.destroy("copy")
    finally:
        for sandbox_id in await later.list():
            await later.destroy(sandbox_id)
        await later.close()
