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
from collections.abc import Iterator

from e2b import CommandExitException, Sandbox
from e2b.sandbox.commands.command_handle import PtySize

from sandyard.errors import BadRequest


def attach(box: Sandbox) -> int:
    """Run a login shell of `box` on this terminal until it ends; returns its exit code.

    Raises `BadRequest` when standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise BadRequest("standard input is not a terminal", remedy="use `sandyard exec ID CMD` or `sandyard start -d`")
    shell = box.pty.create(_size(), timeout=0)
    ended = threading.Event()
    with _raw_terminal(), _on_resize(lambda: box.pty.resize(shell.pid, _size())):
        reader = threading.Thread(target=_forward_input, args=(box, shell.pid, ended), daemon=True)
        reader.start()
        try:
            return shell.wait(on_pty=_write).exit_code
        except CommandExitException as error:
            return error.exit_code if error.exit_code >= 0 else 137
        finally:
            ended.set()
            reader.join(timeout=1)


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
def _on_resize(callback: object) -> Iterator[None]:
    # The handler only starts a thread: a request from inside a signal handler could deadlock.
    previous = signal.signal(signal.SIGWINCH, lambda *_: threading.Thread(target=callback, daemon=True).start())  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, previous)
