"""The process behind one lazy file: `python -m sandyard.store.blobs.lazy.serving`, its order on standard input.

It ends when the file is whole and nobody has it open over FUSE any more, when its layer was removed, or when it is
told to. Killed at any point it leaves a link to nothing and what it had fetched, which the next one checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

from sandyard.config import BlobSettings
from sandyard.errors import SandyardError
from sandyard.runtimes.durable import sync
from sandyard.runtimes.finishing import ended
from sandyard.store.blobs import BlobError, open_blobs
from sandyard.store.blobs.lazy.filling import Filling
from sandyard.store.blobs.lazy.fuse import FileServer, detach, mount
from sandyard.store.blobs.lazy.order import BUSY, HELD, READY, Order, Word

_WATCH_SECONDS = 1.0
_AGAIN_SECONDS = 10.0
_LAST_SECONDS = 5.0  # for those that still have it open when it is told to end


class Serving:
    def __init__(self, order: Order, word: Word) -> None:
        settings = BlobSettings.model_validate(order.blobs)
        blobs = open_blobs(settings)
        assert blobs is not None
        self._order = order
        self._word = word
        self._told: str | None = None
        concurrency = settings.concurrency
        self._filling = Filling(order.part, order.size, order.chunks, blobs, concurrency, lambda: _say(BUSY))
        order.mount.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        detach(order.mount)  # first: below what a killed process left is the file
        order.mount.touch(mode=0o400)
        self._server = FileServer(mount(order.mount), order.size, self._filling.runs(), self._read)

    async def run(self) -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        serving = asyncio.create_task(self._server.serve())
        others = [asyncio.create_task(each) for each in (self._fill(), self._watch(), stopped.wait())]
        try:
            if not self._order.linked:
                self._order.layer.symlink_to(self._order.mount)
            _say(READY)
            await asyncio.wait([serving, *others[1:]], return_when=asyncio.FIRST_COMPLETED)
            detach(self._order.mount)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS if stopped.is_set() else None):
                    await asyncio.wait([serving, others[2]], return_when=asyncio.FIRST_COMPLETED)
        finally:
            detach(self._order.mount)
            for task in (serving, *others):
                task.cancel()
            await asyncio.gather(serving, *others, return_exceptions=True)
            await self._filling.close()
            self._order.mount.unlink(missing_ok=True)

    async def _read(self, offset: int, count: int) -> bytes:
        try:
            return await self._filling.read(offset, count)
        except (SandyardError, OSError) as error:
            self._tell(error)
            raise

    async def _fill(self) -> None:
        while True:
            try:
                await self._filling.fill()
                await ended(self._filling.finish)
            except (BlobError, OSError) as error:  # what can be read is read meanwhile
                self._tell(error)
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            if self._order.linked:
                os.replace(self._order.part, self._order.layer)
                sync(self._order.layer.parent)
            return

    async def _watch(self) -> None:
        """Until the layer is whole, or removed."""
        while self._order.linked:  # noqa: ASYNC110 - nobody tells when a name is removed
            await asyncio.sleep(_WATCH_SECONDS)
        self._order.part.unlink(missing_ok=True)

    def _tell(self, error: Exception) -> None:
        if str(error) != self._told:
            self._told = str(error)
            self._word.tell(self._told)


def _say(word: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(word, flush=True)


def main() -> None:
    order = Order.parse(sys.stdin.read())
    order.mount.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    word = Word(order.mount)
    if not word.take():
        _say(HELD)
        return
    try:
        asyncio.run(Serving(order, word).run())
    finally:
        word.drop()


if __name__ == "__main__":
    main()
