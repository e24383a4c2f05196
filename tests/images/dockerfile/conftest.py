"""A site over real containers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandyard.config import Settings
from sandyard.runtimes.container import ContainerRuntime
from tests.images.dockerfile.peer import make_bash, make_busybox
from tests.images.dockerfile.site import Site
from tests.yard import leftovers, node_home, node_settings


@pytest.fixture
def settings() -> Iterator[Settings]:
    with node_home() as home:
        yield node_settings(home)
        assert leftovers(home) == []


@pytest.fixture(scope="session")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of base images, as root owns them."""
    home = tmp_path_factory.mktemp("bases")
    return {"busybox": make_busybox(home / "busybox"), "bash": make_bash(home / "bash")}


@pytest_asyncio.fixture
async def site(settings: Settings, roots: dict[str, Path]) -> AsyncIterator[Site]:
    runtime = ContainerRuntime(settings)
    made = Site(runtime, settings.paths.state / "layers", settings.container.uid_base)
    for name, root in roots.items():
        made.add_base(name, root)
    made.add_base("scratch", None)
    yield made
    left = await runtime.list()
    for sandbox_id in left:
        await runtime.destroy(sandbox_id)
    await runtime.close()
    assert left == []
