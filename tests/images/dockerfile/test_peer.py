"""Each Dockerfile of `dockerfiles/`, built here and by `buildah`: the same files, the same settings.

Where buildah departs from Docker's documented behaviour, `DEPARTURES` says how; what Docker documents is asserted.
"""

from __future__ import annotations

from pathlib import Path

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
# Where buildah 1.28 does not do what Docker documents: the names that differ, and Docker's words for what is done here.
DEPARTURES: dict[str, dict[str, str]] = {
    "10-shell": {"Cmd": "SHELL counts for commands in shell form that follow it, CMD too; buildah takes the last one"},
    "15-escape-directive": {
        "Env": "with escape=` a backslash is itself; buildah drops it",
        "dir": "the same, in what a command was given",
    },
    "21-mounts": {
        "mnt": "a mount is there for the command that asks for it; buildah leaves the directory that it mounted on",
        "var/cache": "the same",
    },
}
UNKNOWN = {"20-heredocs"}  # to buildah 1.28; what Docker documents of these is asserted in test_builds.py


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory, roots: dict[str, Path]) -> Buildah:
    made = Buildah(tmp_path_factory.mktemp("buildah"))
    for name, root in roots.items():
        made.add_base(name, root)
    return made


@pytest.mark.parametrize("case", [case for case in CASES if case not in UNKNOWN])
async def test_the_same_as_buildah(case: str, site: Site, peer: Buildah) -> None:
    context = Path(__file__).parent.parent / "dockerfiles" / case
    rootfs, settings = await site.stage(site.recipe(context))
    theirs = peer.build(context)
    allowed = DEPARTURES.get(case, {})
    found = differences(read(await site.files(rootfs)), read(theirs.files))
    ours = settings.oci()
    found += [
        f"{key}: {ours.get(key)} here, {theirs.config.get(key)} there"
        for key in KEYS
        if _said(ours.get(key)) != _said(theirs.config.get(key))
    ]
    assert [line for line in found if line.partition(":")[0] not in allowed] == []
    assert {line.partition(":")[0] for line in found} == set(allowed)


def _said(value: object) -> object:
    """None for what says nothing: later versions of buildah write `/` where no directory was named."""
    return None if value == "/" else value or None
