"""Taking everything from a process before foreign code runs in it."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Collection
from typing import NamedTuple

_PR_SET_NO_NEW_PRIVS = 38
_PROCESSES = 32
_FILE_BYTES = 8 << 20
_DESCRIPTORS = 256


class Limits(NamedTuple):
    memory_mb: int
    cpu_seconds: int


def no_new_privileges() -> None:
    """From here on no program that this process or its children start gains privileges (sudo is dead)."""
    if "NoNewPrivs:\t1" in _status():
        return
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise SystemExit("prctl(PR_SET_NO_NEW_PRIVS) failed")


def confine(limits: Limits, uid: int, keep: Collection[int]) -> None:
    """Own session, /dev/null on 0-2, only `keep` open, limits, and the user id `uid` unless it is 0.

    A process that changed its user id is not dumpable: no other can read or trace it.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    _close_others(keep)
    _first_to_go_when_memory_ends()
    memory = limits.memory_mb << 20
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _DESCRIPTORS),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    # A second between the signal that says so (SIGXCPU) and the kill.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    os.chdir("/")
    if uid:
        resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESSES, _PROCESSES))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def _close_others(keep: Collection[int]) -> None:
    low = 3
    for descriptor in sorted(keep):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def _first_to_go_when_memory_ends() -> None:
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def _status() -> str:
    with open("/proc/self/status") as status:
        return status.read()
