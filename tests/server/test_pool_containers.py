"""The warm pool over real containers: a burst that came once finds its sandboxes waiting the next time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2b import Sandbox

from sandyard.config import Settings
from sandyard.server.embedded import EmbeddedServer
from tests.server.test_pausing_containers import point_sdk_at
from tests.yard import clean_node, node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]
BURST = 5


@pytest.fixture
def settings() -> Iterator[Settings]:
    with node_home() as home:
        yield node_settings(home, low=1, high=8)


@pytest.fixture(autouse=True)
async def clean(settings: Settings) -> AsyncIterator[None]:
    async with clean_node(settings):
        yield


def _figures(server: EmbeddedServer) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", headers={"X-API-Key": server.api_key}).raise_for_status().text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def _until(server: EmbeddedServer, name: str, value: float) -> None:
    deadline = time.monotonic() + 60
    while (found := _figures(server).get(name, 0.0)) != value:
        assert time.monotonic() < deadline, f"{name} is {found}"
        time.sleep(0.1)


def _burst(threads: ThreadPoolExecutor) -> None:
    boxes = list(threads.map(lambda _: Sandbox.create("base", timeout=60), range(BURST)))
    assert {box.commands.run("echo up").stdout for box in boxes} == {"up\n"}
    for box in boxes:
        box.kill()


def test_a_burst_that_came_once_finds_them_waiting(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    warm = 'sandyard_create_seconds_count{kind="warm"}'
    with EmbeddedServer(settings) as server, ThreadPoolExecutor(BURST) as threads:
        point_sdk_at(server, monkeypatch)
        _until(server, "sandyard_sandboxes_warm", 1)
        _burst(threads)
        aim = _figures(server)["sandyard_pool_aim"]
        assert 2 <= aim <= BURST
        _until(server, "sandyard_sandboxes_warm", aim)
        before = _figures(server).get(warm, 0.0)
        _burst(threads)
        assert _figures(server)[warm] - before >= aim
        assert _figures(server)["sandyard_pool_ended_total"] == 0
