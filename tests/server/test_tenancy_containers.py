"""What is said to one sandbox alone is in no copy of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from e2b import Sandbox

from sandyard.config import BuildSettings, Settings
from sandyard.images.base import build_base
from sandyard.server.embedded import EmbeddedServer
from tests.server.test_pausing_containers import point_sdk_at
from tests.server.test_templates import begin, build, ended, register, status_of, until
from tests.yard import leftovers, node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


@pytest.fixture
def settings() -> Iterator[Settings]:
    with node_home() as home:
        yield node_settings(home, low=0)
        assert leftovers(home) == []


def test_variables_of_a_sandbox_are_in_no_snapshot_of_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(build_base(Settings()))  # on first use, which takes a minute or two
    with EmbeddedServer(settings) as server:
        point_sdk_at(server, monkeypatch)
        with httpx.Client(base_url=server.url, headers={"X-API-Key": server.api_key}, timeout=60) as api:
            # What the start command finds as it begins is what a copy brought along.
            start = "cp /run/sandyard/environment.json /home/user/found; sleep 1000"
            build(api, "started", startCmd=start, readyCmd="sleep 0.3")
            box = Sandbox.create("started", envs={"SECRET": "hunter2"}, timeout=120)
            assert "hunter2" in box.files.read("/run/sandyard/environment.json")
            saved = box.create_snapshot()
            copy = Sandbox.create(saved.snapshot_id, timeout=120)
            found = copy.commands.run("cat found; cat /run/sandyard/environment.json", user="root").stdout
            assert found == "{}"
            below = build(
                api,
                "below",
                "find / -xdev -name environment.json > /tmp/found 2>&1 || true",
                fromTemplate=saved.snapshot_id,
            )
            assert Sandbox.create(below["templateID"], timeout=120).files.read("/tmp/found").count("json") == 0
            # After a boot its own start command finds them at once.
            assert api.post(f"/sandboxes/{box.sandbox_id}/pause", json={"memory": False}).status_code == 204
            box.connect(timeout=60)
            assert "hunter2" in box.files.read("/home/user/found")


def test_a_snapshot_deleted_under_a_build_stays_below_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(build_base(Settings()))
    with EmbeddedServer(settings.model_copy(update={"build": BuildSettings(cache_mb=0)})) as server:
        point_sdk_at(server, monkeypatch)
        with httpx.Client(base_url=server.url, headers={"X-API-Key": server.api_key}, timeout=60) as api:
            box = Sandbox.create("base", timeout=120)
            box.files.write("/home/user/y", "below")
            saved = box.create_snapshot().snapshot_id
            box.kill()
            made = register(api, "upper")
            steps = [{"type": "RUN", "args": [line]} for line in ("echo runs; sleep 3", "cp /home/user/y /home/user/z")]
            assert begin(api, made, fromTemplate=saved, steps=steps).status_code == 202
            until(lambda: "runs" in status_of(api, made)["logs"])
            assert api.delete(f"/templates/{saved.partition(':')[0]}").status_code == 204
            assert ended(api, made)["status"] == "ready"
            assert Sandbox.create("upper", timeout=60).files.read("/home/user/z") == "below"
