"""The process in which programs run, killed and replaced when one does not end.

It loads smolagents once and forks for every session, so that a session finds modules as they were, whatever
an earlier one did to them. Standard input carries requests, what was standard output carries answers; a program
has neither: both are /dev/null by the time it runs.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

from sandyard.envs.interpreter import frames
from sandyard.envs.interpreter.engine import RECURSION_LIMIT, Engine, last_line
from sandyard.envs.interpreter.output import PrintedText
from sandyard.errors import HostError

STACK_BYTES = 256 << 20  # virtual: calls of the program are many calls of the interpreter
_PR_SET_PDEATHSIG = 1
_NEXT_SESSION = 75  # exit code of a session that was told to end


def main() -> None:
    _die_with_parent()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    settings = frames.read(requests)
    try:
        Engine(PrintedText(0).print, imports=settings["imports"])
    except HostError as error:
        _answer(answers, {"missing": error.message, "remedy": error.remedy})
        return
    _answer(answers, {"ready": True})
    while _fork_session(settings, requests, answers) == _NEXT_SESSION:
        pass


def _fork_session(settings: Mapping[str, Any], requests: BinaryIO, answers: BinaryIO) -> int:
    """One session in a child. It dies as its child died: whoever waits for it sees how."""
    pid = os.fork()
    if pid == 0:
        try:
            _session(settings, requests, answers)
        finally:
            os._exit(70)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def _session(settings: Mapping[str, Any], requests: BinaryIO, answers: BinaryIO) -> None:
    _die_with_parent()
    memory = settings["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(RECURSION_LIMIT)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(settings, requests, answers))
    thread.start()
    thread.join()


def _die_with_parent() -> None:
    """A program without end must not outlive whoever would stop it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(settings: Mapping[str, Any], requests: BinaryIO, answers: BinaryIO) -> None:
    printed = PrintedText(settings["output_limit"])
    engine = Engine(printed.print, imports=settings["imports"])
    while (request := frames.read(requests)) is not None:
        if request.get("reset"):
            _answer(answers, {"reset": True})
            os._exit(_NEXT_SESSION)
        _answer(answers, _run(engine, printed, request["source"]))
    os._exit(0)


def _run(engine: Engine, printed: PrintedText, source: str) -> dict[str, Any]:
    ended = engine.run(source)
    refusal = ended.refusal and [ended.refusal.construct, ended.refusal.line, ended.refusal.column]
    error = last_line(ended.error) if ended.error is not None and ended.failed else ""
    return {"stdout": printed.take(), "error": error, "refusal": refusal}


def _answer(answers: BinaryIO, message: Any) -> None:
    answers.write(frames.encode(message))
    answers.flush()


if __name__ == "__main__":
    main()
