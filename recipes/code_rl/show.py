#!/usr/bin/env python3
"""Print one trajectory of a run as the policy saw it: `show.py RUN_DIR [--file before] [--index 0]`."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--file", default="trajectories", help="trajectories, before, after, before-greedy, …")
    parser.add_argument("--index", type=int, default=0, help="line of the file, from 0")
    given = parser.parse_args()
    path = given.run_dir / f"{given.file}.jsonl"
    if not path.is_file():
        parser.error(
            f"{path} does not exist; {given.run_dir} has {sorted(p.stem for p in given.run_dir.glob('*.jsonl'))}"
        )
    with path.open(encoding="utf-8") as lines:
        line = next(itertools.islice(lines, given.index, None), None)
    if line is None:
        parser.error(f"{path} has no line {given.index}")
    print(describe(json.loads(line)))


def describe(record: dict[str, Any]) -> str:
    """The text of a trajectory, then how it was scored."""
    verdict = record.get("verdict") or {}
    outcomes = [f"  test {r['index']}: {r['outcome']} {r['detail']}".rstrip() for r in verdict.get("results", ())]
    score = f"masked: {record['masked']}" if record.get("masked") else f"reward: {record.get('reward')}"
    summary = f"task {record['task_id']}  turns {record['turns']}  ended: {record['end_reason']}  {score}"
    return "\n".join([record.get("prompt", "") + record.get("text", ""), "", summary, *outcomes])


if __name__ == "__main__":
    main()
