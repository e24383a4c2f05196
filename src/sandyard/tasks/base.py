"""A task: an instruction, how to set up its environment, and what its verifier needs.

Nothing of `Task.tests`, `setup_code` or `reference` ever enters a sandbox while a policy can act.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One code task. `task_id` is unique in its set; `family` groups tasks in reports."""

    task_id: str
    prompt: str
    tests: Sequence[str] = ()  # each one statement block, run on its own in a fresh process
    setup_code: str = ""  # runs before the solution of every test (imports, helper classes)
    reference: str | None = None  # a known right solution, for `eval --solutions reference`
    family: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """One line for progress output and logs."""
        return json.dumps({"task_id": self.task_id, "family": self.family, "tests": len(self.tests)})
