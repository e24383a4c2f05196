"""Runs one program in the session of a sandbox, which it starts when there is none: `call(name, timeout)`.

The program comes on standard input; its output goes to this process's own standard output and error, which the
session gets over an abstract socket called `name`. Exit codes: the program's own, or one of those below.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from typing import NoReturn

from sandyard.envs.process.inside.driver import ANSWER, REQUEST, Driver, Wire, forget_ourselves

STOPPED, STOPPED_LOST, DIED = 250, 251, 252
_LAST_CODE = 249
_GRACE = 1.0
_START_TIMEOUT = 20.0


def call(name: str, timeout: float) -> NoReturn:
    source = sys.stdin.buffer.read()
    link = _connect(name)
    (pid, _, _) = struct.unpack("@iii", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    socket.send_fds(link, [REQUEST.pack(0, 0, len(source))], [1, 2])
    link.sendall(source)
    code = _answer(link, timeout)
    if code is not None:
        sys.exit(_LAST_CODE if code in (STOPPED, STOPPED_LOST, DIED) else code)
    os.kill(pid, signal.SIGINT)
    if _answer(link, _GRACE) is not None:
        sys.exit(STOPPED)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        sys.exit(STOPPED_LOST)  # it ended meanwhile
    sys.exit(STOPPED_LOST)


def _answer(link: socket.socket, timeout: float) -> int | None:
    """The program's exit code, or None when there is none in time."""
    link.settimeout(timeout)
    try:
        data = link.recv(ANSWER.size, socket.MSG_WAITALL)
    except TimeoutError:
        return None
    except OSError:
        data = b""
    if len(data) != ANSWER.size:
        sys.exit(DIED)
    return int(ANSWER.unpack(data)[2]) & 0xFF


def _connect(name: str) -> socket.socket:
    deadline = time.monotonic() + _START_TIMEOUT
    started = False
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect("\0" + name)
            return link
        except ConnectionRefusedError:
            link.close()
            if time.monotonic() > deadline:
                raise
        if not started:
            started = True
            _start(name)
        time.sleep(0.002)


def _start(name: str) -> None:
    """Begin the session in a process that outlives this one."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        os.setpgid(0, 0)
        _be_session(name)
    finally:
        os._exit(70)


def _be_session(name: str) -> NoReturn:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + name)
    except OSError:
        os._exit(0)  # another one was faster
    listener.listen(8)
    os.register_at_fork(after_in_child=listener.close)
    forget_ourselves()
    driver = Driver()
    while True:
        link, _ = listener.accept()
        driver.answer(Wire(link))
        link.close()
