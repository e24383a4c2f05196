"""The runner with the interpreter in its box: `python -m sandyard.verify.interpreted CONTROL`.

It loads smolagents once and forks a runner for every job. `CONTROL` is the descriptor of a socket; each message
on it carries the runner's standard input and output, and is answered with the runner's process id.

Judge, link and verdict are those of the runner; only what executes the solution is another. A program that
the interpreter would not execute as CPython ends its box with `UNSUPPORTED`, an exit code that no program
under the guard can reach.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import struct
import sys
import threading
from typing import Any

from sandyard.envs.interpreter.engine import RECURSION_LIMIT, Ended, Engine
from sandyard.envs.interpreter.modules import GuardedModule
from sandyard.verify.runner import box
from sandyard.verify.runner import main as runner
from sandyard.verify.runner.link import Closed, Link
from sandyard.verify.runner.peer import last_line

UNSUPPORTED = 86
PID = struct.Struct(">Q")
STACK_BYTES = 128 << 20


def main(control: socket.socket) -> None:
    Engine(_discard)  # smolagents is loaded before a runner is forked
    box.serve = serve
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a runner: its output ends with it
    control.send(PID.pack(os.getpid()))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _runner(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(PID.pack(pid))


def _runner(stdin: int, stdout: int) -> None:
    """One job, in a process of its own."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.close(stdin)
        os.close(stdout)
        _skip_program()
        runner.main()
        sys.stdout.flush()
    finally:
        os._exit(0)


def serve(descriptor: int, setup: str, solution: str) -> None:
    """The box: load the solution in the interpreter, then answer the judge until it goes."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(descriptor, setup, solution))
    thread.start()
    thread.join()


def _serve(descriptor: int, setup: str, solution: str) -> None:
    link = Link(descriptor)
    engine = Engine(_discard, on_trap=lambda trap: os._exit(UNSUPPORTED))
    _run(engine, setup)  # the judge runs the setup too and reports what is wrong with it
    ended = _run(engine, solution)
    answering = box.Box(link, {name: _plain(value) for name, value in engine.namespace().items()})
    try:
        while True:
            message = link.receive()
            if ended.error is not None:
                link.send(["fatal", last_line(ended.error)])
            else:
                answering.answer(message)
    except Closed:
        return


def _run(engine: Engine, source: str) -> Ended:
    ended = engine.run(source)
    if ended.refusal is not None:
        os._exit(UNSUPPORTED)
    return ended


def _plain(value: Any) -> Any:
    return importlib.import_module(value.__name__) if isinstance(value, GuardedModule) else value


def _discard(*values: Any, **options: Any) -> None:
    """What a solution prints is nobody's."""


def _skip_program() -> None:
    """The runner's own source comes first, for machines that do not have it."""
    lengths = struct.unpack(">III", os.read(0, 12))
    left = sum(lengths)
    while left:
        chunk = os.read(0, left)
        if not chunk:
            raise SystemExit("stdin ended before the program was complete")
        left -= len(chunk)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
