"""Frames of JSON over a socket: four bytes of length, then the text."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

from sandyard.verify.runner.values import Malformed

MAX_FRAME = 16 << 20


class Closed(Exception):
    """The other side is gone."""


class Link:
    """One end. `receive` is bounded; a frame that is too long or no JSON is `Malformed`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        data = memoryview(struct.pack(">I", len(body)) + body)
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self) -> Any:
        (length,) = struct.unpack(">I", self._exactly(4))
        if length > MAX_FRAME:
            raise Malformed(f"an answer of {length} bytes, more than {MAX_FRAME}")
        try:
            return json.loads(self._exactly(length))
        except (ValueError, RecursionError) as error:
            raise Malformed(f"not JSON: {error}") from error

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                chunk = os.read(self.descriptor, min(length - len(data), 1 << 20))
            except OSError as error:
                raise Closed(str(error)) from error
            if not chunk:
                raise Closed("end of file")
            data += chunk
        return bytes(data)
