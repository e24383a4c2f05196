"""A file that fills up: it is closed only when nobody writes to it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from sandyard.runtimes.finishing import ended
from sandyard.store.blobs.chunks import chunk_key, digest_of, encode
from sandyard.store.blobs.lazy.filling import Filling
from sandyard.store.blobs.memory import MemoryBlobs


async def test_closing_waits_for_who_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, data = MemoryBlobs(), os.urandom(10_000)
    await blobs.put(chunk_key(digest_of(data)), encode(data))
    filling = Filling(tmp_path / "file", len(data), [(0, len(data), digest_of(data))], blobs, 1)
    begun, closed = threading.Event(), threading.Event()
    real, after = os.pwrite, list[bool]()

    def slowly(descriptor: int, piece: memoryview, offset: int) -> int:
        begun.set()
        time.sleep(0.3)
        after.append(closed.is_set())
        return real(descriptor, piece, offset)

    monkeypatch.setattr("sandyard.store.blobs.lazy.filling.os.pwrite", slowly)
    reading = asyncio.create_task(filling.read(0, 10))
    assert await asyncio.to_thread(begun.wait, 10)
    await filling.close()
    closed.set()
    await asyncio.gather(reading, return_exceptions=True)
    assert after == [False]
    assert (tmp_path / "file").read_bytes() == data


async def test_who_is_cancelled_goes_on_when_the_thread_has_ended() -> None:
    begun, done = threading.Event(), threading.Event()

    def work(answer: int) -> int:
        begun.set()
        time.sleep(0.2)
        done.set()
        return answer

    assert await ended(work, 5) == 5
    begun.clear()
    done.clear()
    task = asyncio.create_task(ended(work, 5))
    assert await asyncio.to_thread(begun.wait, 10)
    for _ in range(2):  # however often it is told
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()
    with pytest.raises(ZeroDivisionError):
        await ended(lambda: 1 // 0)
