"""The few parts of DNS messages (RFC 1035) that a forwarder with rules needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address

MAX_MESSAGE = 65535
_HEADER = 12
_RESPONSE = 0x8000
_OPCODE = 0x7800
_RECURSION = 0x0100
_AVAILABLE = 0x0080
_TRUNCATED = 0x0200


class Kind(IntEnum):
    A = 1
    PTR = 12
    AAAA = 28
    SVCB = 64
    HTTPS = 65


class Code(IntEnum):
    OK = 0
    FORMAT = 1
    FAILED = 2
    NO_NAME = 3
    REFUSED = 5


@dataclass(frozen=True, slots=True)
class Question:
    name: str  # lower case, without the final dot
    kind: int
    end: int  # where it ends in its message


def question(message: bytes) -> Question:
    """The one question of a message. Raises `ValueError` where it is not one standard question."""
    if len(message) < _HEADER or int.from_bytes(message[2:4]) & _OPCODE or message[4:6] != b"\0\1":
        raise ValueError("not one standard question")
    name, at = _name(message, _HEADER)
    if at + 4 > len(message) or message[at + 2 : at + 4] != b"\0\1":
        raise ValueError("the question is cut, or not of class IN")
    return Question(name, int.from_bytes(message[at : at + 2]), at + 4)


def is_query(message: bytes) -> bool:
    return len(message) >= _HEADER and not message[2] & 0x80


def query(name: str, identity: int) -> bytes:
    """A recursive query for the addresses of `name`. Raises `ValueError` for what is no name."""
    labels = [label.encode("ascii") for label in name.split(".")]
    if not all(0 < len(label) < 64 for label in labels):
        raise ValueError(f"'{name}' is not a host name")
    head = identity.to_bytes(2) + _RECURSION.to_bytes(2) + b"\0\1" + bytes(6)
    encoded = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return head + encoded + int(Kind.A).to_bytes(2) + b"\0\1"


def reply(message: bytes, asked: Question, code: Code) -> bytes:
    """An answer without records."""
    flags = _RESPONSE | _AVAILABLE | (int.from_bytes(message[2:4]) & _RECURSION) | code
    return message[:2] + flags.to_bytes(2) + b"\0\1" + bytes(6) + message[_HEADER : asked.end]


def answers(message: bytes, asked: Question, identity: int) -> bool:
    """Whether `message` is the response to the question asked under this identity."""
    try:
        same = question(message)
    except ValueError:
        return False
    return (
        not is_query(message)
        and message[:2] == identity.to_bytes(2)
        and (same.name, same.kind)
        == (
            asked.name,
            asked.kind,
        )
    )


def truncated(message: bytes) -> bool:
    return bool(int.from_bytes(message[2:4]) & _TRUNCATED)


def addresses(message: bytes) -> list[IPv4Address]:
    """Every IPv4 address of the answer section. Raises `ValueError` where it is broken."""
    at = question(message).end
    found = []
    for _ in range(int.from_bytes(message[6:8])):
        _, at = _name(message, at)
        if at + 10 > len(message):
            raise ValueError("a record is cut")
        kind, size = int.from_bytes(message[at : at + 2]), int.from_bytes(message[at + 8 : at + 10])
        data = message[at + 10 : at + 10 + size]
        at += 10 + size
        if kind == Kind.A and len(data) == 4:
            found.append(IPv4Address(data))
    return found


def _name(message: bytes, at: int) -> tuple[str, int]:
    """The name at `at`, and where it ends. Raises `ValueError`."""
    labels: list[str] = []
    end = None
    for _ in range(256):  # a pointer may form a loop
        if at >= len(message):
            break
        size = message[at]
        if size >= 0xC0:
            end = at + 2 if end is None else end
            at = int.from_bytes(message[at : at + 2]) & 0x3FFF
        elif size == 0:
            return ".".join(labels).lower(), at + 1 if end is None else end
        elif size < 64:
            labels.append(message[at + 1 : at + 1 + size].decode("latin-1"))
            at += 1 + size
        else:
            break
    raise ValueError("a name is broken")
