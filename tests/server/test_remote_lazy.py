"""Real sandboxes on a layer whose bytes are not here yet."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import CommandExitException, Sandbox

from sandyard.config import BlobSettings, Settings
from sandyard.sandboxes.remote.lazy import home_of, orders
from sandyard.server.embedded import EmbeddedServer
from sandyard.store.blobs.chunks import chunk_key
from sandyard.store.blobs.lazy.order import Order, Word
from tests.yard import clean_node, node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
_LARGE = 96 << 20  # above what is fetched whole anyway


@pytest.fixture
def home() -> Iterator[Path]:
    with node_home() as found:
        yield found


@pytest.fixture
def nodes(home: Path) -> tuple[Settings, Settings]:
    """The second has no template but what it fetches."""
    blobs = BlobSettings(url=f"file://{home / 'storage'}", lazy="auto", chunk_kb=1024)
    for name in ("a", "b"):
        (home / name).mkdir()
    a, b = (node_settings(home / name, low=0).model_copy(update={"blobs": blobs}) for name in ("a", "b"))
    (b.paths.state / "templates").unlink()
    return a, b


@pytest.fixture(autouse=True)
async def clean(nodes: tuple[Settings, Settings]) -> AsyncIterator[None]:
    async with clean_node(nodes[0]), clean_node(nodes[1]):
        yield


class Node:
    """A server, and what it serves of layers on their way."""

    def __init__(self, server: EmbeddedServer, settings: Settings) -> None:
        self._server = server
        self._settings = settings

    @property
    def options(self) -> dict[str, Any]:
        return {"api_url": self._server.url, "sandbox_url": self._server.url, "api_key": self._server.api_key}

    def coming(self) -> list[Order]:
        return [order for order in orders(home_of(self._settings)) if order.linked]

    def push(self, snapshot: str) -> None:
        url, headers = f"{self._server.url}/remote/transfers", {"X-API-Key": self._server.api_key}
        body = {"snapshotID": snapshot, "direction": "push"}
        httpx.post(url, headers=headers, json=body, timeout=60).raise_for_status()
        _until(lambda: httpx.get(url, headers=headers, timeout=60).json()[0]["state"] == "done")


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def _opens(layer: Path) -> bool:
    try:
        with layer.open("rb"):
            return True
    except OSError:
        return False


def _middle(storage: Path) -> Path:
    """A chunk of the largest layer, from its middle."""
    layers = [json.loads(path.read_text()) for path in storage.glob("layers/*")]
    chunks = max((layer["chunks"] for layer in layers if layer["kind"] == "file"), key=len)
    digest: str = chunks[len(chunks) // 2][2]
    return storage / chunk_key(digest)


def test_sandboxes_start_before_their_layer_is_here(nodes: tuple[Settings, Settings], home: Path) -> None:
    storage = home / "storage"
    with EmbeddedServer(nodes[0]) as server:
        a = Node(server, nodes[0])
        box = Sandbox.create("base", timeout=300, **a.options)
        box.commands.run(f"head -c {_LARGE} /dev/urandom > big; echo here > small; sync")
        wanted = box.commands.run("sha256sum big small").stdout
        made = box.create_snapshot().snapshot_id
        box.kill()
        a.push(made)
    chunk = _middle(storage)
    held = chunk.rename(chunk.with_suffix(".held"))  # so that it cannot come whole
    with EmbeddedServer(nodes[1]) as server:
        b = Node(server, nodes[1])
        first = Sandbox.create(made, timeout=200, **b.options)
        assert first.commands.run("cat small").stdout == "here\n"
        with pytest.raises(CommandExitException, match="Input/output error"):
            first.commands.run("sha256sum big")
        (order,) = b.coming()
        killed, error = Word(order.mount).heard()
        assert chunk.name in (error or "")
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        _until(lambda: Word(order.mount).heard()[0] not in (None, killed) and _opens(order.layer))
        second = Sandbox.create(made, timeout=200, **b.options)
        assert second.commands.run("cat small").stdout == "here\n"
        held.rename(chunk)
        assert second.commands.run("sha256sum big small").stdout == wanted
        _until(lambda: not b.coming())
        third = Sandbox.create(made, timeout=200, **b.options)  # on the layer that is whole now
        assert third.commands.run("sha256sum big small").stdout == wanted
        again = third.create_snapshot().snapshot_id
        for each in (first, second, third):
            each.kill()
        shutil.rmtree(storage)
        last = Sandbox.create(again, timeout=200, **b.options)
        assert last.commands.run("sha256sum big small").stdout == wanted
        last.kill()


@pytest.mark.full
def test_a_server_that_is_killed_and_one_that_stops(nodes: tuple[Settings, Settings], home: Path) -> None:
    with EmbeddedServer(nodes[0]) as server:
        a = Node(server, nodes[0])
        box = Sandbox.create("base", timeout=300, **a.options)
        box.commands.run(f"head -c {_LARGE} /dev/urandom > big; sync")
        wanted = box.commands.run("sha256sum big").stdout
        made = box.create_snapshot().snapshot_id
        box.kill()
        a.push(made)
    chunk = _middle(home / "storage")
    held = chunk.rename(chunk.with_suffix(".held"))
    with EmbeddedServer(nodes[1]) as server:
        b = Node(server, nodes[1])
        Sandbox.create(made, timeout=200, **b.options).kill()
        (order,) = b.coming()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
    assert Word(order.mount).heard()[0] is not None  # sandboxes may still need it
    with EmbeddedServer(nodes[1]):
        pass
    assert Word(order.mount).heard()[0] is None
    assert order.linked
    held.rename(chunk)
    with EmbeddedServer(nodes[1]) as server:
        b = Node(server, nodes[1])
        box = Sandbox.create(made, timeout=200, **b.options)
        assert box.commands.run("sha256sum big").stdout == wanted
        box.kill()
        _until(lambda: not b.coming())
        Sandbox.delete_snapshot(made, **b.options)
        _until(lambda: not list(order.layer.parent.iterdir()))
