"""The files of a run: `config.json`, `metrics.jsonl`, `trajectories.jsonl`, one more per evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandyard.errors import ConfigError
from sandyard.train.trajectory import Trajectory, read_lines, write_trajectories

METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories.jsonl"


class RunLog:
    """Writes under `run_dir`; `decode` makes the readable text of trajectories."""

    def __init__(self, run_dir: Path, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        self.run_dir = run_dir
        self._decode = decode

    def begin(self, config: Mapping[str, Any], step: int) -> None:
        """Start at `step`. What an interrupted run logged after it is removed; with step 0, `ConfigError` if
        there is a run already: two runs in one file would look like one."""
        if step == 0:
            require_unused(self.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, TRAJECTORIES):
            self._rewind(self.run_dir / name, step)
        (self.run_dir / "config.json").write_text(json.dumps(dict(config), indent=2))

    def metrics(self, line: Mapping[str, Any]) -> None:
        with (self.run_dir / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(line)) + "\n")

    def trajectories(self, trajectories: Sequence[Trajectory], name: str = TRAJECTORIES, **labels: Any) -> None:
        write_trajectories(self.run_dir / name, trajectories, self._decode, **labels)

    def _rewind(self, path: Path, step: int) -> None:
        if not path.exists():
            return
        kept = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if _step(line) <= step]
        work = path.with_suffix(".rewinding")
        work.write_text("".join(kept), encoding="utf-8")
        os.replace(work, path)


def require_unused(run_dir: Path) -> None:
    """Raises `ConfigError` if a run has written its metrics there."""
    if (run_dir / METRICS).exists():
        raise ConfigError(f"{run_dir} holds a run already", remedy="resume it, or use another directory")


def _step(line: str) -> float:
    """The step of a log line; a line cut short by a crash belongs to no step that is kept."""
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError):
        return float("inf")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, in order, each with what that step had a value of; [] before the first."""
    path = run_dir / METRICS
    lines = read_lines(path) if path.exists() else ()
    return [{name: value for name, value in line.items() if value is not None} for line in lines]
