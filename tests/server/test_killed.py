"""kill -9 at random moments of pulls, builds, snapshots, uploads and collections: what is kept is whole, and the next
try succeeds."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from e2b import Sandbox, SandboxException, Template

from sandyard.cli.keeping import alone
from sandyard.config import Settings
from sandyard.images.templates import TemplateStore
from sandyard.sandboxes.remote.sweeping import verify
from sandyard.server.embedded import EmbeddedServer
from sandyard.server.storekeeper import checked, checkups
from sandyard.store.blobs import open_blobs
from tests.images.store.conftest import MIB, layout, random_layer
from tests.server.test_pausing_containers import point_sdk_at
from tests.yard import node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("clean")]

# `sandyard pull`, less the second that loading takes.
_PULL = """
import sys
from sandyard.cli.app import build_app
import sandyard.images.pulled, sandyard.images.garbage.collect, sandyard.sandboxes.storage.references
print("begin", flush=True)
build_app()(["pull", sys.argv[1], "--name", "tool"])
"""


@pytest.fixture
def settings() -> Iterator[Settings]:
    """A node with templates of its own, of which `base` is the host's."""
    with node_home() as home:
        own = home / "state" / "templates"
        own.mkdir(parents=True)
        (own / "base").symlink_to(Settings().paths.state.absolute() / "templates" / "base")
        made = node_settings(home, low=0)
        images = made.images.model_copy(update={"store_high_mb": 24, "store_low_mb": 12})
        blobs = made.blobs.model_copy(update={"url": f"file://{home}/shared", "chunk_kb": 256})
        yield made.model_copy(update={"images": images, "blobs": blobs})


class Node:
    """What is done on one node, each to its end unless its server, or what does it, is killed."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = settings
        kept = settings.server.model_copy(update={"keep_sandboxes": True})
        self._serving = settings.model_copy(update={"server": kept})
        self.server: EmbeddedServer
        self.box = ""
        self.snapshots: list[str] = []
        self.images = [
            layout(settings.paths.state.parent / str(n), random_layer("a", 3 * MIB), random_layer("b", 3 * MIB, 200))
            for n in range(3)
        ]
        self._count = 0
        self._puller: subprocess.Popen[bytes] | None = None
        self._patch = monkeypatch
        self.kinds: dict[str, Callable[[], None]] = {
            "pull": self.pull,
            "build": self.build,
            "snapshot": self.snapshot,
            "push": self.push,
            "gc": self.collect,
        }

    @contextmanager
    def served(self) -> Iterator[None]:
        with EmbeddedServer(self._serving) as self.server:
            point_sdk_at(self.server, self._patch)
            yield

    def next(self) -> int:
        self._count += 1
        return self._count

    def pull(self) -> None:
        image = self.images[self.next() % len(self.images)]
        home = self.settings.paths
        env = {
            **os.environ,
            **{"SANDYARD_PATHS__STATE": str(home.state), "SANDYARD_PATHS__RUN": str(home.run)},
            **{"SANDYARD_IMAGES__STORE_HIGH_MB": "24", "SANDYARD_IMAGES__STORE_LOW_MB": "12"},
        }
        words = [sys.executable, "-c", _PULL, image]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            child.stdout.readline()
            self._puller = child
            said = child.stderr.read().decode()
            if child.wait() != 0:
                raise OSError(said)
        assert TemplateStore(self.settings).find("tool") is not None

    def build(self) -> None:
        order = Template().from_template("base").run_cmd(f"head -c 2097152 /dev/urandom > made{self.next()}")
        Template.build(order.set_envs({"N": str(self._count)}), alias="made", skip_cache=self._count % 2 == 0)

    def snapshot(self) -> None:
        box = Sandbox.connect(self.box, timeout=3000)
        place = f"of=big conv=notrunc bs=1M seek={self.next() % 5}"
        box.commands.run(f"head -c 1048576 /dev/urandom | dd {place} status=none; md5sum < big > sum")
        self.snapshots.append(box.create_snapshot().snapshot_id)
        if len(self.snapshots) > 3:
            Sandbox.delete_snapshot(self.snapshots.pop(0))

    def push(self) -> None:
        """Of the newest snapshot, of which the storage has all but the last difference."""
        self.snapshot()
        order = {"snapshotID": self.snapshots[-1], "direction": "push"}
        with self._client() as client:
            moving = client.post("/remote/transfers", json=order).raise_for_status().json()
            while moving["state"] in ("waiting", "running"):
                time.sleep(0.02)
                found = client.get("/remote/transfers").raise_for_status().json()
                moving = next(each for each in found if each["buildID"] == moving["buildID"])
            assert moving["state"] == "done", moving

    def collect(self) -> None:
        with self._client() as client:
            client.post("/store/gc", json={"dryRun": False, "all": True}).raise_for_status()

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, headers={"X-API-Key": self.server.api_key}, timeout=60)

    def kill(self, kind: str) -> None:
        """`kind` under way: the pull itself, or the server that does the rest."""
        if kind == "pull" and self._puller is not None:
            self._puller.kill()
        else:
            assert self.server.pid is not None
            os.kill(self.server.pid, signal.SIGKILL)

    def begun(self, kind: str) -> None:
        """Wait until there is something to kill."""
        deadline = time.monotonic() + 30
        while kind == "pull" and self._puller is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def forget_pull(self) -> None:
        self._puller = None

    def damage(self) -> list[str]:
        """What `sandyard store verify --deep` and `sandyard snapshot sweep --verify` find."""
        found = alone(
            self.settings, lambda known: checkups(self.settings, checked(self.settings, known), deep=True, repair=False)
        )
        shared = open_blobs(self.settings.blobs)
        assert shared is not None
        sent = asyncio.run(verify(shared, deep=True))
        return [f"{checkup.kind} {each}" for checkup in found for each in checkup.damaged] + list(sent.problems)


def attempt(work: Callable[[], None], ended: list[bool]) -> None:
    try:
        work()
    except (SandboxException, httpx.HTTPError, OSError):
        return  # it was killed
    ended.append(True)


@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.timeout(3600)
def test_whatever_is_killed_the_store_is_whole(settings: Settings, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    node = Node(settings, monkeypatch)
    try:
        killed = campaign(node, times)
    finally:
        with EmbeddedServer(settings):
            pass  # it ends the sandboxes that are left
    assert all(killed[kind] >= times // len(node.kinds) // 3 for kind in node.kinds), killed
    assert node.damage() == []


def campaign(node: Node, times: int) -> Counter[str]:
    dice, took, killed = random.Random(3), dict[str, float](), Counter[str]()
    with node.served():
        box = Sandbox.create("base", timeout=3000)
        box.commands.run("head -c 8388608 /dev/urandom > big")
        node.box = box.sandbox_id
        for kind, work in node.kinds.items():
            took[kind] = _seconds(work)
    kinds = list(node.kinds)
    for number in range(times):
        kind = kinds[number % len(kinds)]
        with node.served():
            node.forget_pull()
            ended: list[bool] = []
            worker = threading.Thread(target=attempt, args=(node.kinds[kind], ended), daemon=True)
            worker.start()
            node.begun(kind)
            time.sleep(dice.uniform(0, took[kind]))
            node.kill(kind)
            worker.join(60)
            killed[kind] += not ended
        assert node.damage() == [], f"{kind}, round {number}"
        if number % len(kinds) == len(kinds) - 1:
            with node.served():
                for each, work in node.kinds.items():
                    took[each] = (took[each] + _seconds(work)) / 2
    with node.served():
        for snapshot in node.snapshots:
            copy = Sandbox.create(snapshot, timeout=60)
            assert copy.commands.run("md5sum < big | diff - sum").exit_code == 0
    return killed


def _seconds(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
