"""Builds from many images into a small store, beside sandboxes that run: their files stay as they are."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, Template

from sandyard.config import Settings
from sandyard.server.embedded import EmbeddedServer
from tests.images import oci
from tests.images.oci import Entry, Registry, folder, image, layer, running_registry
from tests.images.store.conftest import MIB, bytes_below
from tests.yard import clean_node, node_home, node_settings

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not oci.have_registry(), reason="docker-registry is not installed"),
]


@pytest.fixture
def settings() -> Iterator[Settings]:
    with node_home() as home:
        yield node_settings(home)


@pytest.fixture
async def clean(settings: Settings) -> AsyncIterator[None]:
    async with clean_node(settings):
        yield


def _image(size: int) -> tuple[oci.HandMade, str]:
    """BusyBox, and a layer of its own of `size` bytes; the SHA-256 of its `/data/0`."""
    program = Path("/bin/busybox").read_bytes()
    names = ("sh", "sha256sum", "cat", "mkdir", "true", "tar", "chmod", "chown", "ls", "id", "env")
    links = [Entry(f"bin/{name}", kind=tarfile.SYMTYPE, link="busybox") for name in names]
    shell = layer(folder("bin"), Entry("bin/busybox", program, mode=0o755), *links, folder("tmp", 0o1777))
    files = [os.urandom(size // 4) for _ in range(4)]
    own = layer(folder("data"), *(Entry(f"data/{number}", data) for number, data in enumerate(files)))
    return image([shell, own], plain=True, Env=["PATH=/bin"]), hashlib.sha256(files[0]).hexdigest()


def fill(
    settings: Settings,
    registry: Registry,
    images: int,
    size: int,
    marks: tuple[int, int],
    setenv: Callable[[str, str], None],
) -> None:
    """Build from `images` images of `size` bytes; two sandboxes run all along, one is paused."""
    low, high = marks
    limits = {"store_low_mb": low, "store_high_mb": high, "plain_http": [registry.address]}
    settings = settings.model_copy(update={"images": settings.images.model_copy(update=limits)})
    store = settings.paths.state / "layers-oci"
    with EmbeddedServer(settings) as server:
        for name, value in server.environment().items():
            setenv(name, value)

        def build(name: str) -> str:
            made, digest = _image(size)
            registry.push(f"team/{name}", made)
            Template.build(
                Template().from_image(f"{registry.address}/team/{name}").set_envs({"A": "b"}),
                name,
                cpu_count=1,
                memory_mb=128,
            )
            shutil.rmtree(registry.root / "docker/registry/v2/repositories/team" / name)
            registry.blob_file(made.layers[1]).unlink()
            return digest

        wanted = build("kept")
        running, halted = Sandbox.create("kept", timeout=3000), Sandbox.create("kept", timeout=3000)
        halted.pause()

        def works(box: Sandbox) -> None:
            said = box.commands.run("sha256sum /data/0 && ls /data | sha256sum", user="root").stdout
            assert said.split()[0] == wanted

        for number in range(images):
            build(f"b{number}")
            delete_template(server, f"b{number}")
            works(running)
            assert bytes_below(store) <= high * MIB
        works(Sandbox.connect(halted.sandbox_id))
        with httpx.Client(base_url=server.url, headers={"X-API-Key": server.api_key}, timeout=600) as client:
            checked = client.post("/store/verify", json={"deep": True}).json()["kinds"]
            # The node's templates are the host's own here, whose layers lie elsewhere.
            damaged = [kind for kind in checked if kind["damaged"] and kind["kind"] != "node templates"]
            assert damaged == []
            kept = client.post("/store/gc", json={"dryRun": True, "all": True}).json()["layers"]
            assert any(one["why"].startswith("sandbox ") for one in kept)
        works(running)
        running.kill()
        halted.kill()


def delete_template(server: EmbeddedServer, name: str) -> None:
    answer = httpx.delete(f"{server.url}/templates/{name}", headers={"X-API-Key": server.api_key}, timeout=60)
    assert answer.status_code == 204, answer.text


@pytest.mark.timeout(300)
def test_100_mib_of_builds_into_40(
    settings: Settings, clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_registry(tmp_path / "registry") as registry:
        fill(settings, registry, 6, 16 * MIB, (40, 56), monkeypatch.setenv)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_10_gib_of_builds_into_2(
    settings: Settings, clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_registry(tmp_path / "registry") as registry:
        fill(settings, registry, 40, 256 * MIB, (1536, 2048), monkeypatch.setenv)
