"""The program of a session: it runs what it is sent, one step after another, and keeps the names.

It trusts nothing of what runs beside it: the functions it lives on are bound before foreign code comes in. That
protects a session from accidents; whoever holds the other end of the link believes nothing of it anyway.

Request: `REQUEST` (number, flags, length of the source), with two descriptors for standard output and error,
then the source. Answer: `ANSWER` (kind, number, value): `READY`, `FAILED` (value: bytes of text that follow),
or `ENDED` (value: the exit code, negative for a signal).
"""

from __future__ import annotations

import atexit
import gc
import io
import linecache
import os
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

REQUEST = struct.Struct("!IBI")
ANSWER = struct.Struct("!BIi")
READY, FAILED, ENDED = 1, 2, 3
FRESH = 1  # flag of a request: in a process of its own, which starts without names

_PAIR = struct.Struct("@ii")
_ANCILLARY = socket.CMSG_SPACE(_PAIR.size)
_CLOEXEC_RECEIVED = 0x40000000  # MSG_CMSG_CLOEXEC
_fork, _getpid, _exit, _kill, _waitpid, _dup2, _close, _open = (
    os.fork,
    os.getpid,
    os._exit,
    os.kill,
    os.waitpid,
    os.dup2,
    os.close,
    os.open,
)
_exit_code = os.waitstatus_to_exitcode
_print_exception, _compile, _exec = traceback.print_exception, compile, exec


class Wire:
    """One end of a link, with what is called on it bound early."""

    def __init__(self, link: socket.socket) -> None:
        self.receive, self._receive, self.send = link.recvmsg, link.recv, link.sendall

    def exactly(self, length: int) -> bytes:
        """That many bytes; this process ends where the link does."""
        data = bytearray()
        while len(data) < length:
            chunk = self._receive(min(length - len(data), 1 << 20))
            if not chunk:
                _exit(0)
            data += chunk
        return bytes(data)


class Driver:
    """Holds the names of a session and answers requests."""

    def __init__(self) -> None:
        self._main = fresh_main()
        self._running = False
        self._child = 0
        self._step = 0
        self._pid = _getpid()
        signal.signal(signal.SIGINT, self._interrupt)
        fresh_streams()
        sys.setrecursionlimit(sys.getrecursionlimit() + _depth() + 4)
        gc.enable()

    def serve(self, link: socket.socket) -> NoReturn:
        """Answer what comes over `link`, until it ends."""
        # A process that foreign code forks holds no link: only the session answers.
        os.register_at_fork(after_in_child=link.close)
        wire = Wire(link)
        wire.send(ANSWER.pack(READY, 0, 0))
        while self.answer(wire):
            pass
        _exit(0)

    def answer(self, wire: Wire) -> bool:
        """Answer one request; False when there is none any more."""
        header, ancillary, _, _ = wire.receive(REQUEST.size, _ANCILLARY, _CLOEXEC_RECEIVED)
        if not header:
            return False
        number, flags, length = REQUEST.unpack(header + wire.exactly(REQUEST.size - len(header)))
        (_, _, received) = ancillary[0]
        stdout, stderr = _PAIR.unpack(received)
        source = wire.exactly(length).decode("utf-8", "surrogatepass")
        self._step += 1
        _dup2(stdout, 1)
        _dup2(stderr, 2)
        _close(stdout)
        _close(stderr)
        try:
            code = self._run_fresh(source) if flags & FRESH else self._run(source)
        finally:
            quiet = _open("/dev/null", os.O_RDWR)
            _dup2(quiet, 1)
            _dup2(quiet, 2)
            _close(quiet)
        wire.send(ANSWER.pack(ENDED, number, code))
        return True

    def _interrupt(self, number: int, frame: types.FrameType | None) -> None:
        if self._child:
            _kill(-1, signal.SIGKILL)
        elif self._running:
            raise KeyboardInterrupt

    def _run(self, source: str) -> int:
        """Run one program among the names of the earlier ones; returns what would be its exit code."""
        try:
            try:
                self._running = True
                code = run_program(source, f"<run {self._step}>", self._main.__dict__)
            finally:
                self._running = False
        except KeyboardInterrupt:
            code = 130  # it came between the end of the program and this line
        if _getpid() != self._pid:
            finish(code)  # a fork of the program came to the program's end
        _flush()
        return code

    def _run_fresh(self, source: str) -> int:
        pid = _fork()
        if pid == 0:
            self._running = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
            finish(run_program(source, "<run>", self._main.__dict__))
        self._child = pid
        try:
            code = _exit_code(_waitpid(pid, 0)[1])
        finally:
            self._child = 0
        try:  # noqa: SIM105 - what the program left running
            _kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return code


def run_program(source: str, filename: str, namespace: dict[str, Any]) -> int:
    """Execute `source` as a script; returns its exit code, the traceback being printed as Python prints it."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    try:
        _exec(_compile(source, filename, "exec", dont_inherit=True), namespace)
    except SystemExit as ending:
        return _status_of(ending.code)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        _report(error, filename)
        return 1
    return 0


def _status_of(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    try:  # noqa: SIM105 - as Python does: whatever happens while it is printed
        print(code, file=sys.stderr)
    except Exception:  # noqa: BLE001 - its __str__ is the program's
        pass
    return 1


def _report(error: BaseException, filename: str) -> None:
    trace = _program_part(error.__traceback__, filename)
    try:
        if sys.excepthook is sys.__excepthook__:
            _print_exception(type(error), error, trace)  # the other one reads source from files only
        else:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException as failure:  # noqa: BLE001 - the hook, or a __str__ of the program
        try:
            _print_exception(type(failure), failure, None, file=sys.__stderr__)
        except BaseException:  # noqa: BLE001 - nothing can be said about it
            return


def _program_part(trace: types.TracebackType | None, filename: str) -> types.TracebackType | None:
    """Without the frames of this program: those before the other's, and that of an interrupt."""
    while trace is not None and trace.tb_frame.f_code.co_filename != filename:
        trace = trace.tb_next
    last = trace
    while last is not None and last.tb_next is not None:
        if last.tb_next.tb_frame.f_code is Driver._interrupt.__code__:
            last.tb_next = None
        last = last.tb_next
    return trace


def finish(code: int) -> NoReturn:
    """End as an interpreter ends: threads are waited for, exit handlers run, output goes out."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:  # noqa: BLE001 - of the program's threads and handlers
        _report(error, "")
    _flush()
    _exit(code & 0xFF)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - contextlib is the program's to break
            stream.flush()
        except Exception:  # noqa: BLE001 - the program closed or replaced it
            pass
    if sys.stdout is not sys.__stdout__ or getattr(sys.stdout, "closed", True):
        fresh_streams()


def fresh_streams() -> None:
    """`sys.stdin`, `stdout` and `stderr` over the descriptors 0 to 2."""
    sys.stdin = sys.__stdin__ = _text(0, "r", "strict")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1, "w", "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "w", "backslashreplace")  # type: ignore[misc]


def _text(descriptor: int, mode: str, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, mode, closefd=False)
    buffer: Any = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=mode == "w")


def fresh_main() -> types.ModuleType:
    """A `__main__` as a fresh interpreter has it."""
    module = types.ModuleType("__main__")
    module.__dict__.update({"__builtins__": sys.modules["builtins"], "__annotations__": {}})
    sys.modules["__main__"] = module
    sys.argv = [""]
    return module


def forget_ourselves() -> None:
    """Nothing of this program can be imported any more; what runs already is not disturbed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sandyard"]:
        del sys.modules[name]


def _depth() -> int:
    frame: types.FrameType | None = sys._getframe()
    depth = 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth
