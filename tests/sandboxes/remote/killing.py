"""A server that is killed with kill -9 amid uploads and downloads, and what must hold then."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from e2b import Sandbox

from sandyard.cli.keeping import alone
from sandyard.config import BlobSettings, Settings
from sandyard.images.garbage.base import Checked, check_all
from sandyard.sandboxes.remote.checks import SharedLayers
from sandyard.sandboxes.remote.sweeping import sweep, verify
from sandyard.sandboxes.storage.references import References
from sandyard.server.embedded import EmbeddedServer
from sandyard.server.storekeeper import checked
from sandyard.store.blobs.local import LocalBlobs

_NOISE = os.urandom(6_000_000)


class Node:
    """A server that may be killed and started again, with snapshots in the directory `storage`."""

    def __init__(self, settings: Settings, storage: Path, chunk_kb: int) -> None:
        blobs = BlobSettings(url=f"file://{storage}", chunk_kb=chunk_kb, concurrency=2)
        self.settings = settings.model_copy(update={"blobs": blobs})
        self._server = EmbeddedServer(self.settings)

    def __enter__(self) -> Node:
        self._server = EmbeddedServer(self.settings).start()
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
        answer = httpx.request(method, f"{self._server.url}{path}", headers=headers, timeout=60, **body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def begin(self, direction: str, snapshot: str) -> None:
        self.call("POST", "/remote/transfers", json={"snapshotID": snapshot, "direction": direction})

    def finish(self, direction: str, snapshot: str) -> float:
        """Seconds until it was done."""
        began = time.monotonic()
        self.begin(direction, snapshot)
        while time.monotonic() < began + 200:
            found = self.call("GET", "/remote/transfers")[0]
            if found["state"] in ("done", "failed"):
                assert found["state"] == "done", found["error"]
                return time.monotonic() - began
            time.sleep(0.02)
        raise AssertionError("the transfer does not end")

    def forget(self, snapshot: str) -> bool:
        """As if it had never been here; whether it was."""
        was = snapshot in [each["snapshotID"] for each in self.call("GET", "/snapshots")]
        if was:
            self.call("DELETE", f"/templates/{snapshot}")
        end = time.monotonic() + 30
        while self.layers():
            assert time.monotonic() < end, "layers that nothing needs stay"
            time.sleep(0.1)
        return was

    def layers(self) -> list[str]:
        home = self.settings.paths.state / "layers"
        return sorted(path.name for path in home.iterdir()) if home.exists() else []

    def check(self) -> None:
        """`store verify --deep`, with no server here."""
        found = alone(self.settings, lambda known: check_all(self._kinds(known), deep=True))
        assert [finding for checkup in found for finding in checkup.damaged] == []

    def _kinds(self, known: References) -> Sequence[Checked]:
        """Layers of the in-memory twin are no file systems: only what they were sent as can be checked of them."""
        memory = self.settings.sandbox.runtime == "memory"
        return [SharedLayers(self.settings)] if memory else checked(self.settings, known)


def _whole(storage: Path) -> int:
    """Checks every snapshot in the storage; how many there are."""
    found = asyncio.run(verify(LocalBlobs(storage), deep=True))
    assert found.problems == []
    return found.snapshots


def _halve(storage: Path) -> None:
    """As after half an upload."""
    for path in [*storage.glob("snapshots/*/*/*"), *storage.glob("layers/*")]:
        path.unlink()
    for path in sorted(storage.glob("chunks/*/*"))[::2]:
        path.unlink()


def rounds(a: Node, b: Node, storage: Path, kills: int) -> None:
    """Kill `a` amid uploads, then `b` amid downloads, each time at another moment."""
    chance = random.Random(kills)
    with a:
        box = Sandbox.create("base", timeout=300, **a.options)
        box.files.write("/home/user/noise", _NOISE)
        made = box.create_snapshot().snapshot_id
        box.kill()
        usual = a.finish("push", made)
    caught = 0
    for _ in range(kills // 2):
        _halve(storage)
        with a:
            a.begin("push", made)
            time.sleep(chance.uniform(0.0, usual))
            a.kill()
        caught += _whole(storage) == 0
        a.check()
    with a:
        a.finish("push", made)
    assert _whole(storage) == 1
    with b:
        usual = b.finish("pull", made)
    for _ in range(kills - kills // 2):
        with b:
            caught += not b.forget(made)
            b.begin("pull", made)
            time.sleep(chance.uniform(0.0, usual))
            b.kill()
        b.check()
    with b:
        b.finish("pull", made)
        assert [name for name in b.layers() if "." in name] == [], "drafts of killed servers stay"
        copy = Sandbox.create(made, timeout=60, **b.options)
        assert bytes(copy.files.read("/home/user/noise", format="bytes")) == _NOISE
        copy.kill()
    b.check()
    for path in storage.glob("uploads/*"):
        os.utime(path, (1, 1))  # those of killed servers go by their age
    assert asyncio.run(sweep(LocalBlobs(storage), 0)).snapshots == _whole(storage) == 1
    assert caught >= kills // 4, "transfers were over before they were killed"
