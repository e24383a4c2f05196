"""The machine that guests have under KVM, without PCI and firmware, in software: boot, copies, pause, snapshot.

Its clock cannot be measured without KVM, so the guest is told the host's.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime, machine
from sandyard.runtimes.microvm.machine import Machine

pytestmark = [pytest.mark.root, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def without_pci(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Machine._append
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    khz = int(float(next(line for line in lines if line.startswith("cpu MHz")).partition(":")[2]) * 1000)
    told = f" tsc_early_khz={khz} lpj={khz * 2}"
    monkeypatch.setitem(machine._TYPES, "tcg", machine._TYPES["kvm"])
    monkeypatch.setattr(Machine, "_append", lambda self: plain(self) + told)


async def test_the_machine_for_kvm(settings: Settings, runtime: MicroVMRuntime, base: Rootfs) -> None:
    spec = SandboxSpec("mmio", base, Resources(memory_mb=128, disk_mb=64, pids=64))
    kit = Kit(runtime, base, await runtime.create(spec))
    assert await kit.output("ls /sys/bus/pci/devices 2>/dev/null | wc -l; ls /sys/bus/virtio/devices | wc -l") == "0\n5"
    assert (await kit.output("cat /sys/bus/virtio/drivers/virtio_balloon/virtio*/features"))[5] == "1"  # reports
    process = await kit.start("n=0; while :; do n=$((n+1)); echo $n > /tmp/n; sleep 0.1; done")
    await runtime.suspend("mmio")
    kit.sandbox = await runtime.wake(spec)
    assert process.pid in await kit.agent.processes()
    layer = settings.paths.state / "layer"
    await kit.sandbox.commit(layer, memory=True)
    rootfs = replace(base, layers=[layer, *base.layers])
    other = replace(spec, sandbox_id="other", rootfs=rootfs, memory=layer, hostname="other")
    copy = Kit(runtime, base, await runtime.create(other))
    assert process.pid in await copy.agent.processes()
    assert await copy.output("hostname") == "other"
    assert await copy.output("a=$(cat /tmp/n); sleep 1; b=$(cat /tmp/n); [ $b -gt $a ] && echo on") == "on"
    await copy.start("echo c > /proc/sysrq-trigger")
    assert "Kernel panic" in (await asyncio.wait_for(copy.sandbox.wait_dead(), 60)).detail
