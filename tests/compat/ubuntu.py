"""The image `ubuntu:22.04`, which the suites build on, behind a registry of our own.

Its files come from Ubuntu's own archive (mmdebstrap, the minimal variant), once. Where that or a registry
program is missing, those tests fail for want of the image, and the table says so.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandyard.config import ImageSettings
from tests.compat.report import say
from tests.compat.workshop import PartFailed, Workshop
from tests.images.oci import have_registry, image, running_registry

ARCHIVE = "http://archive.ubuntu.com/ubuntu"
_KEYRING = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")


@contextmanager
def ubuntu_registry(shop: Workshop) -> Iterator[ImageSettings]:
    """Settings with which short image names are looked for in a registry that has `ubuntu:22.04`.

    Yields the defaults, and says why, where there can be none.
    """
    try:
        files = _files(shop)
    except PartFailed as error:
        say(f"no ubuntu:22.04 here: {error}")
        yield ImageSettings()
        return
    with tempfile.TemporaryDirectory(prefix="sandyard-registry-") as name, running_registry(Path(name) / "r") as found:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        found.push("library/ubuntu", image([files.read_bytes()], Env=[f"PATH={path}"]), "22.04")
        yield ImageSettings(registries=[f"{found.address}/library"])


def _files(shop: Workshop) -> Path:
    """The tar of the root file system."""
    made = shop.cache / "ubuntu-22.04.tar"
    if not have_registry():
        raise PartFailed("no registry to serve it from: apt-get install docker-registry")
    if not made.is_file():
        if shutil.which("mmdebstrap") is None:
            raise PartFailed("nothing to make it with: apt-get install mmdebstrap")
        # Unsigned where the host lacks Ubuntu's keys: what is in it runs in sandboxes only.
        trust = f"signed-by={_KEYRING}" if _KEYRING.is_file() else "trusted=yes"
        part = shop.cache / "ubuntu-22.04.part.tar"
        source = f"deb [{trust}] {ARCHIVE} jammy main universe"
        shop.run("ubuntu-22.04", ["mmdebstrap", "--variant=minbase", "jammy", part, source])
        part.rename(made)
    return made
