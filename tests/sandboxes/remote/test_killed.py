"""kill -9 of the server amid an upload or a download: what was there is there, and the next try succeeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandyard.config import PathSettings, PoolSettings, SandboxSettings, Settings
from tests.sandboxes.remote.killing import Node, rounds


def _node(home: Path, storage: Path) -> Node:
    settings = Settings(
        paths=PathSettings(state=home / "state", run=home / "run"),
        sandbox=SandboxSettings(runtime="memory"),
        pool=PoolSettings(low=0),
    )
    return Node(settings, storage, chunk_kb=64)


@pytest.mark.timeout(300)
def test_six_kills(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    rounds(_node(tmp_path / "a", storage), _node(tmp_path / "b", storage), storage, 6)
