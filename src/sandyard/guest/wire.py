"""Numbers and fields of the agent's wire protocol; `guest/PROTOCOL.md` is its text."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from enum import IntEnum

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode

VERSION = 1
"""Also of agents in memory that was kept: see `guest/PROTOCOL.md` for when it is to be raised."""
MAGIC = b"SYAG"
HEADER = struct.Struct("<IBBHI")
PAYLOAD_MAX = 65536
REQUEST_MAX = 3 << 20
CREDIT_MAX = 1 << 30
WINDOW_PROCESS = 128 << 10
WINDOW_FILE = 1 << 20
WINDOW_OTHER = 256 << 10
FIN = 1
MORE = 2
STDIN, STDOUT, STDERR = 0, 1, 2


class Frame(IntEnum):
    HELLO = 1
    OPEN = 2
    DATA = 3
    CREDIT = 4
    EOF = 5
    RESULT = 6
    EXIT = 7
    RESET = 8


class Op(IntEnum):
    PING = 1
    SPAWN = 2
    PROCESSES = 3
    ATTACH = 4
    SIGNAL = 5
    RESIZE = 6
    USER = 7
    STAT = 8
    LIST = 9
    MKDIR = 10
    MOVE = 11
    REMOVE = 12
    READ = 13
    WRITE = 14
    CONNECT = 15
    WATCH = 16
    IDENTIFY = 17
    STORE = 18
    FREEZE = 19
    USE = 20
    CONFIGURE = 21


CODES: dict[int, GuestErrorCode] = dict(enumerate(GuestErrorCode, start=1))

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def u8(value: int) -> bytes:
    return bytes((value,))


def u16(value: int) -> bytes:
    return _U16.pack(value)


def u32(value: int) -> bytes:
    return _U32.pack(value)


def u64(value: int) -> bytes:
    return _U64.pack(value)


def text(value: str) -> bytes:
    """A string for the agent. `GuestError(INVALID)` if no system call could take it (a NUL inside)."""
    try:
        data = os.fsencode(value)
    except UnicodeEncodeError as error:
        raise GuestError(GuestErrorCode.INVALID, f"{value!r} cannot be encoded: {error}") from error
    if b"\0" in data:
        raise GuestError(GuestErrorCode.INVALID, f"{value!r} has a null byte in it")
    return b"%s%s\0" % (_U32.pack(len(data)), data)


def texts(values: Iterable[str]) -> bytes:
    encoded = [text(value) for value in values]
    return _U32.pack(len(encoded)) + b"".join(encoded)


def blob(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


class ShortRead(AgentLinkError):
    """A payload ended within a field: the agent lied about the shape, or more of it is on the way."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the agent's answer of {size} bytes is too short")


class Reader:
    """Fields of a payload. Anything short is `ShortRead`."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return self._at < len(self._data)

    @property
    def at(self) -> int:
        """How many bytes were read."""
        return self._at

    def _int(self, shape: struct.Struct) -> int:
        try:
            value: int = shape.unpack_from(self._data, self._at)[0]
        except struct.error as error:
            raise ShortRead(len(self._data)) from error
        self._at += shape.size
        return value

    def u8(self) -> int:
        if self._at >= len(self._data):
            raise ShortRead(len(self._data))
        self._at += 1
        return self._data[self._at - 1]

    def u16(self) -> int:
        return self._int(_U16)

    def u32(self) -> int:
        return self._int(_U32)

    def u64(self) -> int:
        return self._int(_U64)

    def raw(self, size: int) -> bytes:
        data = self._data[self._at : self._at + size]
        if len(data) != size:
            raise ShortRead(len(self._data))
        self._at += size
        return data

    def text(self) -> str:
        return os.fsdecode(self.raw(self.u32()))

    def sent_text(self) -> str:
        """A text of our own that the agent gives back, with the NUL that goes to the agent."""
        value = self.text()
        self.u8()
        return value

    def sent_texts(self) -> list[str]:
        # Each takes at least five bytes, so a lie about the count ends at the end of the payload.
        return [self.sent_text() for _ in range(self.u32())]
