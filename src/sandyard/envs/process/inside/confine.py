"""Taking everything from a process before foreign code runs in it."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from sandyard.envs.process.inside import kernel

INNER_ID = 1000  # what a session sees as its user and group
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_INODES = 20_000


class Confinement(NamedTuple):
    """One session's bounds. `outer_id` is its user and group outside (0: it keeps the fork server's)."""

    outer_id: int
    memory_mb: int
    tmp_mb: int
    processes: int
    files: int
    cpu_seconds: int
    seccomp: bytes
    cgroups: tuple[int, ...]  # open directories of its control groups


class Stage(Exception):
    """Confinement failed at a stage: nothing foreign has run."""


def confine_session(bounds: Confinement) -> None:
    """No way back from here: own namespaces, nobody's user, no capability, limits, a filter of system calls.

    Raises `Stage` naming what failed.
    """
    _stages(
        bounds,
        ("control group", _join_cgroups),
        ("namespaces", _own_namespaces),
        ("mounts", _own_mounts),
        ("network", _loopback),
        ("user", _become_nobody),
        ("limits", _limit),
        ("filter", _filter),
    )


def confine_job(bounds: Confinement) -> None:
    """The same for a program of ours that confines others in turn: it may only change user ids and kill."""
    _stages(
        bounds,
        ("control group", _join_cgroups),
        ("namespaces", _own_namespaces),
        ("mounts", _own_mounts),
        ("network", _loopback),
        ("user", lambda _: kernel.keep_capabilities(kernel.CAP_KILL, kernel.CAP_SETGID, kernel.CAP_SETUID)),
        ("filter", _filter),
    )


def _stages(bounds: Confinement, *stages: tuple[str, Callable[[Confinement], None]]) -> None:
    for name, action in stages:
        try:
            action(bounds)
        except OSError as error:
            raise Stage(f"{name}: {error}") from error


def _join_cgroups(bounds: Confinement) -> None:
    for directory in bounds.cgroups:
        descriptor = os.open("cgroup.procs", os.O_WRONLY, dir_fd=directory)
        os.write(descriptor, b"0")
        os.close(descriptor)
        os.close(directory)


def _own_namespaces(bounds: Confinement) -> None:
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    socket.sethostname("session")


def _own_mounts(bounds: Confinement) -> None:
    options = f"mode=0700,size={bounds.tmp_mb}m,nr_inodes={_INODES},uid={bounds.outer_id},gid={bounds.outer_id}"
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, "subset=pid")
    _write("/proc/self/oom_score_adj", "1000")
    os.chdir("/tmp")


def _loopback(bounds: Confinement) -> None:
    with socket.socket() as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def _become_nobody(bounds: Confinement) -> None:
    outer = bounds.outer_id
    if outer:
        os.setgroups([])
        os.setresgid(outer, outer, outer)
        os.setresuid(outer, outer, outer)
        kernel.set_dumpable()
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.set_dumpable()
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{INNER_ID} {outer} 1")
    _write("/proc/self/gid_map", f"{INNER_ID} {outer} 1")
    kernel.keep_capabilities()
    kernel.set_dumpable()


def _limit(bounds: Confinement) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, bounds.memory_mb << 20),
        (resource.RLIMIT_NPROC, bounds.processes),
        (resource.RLIMIT_NOFILE, bounds.files),
        (resource.RLIMIT_FSIZE, bounds.tmp_mb << 20),
        (resource.RLIMIT_CPU, bounds.cpu_seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 1 << 20),
        (resource.RLIMIT_SIGPENDING, 256),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _filter(bounds: Confinement) -> None:
    kernel.no_new_privileges()
    kernel.install_filter(bounds.seccomp)


def plain_signals() -> None:
    """Signals as a fresh interpreter has them."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def close_others(*kept: int) -> None:
    """Close every descriptor above 2 but `kept`."""
    low = 3
    for descriptor in sorted(kept):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def null_standards() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if null > 2:
        os.close(null)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
