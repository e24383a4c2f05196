"""Where warm starts are kept: by the hash of everything they are made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import tokenizers
import torch
import transformers

import sandyard.tasks.builtin
import sandyard.train.nano
from sandyard.tasks.base import Task
from sandyard.train.nano.warmstart import WarmStartConfig

_KEY_LENGTH = 16


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/sandyard/nano`, else `~/.cache/sandyard/nano`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sandyard" / "nano"


def content_key(config: WarmStartConfig, train: Sequence[Task], held_out: Sequence[Task]) -> str:
    """Changes when anything does that a warm start depends on: settings, tasks, this code, libraries."""
    versions = [torch.__version__, transformers.__version__, tokenizers.__version__]
    settings = json.dumps([asdict(config), versions, [[asdict(task) for task in part] for part in (train, held_out)]])
    digest = hashlib.sha256(settings.encode())
    for package in (sandyard.train.nano, sandyard.tasks.builtin):
        for folder in package.__path__:
            for source in sorted(Path(folder).glob("*.py")):
                digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:_KEY_LENGTH]


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which takes the place of `target` at the end; on failure nothing is left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield work
        if target.exists():
            shutil.rmtree(target)
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
