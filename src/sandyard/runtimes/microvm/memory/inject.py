"""Put mappings of files into the memory of a process that stands by.

QEMU opens the file of a guest's RAM for writing whatever it is to do with it, and a VMM must not be able to write
what its siblings read. So it starts with memory of its own, and what it inherited open for reading is mapped over
that from outside, privately: by system calls that its main thread is made to do (ptrace(2), x86-64).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from sandyard.errors import SandboxError

_SEIZE, _INTERRUPT, _DETACH, _GETREGS, _SETREGS, _SINGLESTEP = 0x4206, 0x4207, 17, 12, 13, 9
_WALL = 0x40000000  # __WALL of waitpid(2)
_SYSCALL = b"\x0f\x05"
_NR_CLOSE, _NR_MMAP, _NR_PRCTL = 3, 9, 157
_SET_THP_DISABLE = 41
_READ_WRITE, _PRIVATE, _FIXED, _ANONYMOUS = 3, 2, 0x10, 0x20
_PATIENCE = 10.0
_ERRNO_MAX = 4095
_Registers = ctypes.c_ulonglong * 27
# Places in `struct user_regs_struct`.
_R10, _R9, _R8, _RAX, _RDX, _RSI, _RDI, _ORIG_RAX, _RIP = 7, 8, 9, 10, 12, 13, 14, 15, 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


@dataclass(frozen=True, slots=True)
class Mapping:
    """`length` bytes at address `at`: those of `descriptor` (a number in that process) from `offset`; zeros
    where there is none. All are multiples of the page size."""

    at: int
    length: int
    descriptor: int | None = None
    offset: int = 0


def map_over(pid: int, mappings: Sequence[Mapping], done_with: Sequence[int]) -> None:
    """Map privately, writable, over what the process has there; then close the descriptors `done_with` in it. It gets
    no huge pages from then on: one byte that is written is to cost one page.

    Blocking, the process stands still meanwhile. Raises `SandboxError`: then it is not to be used any more."""
    try:
        with _stopped(pid) as registers:
            instruction = _find_instruction(pid)
            _call(pid, registers, instruction, _NR_PRCTL, (_SET_THP_DISABLE, 1, 0, 0, 0, 0))
            for each in mappings:
                flags = _PRIVATE | _FIXED | (_ANONYMOUS if each.descriptor is None else 0)
                descriptor = -1 if each.descriptor is None else each.descriptor
                arguments = (each.at, each.length, _READ_WRITE, flags, descriptor, each.offset)
                got = _call(pid, registers, instruction, _NR_MMAP, arguments)
                if got != each.at:
                    raise SandboxError(f"memory of process {pid} could not be mapped: {_error(got)}")
            for descriptor in done_with:
                _call(pid, registers, instruction, _NR_CLOSE, (descriptor, 0, 0, 0, 0, 0))
    except OSError as error:
        raise SandboxError(
            f"memory of process {pid} cannot be mapped from outside: {error}",
            remedy="allow ptrace (kernel.yama.ptrace_scope below 3, CAP_SYS_PTRACE)",
        ) from error


@contextmanager
def _stopped(pid: int) -> Iterator[ctypes.Array[ctypes.c_ulonglong]]:
    """Its main thread, held still; the registers it had, which it has again afterwards."""
    _ptrace(_SEIZE, pid, 0)
    missed: list[int] = []
    try:
        _ptrace(_INTERRUPT, pid, 0)
        _wait(pid, missed, first=True)
        registers = _Registers()
        _ptrace(_GETREGS, pid, ctypes.addressof(registers))
        try:
            yield registers
        finally:
            with suppress(OSError):  # it is gone: nothing is to be restored
                _ptrace(_SETREGS, pid, ctypes.addressof(registers))
    finally:
        with suppress(OSError):
            _ptrace(_DETACH, pid, 0)
        for number in missed:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _call(
    pid: int, registers: ctypes.Array[ctypes.c_ulonglong], instruction: int, number: int, arguments: Sequence[int]
) -> int:
    """Let it do one system call; what that returned."""
    ours = _Registers(*registers)
    for place, value in zip((_RDI, _RSI, _RDX, _R10, _R8, _R9), arguments, strict=True):
        ours[place] = value & 0xFFFFFFFFFFFFFFFF
    ours[_RAX], ours[_ORIG_RAX], ours[_RIP] = number, 0xFFFFFFFFFFFFFFFF, instruction
    _ptrace(_SETREGS, pid, ctypes.addressof(ours))
    missed: list[int] = []
    _ptrace(_SINGLESTEP, pid, 0)
    _wait(pid, missed)
    _ptrace(_GETREGS, pid, ctypes.addressof(ours))
    for each in missed:
        os.kill(pid, each)
    return int(ours[_RAX])


def _wait(pid: int, missed: list[int], *, first: bool = False) -> None:
    """Wait for its next stop. A signal that came instead is noted, to be sent again."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        done, status = os.waitpid(pid, _WALL | (os.WNOHANG if first else 0))
        if done == 0:
            if time.monotonic() > deadline:
                raise OSError(f"it did not stop within {_PATIENCE:g} s")
            time.sleep(0.0002)
            continue
        if not os.WIFSTOPPED(status):
            raise OSError("it ended")
        if os.WSTOPSIG(status) == signal.SIGTRAP:
            return
        missed.append(os.WSTOPSIG(status))
        _ptrace(_INTERRUPT if first else _SINGLESTEP, pid, 0)
        if first:
            return


def _find_instruction(pid: int) -> int:
    """Where the process has a `syscall` instruction: the kernel's own page in it has some."""
    with open(f"/proc/{pid}/maps") as maps:
        line = next((line for line in maps if line.rstrip().endswith("[vdso]")), None)
    if line is None:
        raise OSError("it has no vdso")
    begin, end = (int(part, 16) for part in line.split()[0].split("-"))
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        at = os.pread(memory.fileno(), end - begin, begin).find(_SYSCALL)
    if at < 0:
        raise OSError("its vdso has no system call")
    return begin + at


def _error(returned: int) -> str:
    code = (1 << 64) - returned
    return os.strerror(code) if 0 < code <= _ERRNO_MAX else f"{returned:#x} came back"


def _ptrace(request: int, pid: int, data: int) -> None:
    if _libc.ptrace(request, pid, None, data) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace: {os.strerror(code)}")
