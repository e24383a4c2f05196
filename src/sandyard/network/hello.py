"""Which host a client asks for, read from the first bytes it sends: TLS SNI or HTTP Host."""

from __future__ import annotations

import re

from sandyard.network.policy import canonical_domain

LIMIT = 64 * 1024  # bytes within which the name must have come

_HANDSHAKE = 0x16
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_METHOD = re.compile(rb"[A-Z]{1,20} ")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")


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
    hello = _Reader(_handshake(data))
    if hello.number(1) != _CLIENT_HELLO:
        return None
    body = hello.block(3)
    try:
        return _name_of(body)
    except Incomplete:  # all of it is here: its lengths lie
        return None


def _handshake(data: bytes) -> bytes:
    """The payload of the leading handshake records, which may cut a message anywhere."""
    payload = b""
    while len(data) >= 5 and data[0] == _HANDSHAKE and data[1] == 3:
        size = int.from_bytes(data[3:5])
        payload += data[5 : 5 + size]
        data = data[5 + size :]
    return payload


def _name_of(body: _Reader) -> str | None:
    body.take(2 + 32)  # version, random
    for size in (1, 2, 1):  # session id, cipher suites, compression methods
        body.block(size)
    extensions = body.block(2) if body else body
    while extensions:
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
    hosts = []
    for line in head.split(b"\r\n")[1:]:
        header = _HEADER.fullmatch(line)
        if header is None:
            return None  # folded or broken: servers differ in how they read it
        if header[1].lower() == b"host":
            hosts.append(header[2].decode("ascii", "replace"))
    return re.sub(r":\d*$", "", hosts[0]) if len(hosts) == 1 else None
