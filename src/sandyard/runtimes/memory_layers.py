"""Layers of the in-memory twin: JSON files of what a sandbox's agent has, whole or as what differs from a parent's."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from sandyard.errors import SandboxError

Entry = dict[str, Any]  # path, mode, uid, metadata, type, data in base 64


def write_layer(target: Path, files: Sequence[Entry], parent: Path | None, *, memory: bool = False) -> int:
    """Keep `files`, parents first; those that `parent` has just so are kept there. Returns the bytes it takes.
    `memory`: a sandbox's memory goes with them.

    Raises `SandboxError`."""
    below = {each["path"]: each for each in read_layer(parent)} if parent is not None else {}
    own = [each for each in files if below.get(each["path"]) != each]
    name = parent.name if parent is not None else None
    content = {"parent": name, "files": own, "paths": [each["path"] for each in files]}
    try:
        if memory:
            memory_of(target).touch()
        with open(target, "xb") as file:
            return file.write(json.dumps(content).encode())
    except OSError as error:
        raise SandboxError(f"commit to {target}: {error.strerror}") from error


def memory_of(layer: Path) -> Path:
    """The file beside a layer that has a sandbox's memory too."""
    return layer.with_name(f"{layer.name}.memory")


def read_layer(layer: Path) -> list[Entry]:
    """Every entry, parents first. Raises `SandboxError`."""
    content = _content(layer)
    below = read_layer(layer.with_name(content["parent"])) if content["parent"] else []
    found = {each["path"]: each for each in [*below, *content["files"]]}
    return [found[path] for path in content["paths"]]


def parent_layer(layer: Path) -> Path | None:
    """The layer that this one is kept as the difference to. Raises `SandboxError`."""
    if not layer.is_file():
        return None
    name = _content(layer)["parent"]
    return layer.with_name(name) if name else None


def merge_layer(layer: Path, spare: Collection[Path]) -> bool:
    """Let a layer need none of `spare`; whether it does now."""
    parent = below = parent_layer(layer)
    while below is not None and below in spare:
        below = parent_layer(below)
    if below == parent:
        return False
    merged = layer.with_name(layer.name + ".merged")
    merged.unlink(missing_ok=True)
    write_layer(merged, read_layer(layer), below)
    os.replace(merged, layer)
    return True


def _content(layer: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(layer.read_bytes())
    except (OSError, ValueError) as error:
        raise SandboxError(f"layer {layer} cannot be read: {error}") from error
    return content
