"""Checkpoints: a directory appears whole or not at all, and a resumed run goes on as if never stopped."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sandyard.errors import ConfigError
from sandyard.train.policies.base import Policy

_PREFIX = "step-"
_UNFINISHED = ".saving-"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is. Task order and sampling follow from `seed` and these numbers alone."""

    step: int  # steps done
    tasks_taken: int  # of the endless task order
    seed: int
    tasks: list[str]  # ids, to notice a resume on other data


def save_checkpoint(
    directory: Path, policy: Policy, optimizer: torch.optim.Optimizer, progress: Progress, keep: int
) -> Path:
    """Write `directory/step-NNNNNN` (`policy/` loads as a model; the rest is for `resume`) and remove all but
    the newest `keep`. Atomic: made beside it, then renamed."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"{_PREFIX}{progress.step:06d}"
    for left in directory.glob(f"{_UNFINISHED}*"):  # of a process that was killed here
        shutil.rmtree(left)
    work = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=directory))
    try:
        policy.save(work / "policy")
        state = {
            "parameters": [parameter.detach().cpu() for parameter in policy.parameters()],
            "optimizer": optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }
        torch.save(state, work / "training.pt")
        record = {"step": progress.step, "tasks_taken": progress.tasks_taken, "seed": progress.seed}
        (work / "progress.json").write_text(json.dumps({**record, "tasks": progress.tasks}))
        if target.exists():
            _remove(target)
        os.replace(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    for old in list_checkpoints(directory)[:-keep]:
        _remove(old)
    return target


def _remove(checkpoint: Path) -> None:
    """First what makes it one: who is killed halfway leaves nothing that looks whole."""
    (checkpoint / "progress.json").unlink()
    shutil.rmtree(checkpoint)


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints under `directory`, oldest first."""
    return sorted(path for path in directory.glob(f"{_PREFIX}*") if (path / "progress.json").is_file())


def load_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Progress:
    """Put the state of a checkpoint into `policy` and `optimizer`; `path` may be the directory of several,
    which means the newest. Raises `ConfigError` if there is none or it is of another model."""
    if not (path / "progress.json").is_file():
        found = list_checkpoints(path)
        if not found:
            raise ConfigError(f"{path} holds no checkpoint")
        path = found[-1]
    state: dict[str, Any] = torch.load(path / "training.pt", map_location="cpu", weights_only=True)
    parameters = list(policy.parameters())
    saved = state["parameters"]
    if [p.shape for p in parameters] != [s.shape for s in saved]:
        raise ConfigError(f"checkpoint {path} is of another model: its parameters have other shapes")
    with torch.no_grad():
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
    return Progress(**json.loads((path / "progress.json").read_text()))
