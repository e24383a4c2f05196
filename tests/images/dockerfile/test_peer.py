"""Each Dockerfile of `dockerfiles/`, built here and by `buildah`: the same files, the same settings.

Where buildah departs from Docker's documented behaviour, `DEPARTURES` says how; what Docker documents is asserted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.images.dockerfile.listing import differences, read
from tests.images.dockerfile.peer import Buildah, have_buildah
from tests.images.dockerfile.site import Site

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not have_buildah(), reason="needs buildah and busybox: apt-get install buildah busybox-static"),
]
CASES = sorted(path.name for path in (Path(__file__).parent.parent / "dockerfiles").iterdir())
KEYS = ("Env", "WorkingDir", "User", "Entrypoint", "Cmd", "Labels", "ExposedPorts", "Volumes", "Healthcheck", "Shell")
# Names that differ, and why.
DEPARTURES: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory, roots: dict[str, Path]) -> Buildah:
    made = Buildah(tmp_path_factory.mktemp("buildah"))
    for name, root in roots.items():
        made.add_base(name, root)
    return made


@pytest.mark.parametrize("case", CASES)
async def test_the_same_as_buildah(case: str, site: Site, peer: Buildah) -> None:
    context = Path(__file__).parent.parent / "dockerfiles" / case
    rootfs, settings = await site.stage(site.recipe(context))
    theirs = peer.build(context)
    allowed = DEPARTURES.get(case, {})
    found = differences(read(await site.files(rootfs)), read(theirs.files))
    assert [line for line in found if line.partition(":")[0] not in allowed] == []
    ours = settings.oci()
    for key in KEYS:
        if key not in allowed:
            assert _plain(ours.get(key)) == _plain(theirs.config.get(key)), key


def _plain(value: Any) -> Any:
    return value or None
