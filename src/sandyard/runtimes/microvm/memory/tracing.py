"""Have another process map files over what it has in memory: by system calls that its main thread is made to do
(ptrace(2), x86-64).

Of the standard library alone, and run as a program too: `inject.Mapper` starts it. What is killed in the middle of this
leaves the other one with registers that are not its own, and that is its end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

_SEIZE, _INTERRUPT, _DETACH, _GETREGS, _SETREGS, _SINGLESTEP = 0x4206, 0x4207, 17, 12, 13, 9
_WALL = 0x40000000  # __WALL of waitpid(2)
_SYSCALL = b"\x0f\x05"
_NR_CLOSE, _NR_MMAP, _NR_PRCTL = 3, 9, 157
_SET_THP_DISABLE = 41
_READ_WRITE, _PRIVATE, _FIXED, _ANONYMOUS = 3, 2, 0x10, 0x20
_PATIENCE = 10.0
_ERRNO_MAX = 4095
_WHOSE, _ONE = struct.Struct("<qq"), struct.Struct("<QQqQ")
_Registers = ctypes.c_ulonglong * 27
# Places in `struct user_regs_struct`.
_R10, _R9, _R8, _RAX, _RDX, _RSI, _RDI, _ORIG_RAX, _RIP = 7, 8, 9, 10, 12, 13, 14, 15, 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Mapping(NamedTuple):
    """`length` bytes at address `at`: those of `descriptor` (a number in that process) from `offset`; zeros
    where there is none. All are multiples of the page size."""

    at: int
    length: int
    descriptor: int | None = None
    offset: int = 0


def map_over(pid: int, mappings: Sequence[Mapping], done_with: Sequence[int]) -> None:
    """Map privately, writable, over what the process has there; then close the descriptors `done_with` in it. It gets
    no huge pages from then on: one byte that is written is to cost one page.

    Blocking, the process stands still meanwhile. Raises `OSError`: then it is not to be used any more."""
    with _stopped(pid) as registers:
        instruction = _find_instruction(pid)
        _call(pid, registers, instruction, _NR_PRCTL, (_SET_THP_DISABLE, 1, 0, 0, 0, 0))
        for each in mappings:
            flags = _PRIVATE | _FIXED | (_ANONYMOUS if each.descriptor is None else 0)
            descriptor = -1 if each.descriptor is None else each.descriptor
            arguments = (each.at, each.length, _READ_WRITE, flags, descriptor, each.offset)
            got = _call(pid, registers, instruction, _NR_MMAP, arguments)
            if got != each.at:
                raise OSError(f"a mapping failed: {_error(got)}")
        for descriptor in done_with:
            _call(pid, registers, instruction, _NR_CLOSE, (descriptor, 0, 0, 0, 0, 0))


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


def packed(pid: int, mappings: Sequence[Mapping]) -> bytes:
    """What the program reads: whose memory, how many mappings, and these."""
    parts = [_WHOSE.pack(pid, len(mappings))]
    for each in mappings:
        descriptor = -1 if each.descriptor is None else each.descriptor
        parts.append(_ONE.pack(each.at, each.length, descriptor, each.offset))
    return b"".join(parts)


def main() -> None:
    """Nothing is done where not all of it came."""
    said = sys.stdin.buffer.read()
    if len(said) < _WHOSE.size:
        return
    pid, count = _WHOSE.unpack_from(said)
    if len(said) != _WHOSE.size + count * _ONE.size:
        return
    mappings = [
        Mapping(at, length, None if descriptor < 0 else descriptor, offset)
        for at, length, descriptor, offset in _ONE.iter_unpack(said[_WHOSE.size :])
    ]
    try:
        map_over(pid, mappings, ())
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
