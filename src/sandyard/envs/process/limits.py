"""What a session may use, and which modules it finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """`memory_mb`: address space of each process, and with root memory of all together (their files in /tmp count).
    `processes` counts threads, too. `cpu_seconds`: CPU time of one process. `output_limit`: characters of each
    stream of one run that are kept; a run that prints sixteen times as many is ended."""

    memory_mb: int = 512
    tmp_mb: int = 64
    processes: int = 64
    files: int = 256
    cpu_seconds: int = 3600
    output_limit: int = 64 << 10


# Loaded once and shared by all sessions, as far as the interpreter has them.
WARM_IMPORTS = (
    "abc", "array", "asyncio", "bisect", "collections", "contextlib", "copy", "csv", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "linecache", "math",
    "operator", "pprint", "random", "re", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap",
    "threading", "time", "traceback", "typing", "unittest.mock", "uuid",
)  # fmt: skip
