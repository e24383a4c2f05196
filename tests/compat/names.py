"""A name server for one domain, whose every name is this host; and a command that sees no other name server.

The host's own resolver stays as it is: the command runs in a mount namespace of its own, over whose
`/etc/resolv.conf` another file is mounted.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_HEADER = struct.Struct(">6H")
_A, _ANY_CLASS_IN = 1, 1
_ANSWERED, _NO_SUCH_NAME = 0x8580, 0x8583
ADDRESS = "127.0.0.1"


def answer(query: bytes, domain: str) -> bytes:
    """The reply to one DNS query (RFC 1035): `ADDRESS` for `domain` and all below it, else no such name.

    Raises `ValueError` for what is no query with one question.
    """
    if len(query) < _HEADER.size:
        raise ValueError("shorter than a header")
    number, _flags, questions, *_rest = _HEADER.unpack_from(query)
    if questions != 1:
        raise ValueError(f"{questions} questions")
    labels, at = [], _HEADER.size
    while at < len(query) and (length := query[at]):
        labels.append(query[at + 1 : at + 1 + length].decode("ascii", "replace").lower())
        at += 1 + length
    end = at + 5
    if end > len(query):
        raise ValueError("the question is cut off")
    kind, family = struct.unpack_from(">2H", query, at + 1)
    name = ".".join(labels)
    if name != domain and not name.endswith(f".{domain}"):
        return _HEADER.pack(number, _NO_SUCH_NAME, 1, 0, 0, 0) + query[_HEADER.size : end]
    records = b""
    if (kind, family) == (_A, _ANY_CLASS_IN):
        records = struct.pack(">HHHIH4s", 0xC000 | _HEADER.size, _A, 1, 5, 4, socket.inet_aton(ADDRESS))
    return _HEADER.pack(number, _ANSWERED, 1, int(bool(records)), 0, 0) + query[_HEADER.size : end] + records


@contextmanager
def name_server(domain: str) -> Iterator[str]:
    """Yields the loopback address at whose port 53 names below `domain` are answered."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        address = _bind(channel)
        thread = threading.Thread(target=_serve, args=(channel, domain), daemon=True)
        thread.start()
        try:
            yield address
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", (address, 53))  # an empty datagram ends it
            thread.join()


def with_names(command: Sequence[str], address: str, folder: Path) -> list[str]:
    """`command`, to be run where names are asked of `address` alone."""
    conf = folder / "resolv.conf"
    conf.write_text(f"nameserver {address}\noptions timeout:1 attempts:1\n")
    script = 'mount --bind "$0" "$(readlink -f /etc/resolv.conf)" && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(conf), *command]


def _bind(channel: socket.socket) -> str:
    for last in range(2, 255):  # loopback addresses of which another run may hold some
        address = f"127.53.0.{last}"
        try:
            channel.bind((address, 53))
        except OSError as error:
            refused = error
            continue
        return address
    raise refused


def _serve(channel: socket.socket, domain: str) -> None:
    while True:
        query, client = channel.recvfrom(4096)
        if not query:
            return
        try:
            channel.sendto(answer(query, domain), client)
        except ValueError:
            continue  # no query: there is nobody to tell
