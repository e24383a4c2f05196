"""Frames between an interpreter and its worker: four bytes of length, then JSON."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

HEADER = struct.Struct(">I")


def encode(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def read(stream: BinaryIO) -> Any:
    """The next message, or None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    return json.loads(stream.read(length))
