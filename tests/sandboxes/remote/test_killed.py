"""kill -9 of the server amid an upload or a download: what was there is there, and the next try succeeds."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from sandyard.config import BlobSettings, PathSettings, PoolSettings, SandboxSettings, Settings
from sandyard.sandboxes.remote.sweeping import sweep, verify
from sandyard.server.embedded import EmbeddedServer
from sandyard.store.blobs.local import LocalBlobs

NOISE = os.urandom(4_000_000)


class Node:
    """A server over the in-memory runtime, a process of its own that may be killed and started again."""

    def __init__(self, home: Path, storage: Path) -> None:
        self._settings = Settings(
            paths=PathSettings(state=home / "state", run=home / "run"),
            sandbox=SandboxSettings(runtime="memory"),
            pool=PoolSettings(low=0),
            blobs=BlobSettings(url=f"file://{storage}", chunk_kb=64, concurrency=2),
        )
        self.layers = home / "state" / "layers"
        self._server = EmbeddedServer(self._settings)

    def __enter__(self) -> Node:
        self._server = EmbeddedServer(self._settings).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def options(self) -> dict[str, Any]:
        return {"api_url": self._server.url, "sandbox_url": self._server.url, "api_key": self._server.api_key}

    def kill(self) -> None:
        assert self._server.pid is not None
        os.kill(self._server.pid, signal.SIGKILL)

    def call(self, method: str, path: str, **body: Any) -> Any:
        headers = {"X-API-Key": self._server.api_key}
        answer = httpx.request(method, f"{self._server.url}{path}", headers=headers, timeout=30, **body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def begin(self, direction: str, snapshot: str) -> None:
        self.call("POST", "/remote/transfers", json={"snapshotID": snapshot, "direction": direction})

    def finish(self, direction: str, snapshot: str) -> str:
        """The state it ends in."""
        self.begin(direction, snapshot)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            state = str(self.call("GET", "/remote/transfers")[0]["state"])
            if state in ("done", "failed"):
                return state
            time.sleep(0.02)
        raise AssertionError("the transfer does not end")

    def ids(self, path: str) -> list[str]:
        return [each["snapshotID"] for each in self.call("GET", path)]


def _whole(storage: LocalBlobs) -> None:
    assert asyncio.run(verify(storage, deep=True)).problems == []


def _made(node: Node) -> tuple[str, float]:
    """A snapshot that was sent, and the seconds that took."""
    with node:
        box = Sandbox.create("base", timeout=300, **node.options)
        box.files.write("/noise", NOISE)
        made = box.create_snapshot().snapshot_id
        began = time.monotonic()
        assert node.finish("push", made) == "done"
        return made, time.monotonic() - began


def _empty(storage: Path) -> None:
    """As after half an upload."""
    for path in [*storage.glob("snapshots/*/*/*"), *storage.glob("layers/*")]:
        path.unlink()
    for path in sorted(storage.glob("chunks/*/*"))[::2]:
        path.unlink()


def _rounds(tmp_path: Path, kills: int, seed: int) -> None:
    chance, storage = random.Random(seed), tmp_path / "storage"
    blobs, a, b = LocalBlobs(storage), Node(tmp_path / "a", storage), Node(tmp_path / "b", storage)
    made, usual = _made(a)
    hit = 0
    for _ in range(kills // 2):
        _empty(storage)
        with a:
            a.begin("push", made)
            time.sleep(chance.uniform(0.0, usual))
            a.kill()
        hit += not list(storage.glob("snapshots/*/*/*"))
        _whole(blobs)
    with a:
        assert a.ids("/remote/snapshots") in ([], [made])
        assert a.finish("push", made) == "done"
        assert a.ids("/remote/snapshots") == [made]
    _whole(blobs)
    for _ in range(kills - kills // 2):
        with b:
            if made in b.ids("/snapshots"):
                b.call("DELETE", f"/templates/{made}")
                for path in b.layers.iterdir():
                    path.unlink()
            b.begin("pull", made)
            time.sleep(chance.uniform(0.0, usual / 2))
            b.kill()
    with b:
        assert b.finish("pull", made) == "done"
        copy = Sandbox.create(made, timeout=60, **b.options)
        assert bytes(copy.files.read("/noise", format="bytes")) == NOISE
        assert [path.name for path in b.layers.iterdir() if "." in path.name] == []
        assert len(list(b.layers.iterdir())) == 1
    for path in storage.glob("uploads/*"):
        os.utime(path, (1, 1))  # of the killed ones
    assert asyncio.run(sweep(blobs, 0)).snapshots == 1
    _whole(blobs)
    assert hit, "no upload was caught on its way"


@pytest.mark.timeout(300)
def test_ten_kills(tmp_path: Path) -> None:
    _rounds(tmp_path, 10, 1)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_sixty_kills(tmp_path: Path) -> None:
    _rounds(tmp_path, 60, 2)
