"""How each test of a suite ended, read from the report files of pytest (JUnit XML) and vitest (JSON)."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

End = Literal["passed", "failed", "skipped"]
_LINE = re.compile(r"^(ok|FAIL)\s+([^\n]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    end: End
    why: str = ""  # of a failure: all that the suite says

    @property
    def headline(self) -> str:
        """The first line that says something."""
        lines = (line.strip() for line in self.why.splitlines())
        return next((line for line in lines if line and not line.startswith("at ")), "")[:160]


Outcomes = Mapping[str, Outcome]


def of_pytest(report: Path) -> Outcomes:
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = Outcome("passed")
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = Outcome("failed", f"{child.get('message')}\n{child.text or ''}")
            elif child.tag == "skipped":
                outcome = Outcome("skipped")
        _keep_worse(found, name, outcome)  # an error at teardown is a second entry of the same test
    return found


def of_vitest(report: Path, checkout: Path) -> Outcomes:
    found: dict[str, Outcome] = {}
    for file in json.loads(report.read_text())["testResults"]:
        where = Path(file["name"]).relative_to(checkout.resolve())
        for case in file["assertionResults"]:
            end: End = case["status"] if case["status"] in ("passed", "failed") else "skipped"
            outcome = Outcome(end, "\n".join(case.get("failureMessages") or []))
            _keep_worse(found, f"{where}::{case['fullName']}", outcome)
    return found


def of_lines(log: Path) -> tuple[list[str], list[str]]:
    """What passed and what failed, of a script that prints `ok NAME` or `FAIL NAME: WHY` a line for each."""
    found = _LINE.findall(log.read_text(errors="replace"))
    return [text for verdict, text in found if verdict == "ok"], [text for verdict, text in found if verdict != "ok"]


def count(outcomes: Outcomes, end: End) -> int:
    return sum(outcome.end == end for outcome in outcomes.values())


def failing(outcomes: Outcomes) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome.end == "failed"}


def passing(outcomes: Outcomes) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome.end == "passed"}


def _keep_worse(found: dict[str, Outcome], name: str, outcome: Outcome) -> None:
    if name not in found or outcome.end == "failed":
        found[name] = outcome
