"""Images of random bytes, and a store that is small."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sandyard.config import ImageSettings, PathSettings, Settings
from sandyard.images.garbage.collect import collect, node_templates
from tests.images import oci
from tests.images.oci import Entry, folder, image, layer

MIB = 1 << 20

MakeSettings = Callable[..., Settings]


@pytest.fixture
def make(tmp_path: Path) -> MakeSettings:
    def settings(state: Path = tmp_path / "state", **images: Any) -> Settings:
        return Settings(
            paths=PathSettings(state=state, run=tmp_path / "run"), images=ImageSettings.model_validate(images)
        )

    return settings


def random_layer(name: str, size: int, files: int = 2) -> bytes:
    return layer(folder(name), *(Entry(f"{name}/{n}", os.urandom(size // files)) for n in range(files)))


def layout(home: Path, *layers: bytes) -> str:
    """An image in a directory, not packed: random bytes do not shrink."""
    return f"oci:{oci.write_layout(home, image(list(layers), plain=True))}"


def unused_goes(settings: Settings) -> Callable[[int], None]:
    """Room for pulls of a node whose templates are all that is in use."""

    def make_room(count: int) -> None:
        collect(settings, lambda: node_templates(settings), free=count)

    return make_room


def bytes_below(home: Path) -> int:
    """While others write and remove there."""
    total = 0
    for folder_name, _, files in os.walk(home):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.lstat(f"{folder_name}/{name}").st_blocks * 512
    return total
