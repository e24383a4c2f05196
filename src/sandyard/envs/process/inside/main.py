"""The fork server: `main(control)` reads what to set up, then forks sessions and jobs as it is told.

It is process 1 of a namespace of its own, so that nothing outlives it; each session has a process 1 of its own
in turn, which does nothing but to die with it. Control messages are JSON over a socket that keeps their bounds.
"""

from __future__ import annotations

import errno
import gc
import heapq
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from sandyard.envs.process.inside import kernel
from sandyard.envs.process.inside.confine import (
    Confinement,
    Stage,
    close_others,
    confine_job,
    confine_session,
    null_standards,
    plain_signals,
)
from sandyard.envs.process.inside.driver import (
    ANSWER,
    FAILED,
    Driver,
    finish,
    forget_ourselves,
    fresh_main,
    fresh_streams,
    run_program,
)
from sandyard.envs.process.inside.root import enter

MAX_MESSAGE = 128 << 10
_FIRST_ID = 1_700_000_000  # of user ids that sessions take, where the host lets them have one each
_CGROUP_PATIENCE = 5.0
_RETRY = 0.01
_NAMESPACES = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


Child = Callable[[], NoReturn]


class Place(NamedTuple):
    """What one session holds: two processes, a user id, its control groups."""

    slot: int
    init: int
    pid: int


def main(control: socket.socket) -> None:
    setup = json.loads(control.recv(MAX_MESSAGE))
    try:
        server = _prepare(control, setup)
    except (OSError, ImportError) as error:
        control.send(json.dumps({"failed": str(error)}).encode())
        return
    forget_ourselves()  # before forking: each session would copy what it changes
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": True}).encode())
    child = server.serve()
    if child is not None:
        # Here, so that the frames below foreign code are few and hold nothing.
        del server, setup, control
        child()


def _prepare(control: socket.socket, setup: dict[str, Any]) -> ForkServer:
    _warm(setup["imports"])
    groups = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in setup["cgroups"]]
    _enter_namespaces(control)
    own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
    enter(setup["root"])
    sys.path[:] = setup["path"]
    return ForkServer(control, setup, groups, own_pids)


def _warm(names: Sequence[str]) -> None:
    gc.disable()
    for name in names:
        importlib.import_module(name)


def _enter_namespaces(control: socket.socket) -> None:
    """Go on as process 1 of new namespaces; the process before it stays to tell how this one ends."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(_NAMESPACES | (kernel.CLONE_NEWUSER if uid else 0))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    pid = os.fork()
    if pid:
        control.close()
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    kernel.die_with_parent(signal.SIGKILL)


class ForkServer:
    def __init__(self, control: socket.socket, setup: dict[str, Any], groups: Sequence[int], own_pids: int) -> None:
        self._control = control
        self._bounds = Confinement(0, **setup["bounds"], seccomp=bytes.fromhex(setup["seccomp"]), cgroups=())
        self._group_limits = setup["group_limits"]
        self._groups = groups
        self._own_pids = own_pids
        self._first_id = 0 if setup["root"]["rootless"] else _FIRST_ID
        self._places: dict[int, Place] = {}
        self._by_pid: dict[int, int] = {}
        self._statuses: dict[int, dict[int, int]] = {}  # by session, of those of its two processes that ended
        self._going: dict[int, float] = {}  # sessions whose control groups do not go yet, with their deadline
        self._free: list[int] = []
        self._used = 0

    def serve(self) -> Child | None:
        """Returns what a forked child has to do, in the child; None in the fork server, when nobody needs it."""
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waker)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(_RETRY * 1000 if self._going else None):
                if descriptor == wake:
                    _drain(wake)
                    continue
                try:
                    data, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 3)
                except ConnectionError:
                    return None
                if not data:
                    return None
                child = self._obey(json.loads(data), descriptors)
                if child is not None:
                    return child
            self._reap()
            self._remove_groups()

    def _obey(self, message: dict[str, Any], descriptors: list[int]) -> Child | None:
        child = None
        place = self._places.get(message["id"])
        if message["op"] in ("session", "job"):
            child = self._open(message["id"], message["op"], descriptors)
        elif place is not None and place.pid not in self._statuses.get(message["id"], ()):
            # Not reaped, so that the number is still this process's.
            os.kill(place.pid, signal.SIGINT if message["op"] == "interrupt" else signal.SIGKILL)
        if child is None:
            for descriptor in descriptors:
                os.close(descriptor)
        return child

    def _open(self, number: int, kind: str, descriptors: list[int]) -> Child | None:
        slot = heapq.heappop(self._free) if self._free else self._used
        self._used = max(self._used, slot + 1)
        groups: tuple[int, ...] = ()
        init = 0
        try:
            groups = self._make_groups(number)
            kernel.unshare(kernel.CLONE_NEWPID)
            init = _fork_init()
            pid = os.fork()
        except OSError as error:
            for group in groups:
                os.close(group)
            self._take_back(number, slot, init)
            self._say({"refused": number, "reason": str(error)})
            return None
        if pid == 0:
            outer = self._first_id and self._first_id + slot
            bounds = self._bounds._replace(outer_id=outer, cgroups=groups)
            return partial(_session if kind == "session" else _job, bounds, descriptors)
        kernel.join_namespace(self._own_pids)
        for group in groups:
            os.close(group)
        self._places[number] = Place(slot, init, pid)
        self._by_pid[init] = self._by_pid[pid] = number
        return None

    def _take_back(self, number: int, slot: int, init: int) -> None:
        kernel.join_namespace(self._own_pids)
        if init:
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)
        heapq.heappush(self._free, slot)
        self._drop_groups(number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._by_pid.pop(pid, None)
            if number is not None:
                self._one_ended(number, pid, status)

    def _one_ended(self, number: int, pid: int, status: int) -> None:
        place = self._places[number]
        statuses = self._statuses.setdefault(number, {})
        statuses[pid] = status
        if len(statuses) < 2 and pid == place.pid:
            # With its process 1 everything of a session ends; it is reaped after all of them.
            os.kill(place.init, signal.SIGKILL)
        if len(statuses) == 2:
            self._going[number] = time.monotonic() + _CGROUP_PATIENCE

    def _remove_groups(self) -> None:
        for number, deadline in list(self._going.items()):
            killed = self._memory_kills(number)
            left = self._drop_groups(number)
            if left and time.monotonic() < deadline:
                continue
            place = self._places.pop(number)
            del self._going[number]
            heapq.heappush(self._free, place.slot)
            status = self._statuses.pop(number)[place.pid]
            self._say({"ended": number, "status": status, "memory": killed, "left": left})

    def _make_groups(self, number: int) -> tuple[int, ...]:
        made: list[int] = []
        try:
            for group in self._groups:
                os.mkdir(str(number), 0o755, dir_fd=group)
                made.append(os.open(str(number), os.O_RDONLY | os.O_DIRECTORY, dir_fd=group))
                for name, value in self._group_limits.items():
                    _write_setting(made[-1], name, value)
        except OSError:
            for group in made:
                os.close(group)
            raise
        return tuple(made)

    def _memory_kills(self, number: int) -> bool:
        """Whether the kernel killed in this session for want of memory."""
        for group in self._groups:
            for name in ("memory.events", "memory.oom_control"):
                for line in _read_setting(group, f"{number}/{name}").splitlines():
                    if line.startswith("oom_kill ") and int(line.split()[1]):
                        return True
        return False

    def _drop_groups(self, number: int) -> str:
        """What does not go; empty when nothing is left."""
        left = ""
        for group in self._groups:
            try:
                os.rmdir(str(number), dir_fd=group)
            except FileNotFoundError:
                continue
            except OSError as error:
                left = f"control group {number}: {error}"
        return left

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise
            os._exit(0)  # nobody is there any more


def _fork_init() -> int:
    """Process 1 of a session: it waits to be killed, and with it dies everything of the session."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who is left to it is reaped by the kernel
            close_others()
            while True:
                signal.pause()
        finally:
            os._exit(70)
    return pid


def _session(bounds: Confinement, descriptors: list[int]) -> NoReturn:
    try:
        link = socket.socket(fileno=descriptors[0])
        try:
            plain_signals()
            null_standards()
            close_others(descriptors[0], *bounds.cgroups)
            confine_session(bounds)
        except (Stage, OSError) as error:
            text = str(error).encode()
            link.sendall(ANSWER.pack(FAILED, 0, len(text)) + text)
            os._exit(70)
        Driver().serve(link)
    finally:
        os._exit(70)


def _job(bounds: Confinement, descriptors: list[int]) -> NoReturn:
    """A program of ours: its source comes first on its standard input, then what it reads."""
    try:
        plain_signals()
        source = _begin_job(bounds, descriptors)
        del bounds, descriptors
        namespace = fresh_main().__dict__
        fresh_streams()
        gc.enable()
        finish(run_program(source, "<job>", namespace))
    finally:
        os._exit(70)


def _begin_job(bounds: Confinement, descriptors: list[int]) -> str:
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    close_others(*bounds.cgroups)
    try:
        confine_job(bounds)
    except Stage as error:
        os.write(2, str(error).encode())
        os._exit(70)
    return _read_exactly(int.from_bytes(_read_exactly(4), "big")).decode()


def _read_exactly(length: int) -> bytes:
    """Never a byte more: the rest is the program's."""
    data = b""
    while len(data) < length:
        chunk = os.read(0, length - len(data))
        if not chunk:
            os._exit(70)
        data += chunk
    return data


def _write_setting(group: int, name: str, value: str) -> None:
    try:
        descriptor = os.open(name, os.O_WRONLY, dir_fd=group)
    except FileNotFoundError:
        return  # of another controller, or of the other version
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def _read_setting(group: int, name: str) -> str:
    try:
        descriptor = os.open(name, os.O_RDONLY, dir_fd=group)
    except FileNotFoundError:
        return ""
    try:
        return os.read(descriptor, 4096).decode()
    finally:
        os.close(descriptor)


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return
