"""Which host a client asks for, read from the first bytes it sends: TLS SNI or HTTP Host."""

from __future__ import annotations

import re

from sandyard.network.policy import canonical_domain

LIMIT = 64 * 1024  # bytes within which the name must have come
# Far more than clients send. All sandboxes wait while one name is read, so the work has bounds beside the bytes.
MAX_RECORDS = 64
MAX_EXTENSIONS = 256
MAX_HEADERS = 256

_HANDSHAKE = 0x16
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_METHOD = re.compile(rb"[A-Z]{1,20} ")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BREAKS = re.compile(rb"[\r\n\0]")


class Incomplete(Exception):
    """The name has not come yet; more bytes may bring it."""


def requested_host(data: bytes) -> str | None:
    """The host in canonical form; None where there is none, or more than one.

    Raises `Incomplete` while `data`, all that the client sent so far, may go on to name one."""
    if not data:
        raise Incomplete
    name = _server_name(data) if data[0] == _HANDSHAKE else _host_header(data)
    return canonical_domain(name) if name is not None else None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        """Raises `Incomplete` where there is less."""
        end = self._at + count
        if end > len(self._data):
            raise Incomplete
        part, self._at = self._data[self._at : end], end
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def block(self, size: int) -> _Reader:
        """What a length of `size` bytes announces."""
        return _Reader(self.take(self.number(size)))

    def __len__(self) -> int:
        return len(self._data) - self._at


def _server_name(data: bytes) -> str | None:
    payload, more = _handshake(data)
    hello = _Reader(payload)
    try:
        if hello.number(1) != _CLIENT_HELLO:
            return None
        body = hello.block(3)
    except Incomplete:
        if more:
            raise
        return None
    try:
        return _name_of(body)
    except Incomplete:  # all of it is here: its lengths lie
        return None


def _handshake(data: bytes) -> tuple[bytes, bool]:
    """The payload of the leading handshake records, which may cut a message anywhere; and whether more of it may
    come. Records without content are none (RFC 8446, 5.1), and what takes too many is not from a client."""
    parts: list[bytes] = []
    at = 0
    while len(data) - at >= 5:
        size = int.from_bytes(data[at + 3 : at + 5])
        if data[at] != _HANDSHAKE or data[at + 1] != 3 or size == 0 or len(parts) == MAX_RECORDS:
            return b"".join(parts), False
        parts.append(data[at + 5 : at + 5 + size])
        at += 5 + size
    return b"".join(parts), True


def _name_of(body: _Reader) -> str | None:
    body.take(2 + 32)  # version, random
    for size in (1, 2, 1):  # session id, cipher suites, compression methods
        body.block(size)
    extensions = body.block(2) if body else body
    for _ in range(MAX_EXTENSIONS):
        if not extensions:
            break
        kind, content = extensions.number(2), extensions.block(2)
        if kind == _SERVER_NAME:
            names = content.block(2)
            kind, name = names.number(1), names.block(2)
            text = name.take(len(name))
            return text.decode("ascii", "replace") if kind == 0 and not names else None
    return None


def _host_header(data: bytes) -> str | None:
    if not _METHOD.match(data):
        if len(data) <= 20 and data.isalpha() and data.isupper():
            raise Incomplete
        return None
    head, end, _ = data.partition(b"\r\n\r\n")
    if not end:
        raise Incomplete
    lines = head.split(b"\r\n")[1:]
    if len(lines) > MAX_HEADERS:
        return None
    hosts = []
    for line in lines:
        field, colon, value = line.partition(b":")
        if not colon or not _FIELD.fullmatch(field) or _BREAKS.search(value):
            return None  # folded or broken: servers differ in how they read it
        if field.lower() == b"host":
            hosts.append(value.strip(b" \t").decode("ascii", "replace"))
    return re.sub(r":\d*$", "", hosts[0]) if len(hosts) == 1 else None
