"""The host's end of the fork server: a process, and a socket of JSON messages with descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sandyard
from sandyard.envs.process import filter as seccomp
from sandyard.envs.process.cgroups import SessionGroups, group_limits, make_groups, sweep_groups
from sandyard.envs.process.inside.main import MAX_MESSAGE
from sandyard.envs.process.limits import SessionLimits
from sandyard.envs.process.plan import find_interpreter, make_plan
from sandyard.errors import HostError

_PREFIX = "sandyard-process-"  # of our names, then the id of this process
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 10.0
_MAX_ANSWER = 64 << 10
_BOOT = """
import sys
sys.path.insert(0, sys.argv[1])
import socket, site
site.setquit(), site.setcopyright(), site.sethelper()
from sandyard.envs.process.inside.main import main
main(socket.socket(fileno=int(sys.argv[2])))
"""


class ForkServerProcess:
    """Started by `start`; `on_message` gets what it says, and None once when it has ended."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, groups: SessionGroups) -> None:
        self.groups = groups
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._on_message: Callable[[dict[str, Any] | None], None] = lambda message: None
        self._sending = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        limits: SessionLimits,
        packages: Sequence[str],
        imports: Sequence[str],
        on_message: Callable[[dict[str, Any] | None], None],
    ) -> ForkServerProcess:
        """Raises `HostError` saying what this host does not let us do, `ConfigError` for a wrong package."""
        starting = asyncio.ensure_future(asyncio.to_thread(_start, limits, packages, imports))
        try:
            process, control, groups = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread goes on: what it makes is ended again.
            starting.add_done_callback(_end_when_made)
            raise
        self = cls(process, control, groups)
        self._on_message = on_message
        self._loop.add_reader(control, self._read)
        return self

    async def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Raises `ConnectionError` when the fork server has ended."""
        data = json.dumps(message).encode()
        async with self._sending:
            while self._control.fileno() >= 0:
                try:
                    socket.send_fds(self._control, [data], descriptors)
                    return
                except BlockingIOError:
                    await writable(self._control)
        raise ConnectionResetError("the fork server has ended")

    async def stop(self) -> None:
        """End it and all its sessions. Idempotent; may be cancelled, what was begun is still done."""
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._control.close()
        await asyncio.shield(asyncio.to_thread(_stop, self._process, self.groups))

    def _read(self) -> None:
        try:
            data = self._control.recv(_MAX_ANSWER)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._loop.remove_reader(self._control)
            self._control.close()
        self._on_message(json.loads(data) if data else None)


async def writable(end: socket.socket) -> None:
    """Wait until something can be sent."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def on_writable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(end, on_writable)
    try:
        await ready
    finally:
        if end.fileno() >= 0:
            loop.remove_writer(end)


def _start(
    limits: SessionLimits, packages: Sequence[str], imports: Sequence[str]
) -> tuple[subprocess.Popen[bytes], socket.socket, SessionGroups]:
    sweep_groups(_PREFIX)
    scratch = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    groups = make_groups(Path(scratch).name)
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process: subprocess.Popen[bytes] | None = None
    try:
        with theirs:
            setup = _setup(scratch, groups, limits, packages, imports)
            assert sandyard.__path__
            where = str(Path(sandyard.__path__[0]).parent)
            command = [find_interpreter().program, "-I", "-S", "-c", _BOOT, where, str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/tmp", "MALLOC_ARENA_MAX": "2"},
                pass_fds=[theirs.fileno()],
            )
        control.settimeout(_START_TIMEOUT)
        control.send(json.dumps(setup).encode())
        answer = json.loads(control.recv(_MAX_ANSWER) or b'{"failed": "it ended"}')
        if "failed" in answer:
            raise HostError(
                f"back end process: the fork server did not start: {answer['failed']}",
                remedy="it needs root or unprivileged user namespaces, and Linux 5.12",
            )
        control.setblocking(False)
        return process, control, groups
    except BaseException as error:
        control.close()
        if process is not None:
            process.kill()
        _stop(process, groups)
        if isinstance(error, OSError):
            raise HostError(f"back end process: the fork server did not start: {error}") from error
        raise
    finally:
        # Its root was a mount in a namespace of its own, and is that namespace's "/" by now.
        shutil.rmtree(scratch, ignore_errors=True)


def _setup(
    scratch: str, groups: SessionGroups, limits: SessionLimits, packages: Sequence[str], imports: Sequence[str]
) -> dict[str, Any]:
    root, path = make_plan(scratch, packages)
    bounds = {name: getattr(limits, name) for name in ("memory_mb", "tmp_mb", "processes", "files", "cpu_seconds")}
    setup = {
        "root": root,
        "path": path,
        "imports": list(imports),
        "bounds": bounds,
        "seccomp": seccomp.program().hex(),
        "cgroups": [str(directory) for directory in groups.directories],
        "group_limits": group_limits(limits),
    }
    if len(json.dumps(setup)) > MAX_MESSAGE:
        raise HostError("back end process: the root has too many parts", remedy="name fewer packages")
    return setup


def _stop(process: subprocess.Popen[bytes] | None, groups: SessionGroups) -> None:
    if process is not None:
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    groups.remove()


def _end_when_made(starting: asyncio.Future[tuple[subprocess.Popen[bytes], socket.socket, SessionGroups]]) -> None:
    if starting.cancelled() or starting.exception() is not None:
        return
    process, control, groups = starting.result()
    control.close()
    with contextlib.suppress(RuntimeError):  # the loop ends: the fork server does so by itself
        asyncio.get_running_loop().run_in_executor(None, _stop, process, groups)
