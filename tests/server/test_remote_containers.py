"""A snapshot of real sandboxes through S3, started on a node that has the same bucket and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from sandyard.config import BlobSettings, Settings
from sandyard.server.embedded import EmbeddedServer
from tests.store.blobs.peers import BUCKET, s3_server, with_credentials
from tests.yard import clean_node, node_home, node_settings

__all__ = ["with_credentials"]
pytestmark = [pytest.mark.root, pytest.mark.timeout(400), pytest.mark.usefixtures("with_credentials")]

_STATE = "cat n; md5sum big; stat -c '%u %g %a %n' /home/user/big /etc/shadow /usr/bin/sudo /new; readlink /link"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def nodes(endpoint: str) -> Iterator[tuple[Settings, Settings]]:
    """The second has no template of its own."""
    blobs = BlobSettings(url=f"s3://{BUCKET}/yard", endpoint=endpoint)
    with node_home() as first, node_home() as second:
        a = node_settings(first).model_copy(update={"blobs": blobs})
        b = node_settings(second).model_copy(update={"blobs": blobs})
        (b.paths.state / "templates").unlink()
        yield a, b


@pytest.fixture(autouse=True)
async def clean(nodes: tuple[Settings, Settings]) -> AsyncIterator[None]:
    async with clean_node(nodes[0]), clean_node(nodes[1]):
        yield


def _options(server: EmbeddedServer) -> dict[str, str]:
    found = server.environment()
    url = found["E2B_API_URL"]
    return {"api_url": url, "api_key": found["E2B_API_KEY"], "sandbox_url": found.get("E2B_SANDBOX_URL", url)}


def _run(options: dict[str, str], *words: str) -> str:
    """The command line against one node."""
    environment = {**os.environ, "E2B_API_URL": options["api_url"], "E2B_API_KEY": options["api_key"]}
    command = [sys.executable, "-m", "sandyard", "snapshot", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _layers(settings: Settings) -> list[Path]:
    return sorted((settings.paths.state / "layers").iterdir())


def test_a_chain_of_snapshots_starts_on_a_bare_node(nodes: tuple[Settings, Settings]) -> None:
    with ExitStack() as stack:
        a, b = (_options(stack.enter_context(EmbeddedServer(settings))) for settings in nodes)
        box = Sandbox.create("base", timeout=300, **a)  # type: ignore[arg-type]
        box.commands.run("head -c 33554432 /dev/urandom > big; echo 0 > n; sync")
        box.commands.run("mkdir /new; chmod 1750 /new; ln -s /nowhere /link; rm -r /etc/apt", user="root")
        first = box.create_snapshot().snapshot_id
        box.commands.run("echo 1 > n")
        second = box.create_snapshot().snapshot_id
        assert [path.suffix for path in _layers(nodes[0])].count(".delta") == 1
        wanted = box.commands.run(_STATE).stdout
        assert _run(a, "push", first, second).split() == [first, second]
        moved = {each["snapshotID"]: each["movedBytes"] for each in _transfers(a)}
        assert moved[second] < 1 << 20 < moved[first]
        assert _run(a, "push", second).split() == [second]
        assert second in _run(b, "list", "--remote")
        assert second not in _run(b, "list")
        box.kill()
        copy = Sandbox.create(second, timeout=200, **b)  # type: ignore[arg-type]
        assert copy.commands.run(_STATE).stdout == wanted
        assert copy.commands.run("ls /etc/apt || sudo -n id -u").stdout == "0\n"
        again = copy.create_snapshot().snapshot_id  # of a node that never had the template
        _run(b, "push", again)
        Sandbox.delete_snapshot(second, **a)  # type: ignore[arg-type]
        back = Sandbox.create(again, timeout=200, **a)  # type: ignore[arg-type]
        assert back.commands.run(_STATE).stdout == wanted
        assert back.commands.run("python3 -c 'print(6 * 7)'; git --version").stdout.startswith("42\ngit")
        older = Sandbox.create(first, timeout=200, **b)  # type: ignore[arg-type]
        assert older.commands.run("cat n").stdout == "0\n"
        for each in (copy, back, older):
            each.kill()


def _transfers(options: dict[str, str]) -> list[dict[str, Any]]:
    answer = httpx.get(f"{options['api_url']}/remote/transfers", headers={"X-API-Key": options["api_key"]})
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()
    return found
