"""The output of one run: two pipes, read as it comes, of which a bounded head is kept."""

from __future__ import annotations

import asyncio
import codecs
import os
from types import TracebackType
from typing import Self

from sandyard.envs.output import OutputTap, StreamTap

_CHUNK = 64 << 10
_LAST = 1 << 20  # bytes read at most after the end: threads that stay may print for ever


class OutputPump:
    """`writers` are for the program: descriptors of its standard output and error."""

    def __init__(self, limit: int) -> None:
        self.tap = OutputTap(limit)
        self._loop = asyncio.get_running_loop()
        self._readers: dict[int, tuple[StreamTap, codecs.IncrementalDecoder]] = {}
        self.writers: list[int] = []

    def __enter__(self) -> Self:
        try:
            for stream in (self.tap.stdout, self.tap.stderr):
                reader, writer = os.pipe()
                self.writers.append(writer)
                self._readers[reader] = (stream, codecs.getincrementaldecoder("utf-8")("replace"))
                os.set_blocking(reader, False)
                self._loop.add_reader(reader, self._read, reader)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def close_writers(self) -> None:
        """The program has them."""
        while self.writers:
            os.close(self.writers.pop())

    def drain(self) -> None:
        """Read what is there already."""
        for reader in list(self._readers):
            left = _LAST
            while left > 0 and (got := self._read(reader)):
                left -= got

    def _read(self, reader: int) -> int:
        stream, decoder = self._readers[reader]
        try:
            data = os.read(reader, _CHUNK)
        except BlockingIOError:
            return 0
        stream.add(decoder.decode(data, final=not data))
        if not data:
            self._loop.remove_reader(reader)
            del self._readers[reader]
            os.close(reader)
        return len(data)

    def _close(self) -> None:
        self.close_writers()
        while self._readers:
            reader, _ = self._readers.popitem()
            self._loop.remove_reader(reader)
            os.close(reader)
