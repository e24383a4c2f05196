"""The process in which programs run: one session, killed and replaced when a program does not end.

Standard input carries requests, what was standard output carries answers. A program has neither:
both are /dev/null by the time it runs.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from typing import Any

from sandyard.envs.interpreter import frames
from sandyard.envs.interpreter.engine import RECURSION_LIMIT, Engine
from sandyard.envs.interpreter.output import PrintedText
from sandyard.errors import HostError

STACK_BYTES = 256 << 20  # virtual: calls of the program are many calls of the interpreter


def main() -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    sys.setrecursionlimit(RECURSION_LIMIT)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(requests, answers))
    thread.start()
    thread.join()


def _serve(requests: Any, answers: Any) -> None:
    def answer(message: Any) -> None:
        answers.write(frames.encode(message))
        answers.flush()

    settings = frames.read(requests)
    printed = PrintedText(settings["output_limit"])
    try:
        engine = Engine(printed.print, imports=settings["imports"])
    except HostError as error:
        answer({"missing": error.message, "remedy": error.remedy})
        return
    memory = settings["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer({"ready": True})
    while (request := frames.read(requests)) is not None:
        if request.get("reset"):
            engine.reset()
            answer({"reset": True})
            continue
        answer(_run(engine, printed, request["source"]))


def _run(engine: Engine, printed: PrintedText, source: str) -> dict[str, Any]:
    ended = engine.run(source)
    refusal = ended.refusal and [ended.refusal.construct, ended.refusal.line, ended.refusal.column]
    return {"stdout": printed.take(), "error": ended.error, "refusal": refusal}


if __name__ == "__main__":
    main()
