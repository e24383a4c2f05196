"""QEMU is replaced by another version while a server runs: what runs goes on as what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import CreateFailed, HostError
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime, qmp
from sandyard.runtimes.microvm.choice import find_engine, traces
from sandyard.runtimes.microvm.machine import Machine
from sandyard.runtimes.microvm.memory import image

SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)


class Program:
    """Stands for QEMU where it is asked for its version: `install` is what a package manager does."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._version = path.with_name("version")
        self._monkeypatch = monkeypatch

    def install(self, version: str) -> None:
        self.says(version)
        self.starts(version)

    def starts(self, version: str) -> None:
        """Of this version are VMMs from now on; the program's file stays as it is."""
        self._version.write_text(version)
        self._monkeypatch.setattr(qmp, "_version", lambda greeting: version)

    def says(self, version: str) -> None:
        self._version.write_text(version)
        scratch = self.path.with_name("unpacked")
        scratch.write_text(f'#!/bin/sh\necho "QEMU emulator version $(cat {self._version}) (Distribution 1:1)"\n')
        scratch.chmod(0o755)
        scratch.replace(self.path)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(tmp_path / "qemu", monkeypatch)


def with_program(settings: Settings, program: Program) -> Settings:
    return settings.model_copy(update={"microvm": settings.microvm.model_copy(update={"qemu": str(program.path)})})


def test_a_program_that_was_replaced_is_noticed(program: Program) -> None:
    settings = with_program(Settings(), program)
    with pytest.raises(HostError, match="qemu on this host"):
        find_engine(settings)
    program.says("7.2.22")
    assert find_engine(settings).version == "7.2.22"
    before = traces(settings)
    assert traces(settings) == before
    program.says("10.0.13")
    assert traces(settings) != before
    assert find_engine(settings).version == "10.0.13"
    program.path.unlink()
    assert traces(settings) != before


@pytest.mark.root
@pytest.mark.full
@pytest.mark.timeout(600)
async def test_guests_are_known_by_the_qemu_they_run_on(
    settings: Settings, base: Rootfs, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = find_engine(settings)
    program.says(real.version)
    plain = Machine.command
    monkeypatch.setattr(Machine, "command", lambda self: [real.path, *plain(self)[1:]])
    layers = settings.paths.state / "upgrade"
    layers.mkdir()
    spec = SandboxSpec("before", base, SMALL, hostname="before")
    runtime, later = (MicroVMRuntime(with_program(settings, program)) for _ in range(2))
    try:
        before = await runtime.create(spec)
        program.install("99.0.0")
        after = await runtime.create(replace(spec, sandbox_id="after", hostname="after"))
        for instance, version in ((before, real.version), (after, "99.0.0")):
            name = layers / instance.spec.sandbox_id
            await instance.commit(name, memory=True, durable=False)
            assert image.load(name).fit.engine == version
        await runtime.destroy("after")
        await _refused(runtime, base, layers / "before", real.version)
        assert await Kit(runtime, base, before).output("hostname") == "before"
        await runtime.close()
        adopted = await later.adopt("before")  # by a server of the new version
        assert adopted is not None
        await adopted.commit(layers / "adopted", memory=True, durable=False)
        assert image.load(layers / "adopted").fit.engine == real.version
        await later.destroy("before")
        await _other_than_it_said(later, spec, program)
        assert await later.list() == []
    finally:
        for sandbox_id in await later.list():
            await later.destroy(sandbox_id)
        for each in (runtime, later):
            await each.close()


async def _refused(runtime: MicroVMRuntime, base: Rootfs, layer: Path, version: str) -> None:
    """Memory of the old one is of no use any more, and says so; the files are."""
    stack = replace(base, layers=[layer, *base.layers])
    spec = SandboxSpec("copy", stack, SMALL, hostname="copy", memory=layer)
    with pytest.raises(CreateFailed, match=f"taken with another QEMU: {version}, here it is 99.0.0"):
        await runtime.create(spec)
    files = Kit(runtime, base, await runtime.create(replace(spec, memory=None)))
    assert await files.output("hostname") == "copy"
    await runtime.destroy("copy")


async def _other_than_it_said(runtime: MicroVMRuntime, spec: SandboxSpec, program: Program) -> None:
    """Where another one comes behind a script that stays as it is: once that is an error, then it is known."""
    program.starts("99.0.1")
    with pytest.raises(CreateFailed, match=r"it is QEMU 99\.0\.1, where 99\.0\.0 was found"):
        await runtime.create(spec)
    assert await runtime.list() == []
    await runtime.create(spec)
    assert (await runtime.choose()).engine.version == "99.0.1"
    await runtime.destroy(spec.sandbox_id)
