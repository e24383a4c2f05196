"""The contract of a runtime as executable checks (`sandyard conformance`).

Each module holds the checks of one subject; importing it registers them.
"""

from sandyard.runtimes.conformance import commits, files, isolation, lifecycle, limits, memory, pausing, processes
from sandyard.runtimes.conformance.runner import CHECKS, Check, CheckResult, run_conformance, summary

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "commits",
    "files",
    "isolation",
    "lifecycle",
    "limits",
    "memory",
    "pausing",
    "processes",
    "run_conformance",
    "summary",
]
