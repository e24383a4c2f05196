"""Fixtures shared by all tests: what every test must leave behind as it found it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `root` fail, not skip, in CI; elsewhere they are skipped with the remedy."""
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs root: run `sudo make test`")
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_leaked_fds() -> Iterator[None]:
    """Fail a test after which this process holds more than a few descriptors more than before.

    A handful is allowed: event loops, loggers and thread pools of libraries open theirs lazily.
    """
    before = _open_fds()
    yield
    leaked = {fd: target for fd, target in _open_fds().items() if fd not in before}
    assert len(leaked) <= 12, f"file descriptors left open: {leaked}"


def _open_fds() -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except OSError:
            continue  # closed since the listing
    return found
