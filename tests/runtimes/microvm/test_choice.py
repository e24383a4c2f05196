"""What guests are started with, told at the start of a server and kept true while it runs: with a program in place
of QEMU, and no guest."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sandyard.config import PathSettings, Settings
from sandyard.errors import CreateFailed, HostError
from sandyard.guest import agent_binary
from sandyard.runtimes.microvm import MicroVMRuntime, assets, choice, probing
from sandyard.runtimes.microvm.assets import Assets
from sandyard.runtimes.microvm.bringup import BringUp
from sandyard.runtimes.microvm.choice import Choice, find_engine, remember
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.memory.image import Fit
from sandyard.server.build import application
from tests.yard import node_home

FIT = Fit("tcg", "q35", "max", "7.2.1", "6.1", 1, 4, 16, False, "image", [])


class Node:
    """A host with a program that says it is QEMU, and assets; each boot of a guest is counted."""

    def __init__(self, home: Path) -> None:
        self.qemu = home / "qemu"
        self.boots = 0
        self.fails = ""
        microvm = {"qemu": str(self.qemu), "accel": "tcg"}
        paths = PathSettings(state=home / "state", run=home / "run")
        self.settings = Settings.model_validate({"paths": paths, "microvm": microvm, "sandbox": {"runtime": "microvm"}})
        self.assets = home / "state" / "microvm"
        self.assets.mkdir(parents=True)
        self.says("7.2.1")
        self.set_up("6.1")

    def says(self, version: str) -> None:
        scratch = self.qemu.with_name("new")
        scratch.write_text(f"#!/bin/sh\necho QEMU emulator version {version}\n")
        scratch.chmod(0o755)
        scratch.replace(self.qemu)

    def is_old(self, version: str, fails: str) -> None:
        self.says(version)
        self.fails = fails

    def set_up(self, version: str, agent: str | None = None) -> None:
        made = {}
        for kind in ("kernel", "initrd"):
            content = f"{kind} {version}".encode()
            made[kind] = assets._put(self.assets / f"{kind}-{assets._digest(content)}", content)
        agent = agent or assets._digest(agent_binary().read_bytes())
        found = Assets(made["kernel"], made["initrd"], version, agent, f"digest of {version}")
        record = {name: str(value) for name, value in asdict(found).items()}
        assets._put(self.assets / assets.MANIFEST, json.dumps(record).encode(), again=True)

    def asset(self, kind: str) -> Path:
        (found,) = self.assets.glob(f"{kind}-*")
        return found

    def wants_kvm(self) -> None:
        choice.KVM = Path("/nowhere")
        microvm = self.settings.microvm.model_copy(update={"accel": "kvm"})
        self.settings = self.settings.model_copy(update={"microvm": microvm})

    async def boots_one(self, host: Host, bring_up: BringUp, tried: Choice) -> Choice:
        self.boots += 1
        if self.fails:
            raise CreateFailed("boot", self.fails)
        return replace(tried, boot_seconds=2.5)


def rewrite(path: Path, content: str) -> None:
    path.chmod(0o755)
    path.write_text(content)


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    with node_home() as home:
        made = Node(home)
        monkeypatch.setattr(probing, "_boots", made.boots_one)
        monkeypatch.setattr(choice, "KVM", choice.KVM)
        yield made


@pytest.fixture
async def runtime(node: Node) -> AsyncIterator[MicroVMRuntime]:
    opened = MicroVMRuntime(node.settings)
    yield opened
    await opened.close()


pytestmark = pytest.mark.root


async def test_what_was_exchanged_is_looked_at_again(node: Node, runtime: MicroVMRuntime) -> None:
    first = await runtime.choose()
    assert (first.engine.version, first.assets.version, node.boots) == ("7.2.1", "6.1", 1)
    assert await runtime.choose() is first
    node.says("7.2.2")
    assert (await runtime.choose()).engine.version == "7.2.2"
    node.set_up("6.12")
    assert (await runtime.choose()).assets.version == "6.12"
    assert node.boots == 3
    node.set_up("6.12")  # the same once more
    last = await runtime.choose()
    assert (last.assets.version, node.boots) == ("6.12", 3)
    node.qemu.unlink()
    with pytest.raises(HostError, match="on this host"):
        await runtime.choose()
    assert await runtime._known() is last, "what runs goes on"
    node.says("7.2.2")
    assert (await runtime.choose()).engine.version == "7.2.2"


async def test_an_agent_of_another_version_is_for_the_next_server(node: Node, runtime: MicroVMRuntime) -> None:
    await runtime.choose()
    node.set_up("6.12", agent="another")
    assert (await runtime.choose()).assets.version == "6.1"


async def test_a_server_says_what_its_guests_run_with(node: Node) -> None:
    async with application(node.settings) as app:
        assert app.made_with is not None
        assert app.made_with.startswith("accelerator tcg, QEMU 7.2.1, kernel 6.1, an empty guest boots in 2.5 s")
        assert "in software" in app.made_with
    assert node.boots == 1


@pytest.mark.parametrize(
    ("harm", "said", "remedy"),
    [
        (lambda node: (node.assets / "manifest.json").unlink(), "not set up", "sandyard setup microvm"),
        (lambda node: node.asset("initrd").unlink(), "initrd-.* is missing", "sandyard setup microvm"),
        (lambda node: rewrite(node.asset("kernel"), ""), "not what setup wrote", "sandyard setup microvm"),
        (lambda node: rewrite(node.qemu, "#!/bin/sh\necho true version 9\n"), "says 'true version 9'", "microvm.qemu"),
        (lambda node: rewrite(node.qemu, "no program"), "Exec format error", "microvm.qemu"),
        (
            lambda node: node.is_old("4.2.1", "invalid option"),
            "no guest boots .*invalid option",
            "QEMU 4.2.1 is too old: install 7.2 or later",
        ),
        (lambda node: node.qemu.unlink(), "on this host", "microvm.qemu"),
        (
            lambda node: setattr(node, "fails", "it is silent"),
            "no guest boots .*it is silent",
            "sandyard setup microvm",
        ),
        (lambda node: node.wants_kvm(), "accel is kvm, and there is no /nowhere", "microvm.accel = auto"),
    ],
)
async def test_a_server_without_guests_does_not_start(
    node: Node, harm: Callable[[Node], None], said: str, remedy: str
) -> None:
    harm(node)
    with pytest.raises(HostError, match=said) as caught:
        async with application(node.settings):
            pass
    assert remedy in (caught.value.remedy or "")


def sandyard(node: Node, command: str) -> subprocess.Popen[str]:
    paths = node.settings.paths
    where = {"SANDYARD_PATHS__STATE": str(paths.state), "SANDYARD_PATHS__RUN": str(paths.run)}
    code = f"import sys; sys.argv = {['sandyard', *command.split()]!r}; from sandyard.cli.app import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **where, "SANDYARD_MICROVM__QEMU": str(node.qemu), "SANDYARD_MICROVM__ACCEL": "tcg"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("command", ["serve --port 0 --runtime microvm", "conformance --runtime microvm"])
def test_it_is_said_what_to_do_first(node: Node, command: str) -> None:
    (node.assets / "manifest.json").unlink()
    child = sandyard(node, command)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (1, "")
    assert err.endswith("the microVM runtime is not set up; run: sandyard setup microvm\n")
    assert len(err.splitlines()) == 1


async def test_serve_prints_what_guests_run_with(node: Node) -> None:
    layout = Layout.of(node.settings)
    await remember(layout, Choice(find_engine(node.settings), assets.load_assets(node.settings), "tcg", 2.5))
    child = sandyard(node, "serve --port 0 --runtime microvm")
    assert child.stdout is not None
    lines = [await asyncio.to_thread(child.stdout.readline) for _ in range(2)]
    child.terminate()
    out, err = await asyncio.to_thread(child.communicate, timeout=60)
    assert (child.returncode, out, err) == (0, "", "")
    assert lines[0].startswith("sandyard is ready at http://127.0.0.1:")
    assert lines[1].startswith("sandboxes are of runtime microvm: accelerator tcg, QEMU 7.2.1, kernel 6.1, an empty ")
