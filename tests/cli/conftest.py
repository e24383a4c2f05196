"""A server over the in-memory runtime, and the command line against it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandyard.cli import main
from tests.server.conftest import LiveServer, memory_settings, running

Run = Callable[..., int]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server over the in-memory runtime, named by the environment."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with running(memory_settings(tmp_path)) as live:
        for name, value in live.environment.items():
            monkeypatch.setenv(name, value)
        yield live


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `sandyard ARGS` in this process; returns its exit status."""

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["sandyard", *arguments])
        try:
            main()
        except SystemExit as ending:
            return int(ending.code or 0)
        return 0

    return call
