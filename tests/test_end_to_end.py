"""The whole line as its user runs it: the command, a server, containers; and what a kill -9 leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from sandyard.config import Settings
from sandyard.connection import Connection
from sandyard.images.base import build_base
from sandyard.server.embedded import EmbeddedServer
from tests.yard import leftovers, node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]

ROOT = Path(__file__).parent.parent
LEASE = 5  # seconds
SMALL = ["warm_start_steps=12", "eval_tasks=2", "eval_samples=1", f"lease_seconds={LEASE}"]
SMALL = [word for setting in SMALL for word in ("--set", setting)]


@pytest.fixture
async def settings() -> Settings:
    await build_base(Settings())
    return Settings()


@pytest.fixture
def home(settings: Settings) -> Iterator[Path]:
    with node_home() as folder:
        yield folder


class Trainer:
    """`sandyard train recipes/code_rl` in a process of its own; killed at the end of the context."""

    def __init__(self, run_dir: Path, cache: Path, server: EmbeddedServer, *options: str) -> None:
        self._words = run_dir.with_suffix(".txt")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("E2B_", "AENV_"))}
        environ |= {"XDG_CACHE_HOME": str(cache), **server.environment()}
        recipe = [sys.executable, "-m", "sandyard", "train", "recipes/code_rl", "--run-dir", str(run_dir)]
        with self._words.open("w") as words:
            self.process = subprocess.Popen(
                [*recipe, *SMALL, *options], cwd=ROOT, env=environ, stdout=words, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self._words.read_text()

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        """Raises when the trainer ends before it holds."""
        wait_for(lambda: condition() or self.process.poll() is not None, 250, what)
        assert self.process.poll() is None, self.said()


def living(server: EmbeddedServer) -> list[str]:
    connection = Connection.to(server)
    answer = httpx.get(f"{server.url}/v2/sandboxes", headers=connection.headers(), timeout=20)
    return [item["sandboxID"] for item in answer.raise_for_status().json()]


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One warm start for all tests of this file."""
    return tmp_path_factory.mktemp("cache")


def test_two_steps_as_a_newcomer_would_run_them(home: Path, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--batch-size", "2", "--num-generations", "4", "--max-steps", "2"]
    with EmbeddedServer(node_settings(home)) as server:
        with Trainer(run, cache, server, *options) as trainer:
            assert trainer.process.wait(300) == 0, trainer.said()
        wait_for(lambda: not living(server), 10, "the run's sandboxes are gone")
    assert "report:" in trainer.said()
    assert (run / "report.html").is_file()
    steps = records(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert {"train/avg_reward", "train/masked", "time/rollout", "env/create_p50"} <= steps[0].keys()
    trajectories = records(run / "trajectories.jsonl")
    assert len(trajectories) == 2 * 2 * 4
    assert all((t["reward"] is None) == (t["masked"] is not None) for t in trajectories)


def test_a_killed_trainer_loses_its_sandboxes_with_its_lease(home: Path, cache: Path, tmp_path: Path) -> None:
    with EmbeddedServer(node_settings(home)) as server:
        with Trainer(tmp_path / "run", cache, server, "--max-steps", "50") as trainer:
            trainer.wait_until(lambda: living(server), "the first sandbox")
        wait_for(lambda: not living(server), LEASE + 5, "its sandboxes are gone within the lease")


def test_a_killed_server_costs_rollouts_their_place_and_never_a_reward(home: Path, cache: Path, tmp_path: Path) -> None:
    run, settings = tmp_path / "run", node_settings(home)
    server = EmbeddedServer(settings).start()
    try:
        with Trainer(run, cache, server, "--batch-size", "8", "--max-steps", "2") as trainer:
            trainer.wait_until((run / "trajectories.jsonl").exists, "a first batch")
            trainer.wait_until(lambda: living(server), "a sandbox in use")
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            trainer.process.wait(200)
    finally:
        server.stop()
    with EmbeddedServer(settings) as again:
        # What the killed server had promised is adopted, and ends with the lease that nobody renews.
        wait_for(lambda: not living(again), LEASE + 10, "the sandboxes of the run are gone")
    assert leftovers(home) == []
    lost = [t for t in records(run / "trajectories.jsonl") if t["masked"] is not None]
    assert lost, trainer.said()
    assert all(t["reward"] is None for t in lost)
    assert {t["masked"].split(":")[0] for t in lost} <= {"sandbox", "capacity", "verifier"}, {t["masked"] for t in lost}
