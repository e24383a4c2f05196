"""Templates from images: `sandyard pull` beside a running server, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from sandyard.config import ImageSettings, PathSettings, Settings
from sandyard.errors import BadRequest, HostError
from sandyard.images.oci.layers import LayerStore
from sandyard.images.pulled import name_of, pull_template
from sandyard.images.templates import TemplateStore
from sandyard.server.embedded import EmbeddedServer
from tests.images import oci
from tests.images.oci import Entry, Registry, folder, image, layer, running_registry
from tests.yard import clean_node, node_home, node_settings

needs_registry = pytest.mark.skipif(not oci.have_registry(), reason="docker-registry is not installed")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run"), images=ImageSettings())


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("debian", "debian"),
        ("host.example:5000/team/My_Tool:1.2", "my_tool"),
        (f"a/b@sha256:{'0' * 64}", "b"),
        ("oci:/tmp/x/layout:latest", "layout"),
        ("docker-archive:/tmp/tool.tar", "tool"),
        ("./rootfs.tar.gz", "rootfs"),
    ],
)
def test_a_template_is_called_what_the_image_is(source: str, name: str) -> None:
    assert name_of(source) == name


def _layout(home: Path, *layers: bytes, **config: Any) -> str:
    return f"oci:{oci.write_layout(home, image(list(layers), **config))}"


@pytest.mark.root
async def test_an_image_is_a_template_with_what_its_config_says(settings: Settings, tmp_path: Path) -> None:
    source = _layout(
        tmp_path / "tool", layer(Entry("a")), layer(Entry("b")), Env=["A=1"], WorkingDir="/srv", User="7:8",
        Entrypoint=["/run", "it"], Cmd=["a b"],
    )  # fmt: skip
    plain = await pull_template(settings, source)
    assert (plain.name, plain.rootfs.env, plain.rootfs.workdir, plain.rootfs.user) == ("tool", {"A": "1"}, "/srv", "7")
    assert plain.start_cmd is None
    assert [(tree / "b").exists() for tree in plain.rootfs.layers] == [True, False]
    started = await pull_template(settings, source, "started", start=True)
    assert started.start_cmd == "/run it 'a b'"
    assert started.rootfs.layers == plain.rootfs.layers  # one copy
    assert len(LayerStore(settings).all()) == 2
    store = TemplateStore(settings)
    assert {template.name for template in store.list()} == {"tool", "started"}
    store.delete("tool")
    assert store.get("started").rootfs.layers == plain.rootfs.layers
    assert [tree.exists() for tree in plain.rootfs.layers] == [True, True]


@pytest.mark.root
async def test_a_newer_image_takes_the_name(settings: Settings, tmp_path: Path) -> None:
    old = await pull_template(settings, _layout(tmp_path / "one", layer(Entry("old"))), "tool")
    new = await pull_template(settings, _layout(tmp_path / "two", layer(Entry("new"))), "tool")
    assert TemplateStore(settings).get("tool") == new
    assert new.template_id != old.template_id
    assert all(tree.exists() for tree in old.rootfs.layers)  # sandboxes may run from it


@pytest.mark.root
async def test_a_root_file_system_of_a_tar_archive(settings: Settings, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "small.tar.gz", "w:gz") as tar:
        tar.add(__file__, "etc/file")
    made = await pull_template(settings, str(tmp_path / "small.tar.gz"))
    assert (made.name, (made.rootfs.layers[0] / "etc/file").exists()) == ("small", True)


async def test_what_cannot_be_pulled_is_said(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="names no registry"):
        await pull_template(settings, "tool:1")
    with pytest.raises(BadRequest, match="does not exist"):
        await pull_template(settings, str(tmp_path / "no.tar"))
    with pytest.raises(BadRequest, match="template name"):
        await pull_template(settings, "tool:1", "No Name")
    with pytest.raises(HostError, match=r"could not be pulled: .*127\.0\.0\.1:9/a"):
        await pull_template(settings, "127.0.0.1:9/a")
    with pytest.raises(BadRequest, match="no layers"):
        await pull_template(settings, _layout(tmp_path / "empty"))
    assert list(TemplateStore(settings).list()) == []


@pytest.fixture
def node() -> Iterator[Settings]:
    """With templates of its own: what is pulled must not stay among the host's."""
    with node_home() as home:
        (home / "state" / "templates").mkdir(parents=True)
        yield node_settings(home, low=0)


@pytest.fixture
async def clean(node: Settings) -> AsyncIterator[None]:
    async with clean_node(node):
        yield


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


def _busybox(word: str) -> list[bytes]:
    program = Path("/bin/busybox").read_bytes()
    shell = [Entry("bin/busybox", program, mode=0o755), Entry("bin/sh", kind=tarfile.SYMTYPE, link="busybox")]
    return [layer(folder("bin"), *shell), layer(Entry("word", word.encode()))]


@needs_registry
@pytest.mark.root
@pytest.mark.timeout(240)
def test_the_command_beside_a_running_server(
    registry: Registry, node: Settings, clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(word: str) -> str:
        made = image(_busybox(word), Env=["PATH=/bin"])
        registry.push("tools/box", made, "1")
        paths = {"SANDYARD_PATHS__STATE": str(node.paths.state), "SANDYARD_PATHS__RUN": str(node.paths.run)}
        for key, value in paths.items():
            monkeypatch.setenv(key, value)
        done = subprocess.run(
            [sys.executable, "-m", "sandyard", "pull", f"{registry.address}/tools/box:1"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "box"
        return str(done.stdout)

    def read(box: Sandbox) -> str:
        return bytes(box.files.read("/word", format="bytes")).decode()

    with EmbeddedServer(node) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        assert "2 layers" in run("first")
        first = Sandbox.create("box", timeout=100)
        assert read(first) == "first"
        run("second")
        second = Sandbox.create("box", timeout=100)
        assert (read(first), read(second)) == ("first", "second")
        first.kill()
        second.kill()


def test_a_failure_of_the_command_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDYARD_PATHS__STATE", str(tmp_path))
    command = [sys.executable, "-m", "sandyard", "pull", "127.0.0.1:9/tool"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "could not be pulled" in done.stderr
    assert "Traceback" not in done.stderr
