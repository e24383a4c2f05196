"""A shell in a sandbox on this terminal: raw mode, window size, and putting the terminal back."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from e2b import CommandExitException, CommandResult, Sandbox
from e2b.sandbox.commands.command_handle import PtySize

from sandyard.errors import BadRequest


def require_terminal() -> None:
    """Raises `BadRequest` when standard input is not a terminal."""
    if not sys.stdin.isatty():
        raise BadRequest("standard input is not a terminal", remedy="use `sandyard exec ID CMD` or `sandyard start -d`")


def attach(box: Sandbox) -> int:
    """Run a login shell of `box` on this terminal until it ends; returns its exit code."""
    shell = box.pty.create(_size(), timeout=0)
    ended = threading.Event()
    with _raw_terminal(), _on_resize(lambda: box.pty.resize(shell.pid, _size())):
        reader = threading.Thread(target=_forward_input, args=(box, shell.pid, ended), daemon=True)
        reader.start()
        try:
            return exit_code(lambda: shell.wait(on_pty=_write))
        finally:
            ended.set()
            reader.join(timeout=1)


def exit_code(wait: Callable[[], CommandResult]) -> int:
    """Wait for a command's end; its exit code, or 137 (what shells say) when a signal ended it.

    The SDK waits in native code, where no Python signal handler runs: so it waits in a thread, and
    Ctrl-C and a resize are heard here.
    """
    executor = ThreadPoolExecutor(1)
    try:
        return executor.submit(wait).result().exit_code
    except CommandExitException as error:
        return error.exit_code if error.exit_code >= 0 else 137
    finally:
        executor.shutdown(wait=False)


def _forward_input(box: Sandbox, pid: int, ended: threading.Event) -> None:
    descriptor = sys.stdin.fileno()
    while not ended.is_set():
        ready, _, _ = select.select([descriptor], [], [], 0.2)
        if not ready:
            continue
        data = os.read(descriptor, 4096)
        if not data:
            return
        box.pty.send_stdin(pid, data)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _size() -> PtySize:
    size = shutil.get_terminal_size()
    return PtySize(rows=size.lines, cols=size.columns)


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


@contextlib.contextmanager
def _on_resize(callback: Callable[[], None]) -> Iterator[None]:
    # The handler only starts a thread: a request from inside a signal handler could deadlock.
    previous = signal.signal(signal.SIGWINCH, lambda *_: threading.Thread(target=callback, daemon=True).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, previous)
