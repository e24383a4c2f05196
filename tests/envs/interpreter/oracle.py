"""CPython's word on programs: each in a child of its own, forked from one isolated interpreter.

Run as a script it reads JSON lines (a program each) and answers with JSON lines `[stdout, error]`;
`error` is the last line of the traceback, None when the program was stopped.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_CPU_SECONDS = 2


def run_in_cpython(programs: Sequence[str]) -> list[tuple[str, str | None]]:
    """What each program prints and how it ends, with `PYTHONHASHSEED=0`."""
    lines = "".join(json.dumps(program) + "\n" for program in programs)
    done = subprocess.run(
        [sys.executable, "-s", "-P", "-X", "utf8", str(Path(__file__))],
        input=lines,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.defpath, "PYTHONHASHSEED": "0"},
    )
    return [(stdout, error) for stdout, error in map(json.loads, done.stdout.splitlines())]


def _main() -> None:
    for module in ("collections", "functools", "heapq", "itertools", "re", "bisect", "string", "math"):
        importlib.import_module(module)  # once, not in every child
    printed, ending = os.memfd_create("printed"), os.memfd_create("ending")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _child(json.loads(line), printed, ending)
        _, status = os.waitpid(pid, 0)
        stdout, error = _taken(printed), _taken(ending)
        print(json.dumps([stdout, error if status == 0 else None]), flush=True)


def _taken(descriptor: int) -> str:
    """What the child wrote; the file is empty again."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return data.decode("utf-8", "replace")


def _child(program: str, printed: int, ending: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(printed, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    namespace: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    error = ""
    try:
        exec(compile(program, "<program>", "exec", dont_inherit=True), namespace)
    except BaseException as raised:  # noqa: BLE001 - whatever the program raised is its outcome
        if not isinstance(raised, SystemExit) or raised.code not in (None, 0):
            text = str(raised)
            error = f"{type(raised).__name__}: {text}" if text else type(raised).__name__
    sys.stdout.flush()
    os.write(ending, error.encode("utf-8", "replace"))
    os._exit(0)


if __name__ == "__main__":
    _main()
