"""System calls that Python has no function for. Every one raises `OSError` saying which call failed."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7

_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _call("unshare", _libc.unshare(flags))


def join_namespace(descriptor: int) -> None:
    _call("setns", _libc.setns(descriptor, 0))


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _call(f"mount {kind or source} at {target}", result)


def restrict_mount(target: str, attributes: int) -> None:
    """Add `attributes` to the mount at `target` and all below it (Linux 5.12)."""
    arguments = ctypes.create_string_buffer(struct.pack("@QQQQ", attributes, 0, 0, 0))
    size = ctypes.c_size_t(32)
    result = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, arguments, size)
    _call(f"mount_setattr {target}", result)


def pivot_root(new: str) -> None:
    """Make `new`, a mount, the root; the old root is gone from this namespace."""
    os.chdir(new)
    _call("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT[platform.machine()], b".", b"."))
    _call("umount of the old root", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def die_with_parent(signal_number: int) -> None:
    _call("prctl PR_SET_PDEATHSIG", _libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0))


def set_dumpable() -> None:
    """Make this process own its entries in /proc again, which changing the user id took away."""
    _call("prctl PR_SET_DUMPABLE", _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))


def no_new_privileges() -> None:
    _call("prctl PR_SET_NO_NEW_PRIVS", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def keep_capabilities(*kept: int) -> None:
    """Give up every capability but `kept`, for good."""
    last = int(_read("/proc/sys/kernel/cap_last_cap") or 40)
    for number in range(last + 1):
        if number not in kept:
            # What this process may not drop it does not have either (no CAP_SETPCAP).
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    mask = sum(1 << number for number in kept)
    header = ctypes.create_string_buffer(struct.pack("@Ii", _CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(struct.pack("@IIIIII", mask, mask, 0, 0, 0, 0))
    _call("capset", _libc.capset(header, data))


def install_filter(program: bytes) -> None:
    """Install a seccomp filter: `program` is an array of `struct sock_filter`."""
    code = ctypes.create_string_buffer(program, len(program))
    descriptor = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    result = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(descriptor), 0, 0)
    _call("prctl PR_SET_SECCOMP", result)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""  # not in this root: the caller has a number that is high enough
