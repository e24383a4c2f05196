"""The nano policy: a million parameters that can call tools, warm-started on this machine and cached."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.tasks.base import Task
from sandyard.tasks.builtin import builtin_tasks
from sandyard.train.nano.cache import atomic_directory, cache_directory, content_key
from sandyard.train.nano.warmstart import OnProgress, WarmStartConfig, WarmStartReport, warm_start
from sandyard.train.policies.loading import load_policy
from sandyard.train.policies.transformers import TransformersPolicy

REPORT = "warm_start.json"


@dataclass(frozen=True, slots=True)
class NanoPolicy:
    """`directory` holds the policy as it was after the warm start (`--model DIRECTORY` loads it)."""

    policy: TransformersPolicy
    report: WarmStartReport
    directory: Path
    cached: bool


def load_nano(
    config: WarmStartConfig = WarmStartConfig(),
    *,
    train: Sequence[Task] | None = None,
    held_out: Sequence[Task] | None = None,
    cache: Path | None = None,
    on_progress: OnProgress | None = None,
) -> NanoPolicy:
    """The warm-started policy: from the cache if all it depends on is unchanged, else made anew.

    `train` and `held_out` default to the built-in tasks, `cache` to `cache_directory()`. Blocking, and
    not from within an event loop: run it in a thread.
    """
    train = builtin_tasks("train") if train is None else train
    held_out = builtin_tasks("heldout") if held_out is None else held_out
    directory = (cache or cache_directory()) / content_key(config, train, held_out)
    report = _read_report(directory)
    if report is None:
        policy, report = warm_start(train, held_out, config, on_progress)
        with atomic_directory(directory) as work:
            policy.save(work)
            (work / REPORT).write_text(json.dumps(report.to_json(), indent=2))
        return NanoPolicy(policy, report, directory, cached=False)
    return NanoPolicy(load_policy(directory), report, directory, cached=True)


def _read_report(directory: Path) -> WarmStartReport | None:
    """None when there is no complete entry: the directory appears whole or not at all, but may be pruned."""
    needed = (REPORT, "model.safetensors", "tokenizer.json", "config.json")
    if not all((directory / name).is_file() for name in needed):
        return None
    return WarmStartReport(**json.loads((directory / REPORT).read_text()))
