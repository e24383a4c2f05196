"""kill -9 of the server amid an upload or a download of real layers, those of the template included."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandyard.config import Settings
from tests.sandboxes.remote.killing import Node, rounds
from tests.yard import clean_node, node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.full]


@pytest.fixture
def home() -> Iterator[Path]:
    with node_home() as found:
        yield found


@pytest.fixture
def settings(home: Path) -> tuple[Settings, Settings]:
    """The second node has no template but what it fetches."""
    for name in ("a", "b"):
        (home / name).mkdir()
    a, b = node_settings(home / "a", low=0), node_settings(home / "b", low=0)
    (b.paths.state / "templates").unlink()
    return a, b


@pytest.fixture(autouse=True)
async def clean(settings: tuple[Settings, Settings]) -> AsyncIterator[None]:
    async with clean_node(settings[0]), clean_node(settings[1]):
        yield


@pytest.mark.timeout(2400)
def test_sixty_kills(settings: tuple[Settings, Settings], home: Path) -> None:
    storage = home / "storage"
    a, b = (Node(each, storage, chunk_kb=1024) for each in settings)
    rounds(a, b, storage, 60)
