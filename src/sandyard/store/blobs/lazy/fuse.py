"""One file, read-only, over FUSE: the root of the mount is that file (linux/fuse.h, protocol 7.31)."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from sandyard.errors import HostError

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_HEADER = struct.Struct("<IIQQIIIHH")
_GETATTR, _OPEN, _READ, _STATFS, _RELEASE, _FLUSH, _INIT = 3, 14, 15, 17, 18, 25, 26
_FORGET, _INTERRUPT, _DESTROY, _BATCH_FORGET, _LSEEK = 2, 36, 38, 42, 46
_ASYNC_READ, _MAX_PAGES = 1 << 0, 1 << 22
_VERSION, _MINOR = 7, 31
_KEEP_CACHE = 1 << 1
_READ_AHEAD = 128 << 10
_LONGEST = 256 << 10  # of a request: none of ours has a body
_SECONDS = 3600  # the kernel need not ask again what the file is
_MODE = 0o100400
_GONE = (errno.ENODEV, errno.ENOTCONN)

Read = Callable[[int, int], Awaitable[bytes]]
_libc = ctypes.CDLL(None, use_errno=True)


def mount(target: Path) -> int:
    """Cover the file `target`; the descriptor to `FileServer`. Raises `HostError`."""
    try:
        descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise HostError(
            f"/dev/fuse: {error.strerror}", remedy="load the module fuse, or set blobs.lazy to off"
        ) from error
    options = f"fd={descriptor},rootmode={_MODE:o},user_id=0,group_id=0,allow_other,default_permissions"
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if _libc.mount(b"sandyard", os.fsencode(target), b"fuse", flags, options.encode()) != 0:
        os.close(descriptor)
        what = os.strerror(ctypes.get_errno())
        raise HostError(f"mount of {target}: {what}", remedy="run as root, or set blobs.lazy to off")
    return descriptor


def detach(target: Path) -> None:
    """Uncover `target`; who has the file open keeps it. Idempotent."""
    while _libc.umount2(os.fsencode(target), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
        pass  # what a killed process left lies below


class FileServer:
    """Answers the kernel until nobody has the file any more. `runs`: where it may have data, ascending; elsewhere it
    is zero. What `read` raises is EIO to whoever reads."""

    def __init__(self, descriptor: int, size: int, runs: Sequence[tuple[int, int]], read: Read) -> None:
        self._descriptor = descriptor
        self._size = size
        self._runs = runs
        self._read = read
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, self._requests)
        try:
            await self._ended.wait()
        finally:
            loop.remove_reader(self._descriptor)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            os.close(self._descriptor)

    def _requests(self) -> None:
        try:
            while True:
                self._request(os.read(self._descriptor, _LONGEST))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            if error.errno in _GONE:
                self._ended.set()
            elif error.errno != errno.ENOENT:  # that one was called off
                raise

    def _request(self, message: bytes) -> None:
        _, code, unique, *_ = _HEADER.unpack_from(message)
        body = message[_HEADER.size :]
        if code == _READ:
            _, offset, count = struct.unpack_from("<QQI", body)
            task = asyncio.create_task(self._answer_read(unique, offset, count))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif code == _INIT:
            self._reply(unique, _init(body))
        elif code == _GETATTR:
            self._reply(unique, struct.pack("<QII", _SECONDS, 0, 0) + self._attributes())
        elif code == _OPEN:
            self._reply(unique, struct.pack("<QII", 0, _KEEP_CACHE, 0))
        elif code == _STATFS:
            self._reply(unique, struct.pack("<5Q4I24x", 0, 0, 0, 1, 0, 4096, 255, 4096, 0))
        elif code == _LSEEK:
            _, offset, whence = struct.unpack_from("<QQI", body)
            self._seek(unique, offset, whence)
        elif code in (_RELEASE, _FLUSH, _DESTROY):
            self._reply(unique)
        elif code not in (_FORGET, _BATCH_FORGET, _INTERRUPT):  # these have no answer
            self._reply(unique, error=errno.ENOSYS)

    async def _answer_read(self, unique: int, offset: int, count: int) -> None:
        try:
            data = await self._read(offset, max(0, min(count, self._size - offset)))
        except Exception:  # noqa: BLE001 - whatever it is, it is no data; `read` tells what
            self._reply(unique, error=errno.EIO)
        else:
            self._reply(unique, data)

    def _seek(self, unique: int, offset: int, whence: int) -> None:
        found = self._sought(offset, data=whence == os.SEEK_DATA)
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            self._reply(unique, error=errno.EINVAL)
        elif found is None:
            self._reply(unique, error=errno.ENXIO)
        else:
            self._reply(unique, struct.pack("<Q", found))

    def _sought(self, offset: int, *, data: bool) -> int | None:
        if offset >= self._size:
            return None
        for begin, end in self._runs:
            if offset < end and data:
                return max(offset, begin)
            if begin <= offset < end:
                offset = end
        return None if data else min(offset, self._size)

    def _attributes(self) -> bytes:
        blocks = sum(end - begin for begin, end in self._runs) // 512
        return struct.pack("<6Q10I", 1, self._size, blocks, 0, 0, 0, 0, 0, 0, _MODE, 1, 0, 0, 0, 4096, 0)

    def _reply(self, unique: int, data: bytes = b"", error: int = 0) -> None:
        try:
            os.write(self._descriptor, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)
        except OSError as failed:
            if failed.errno in _GONE:
                self._ended.set()
            elif failed.errno != errno.ENOENT:  # nobody waits for it any more
                raise


def _init(body: bytes) -> bytes:
    flags = struct.unpack_from("<IIII", body)[3] & (_ASYNC_READ | _MAX_PAGES)
    pages = _READ_AHEAD // 4096
    return struct.pack("<IIIIHHIIHHI7I", _VERSION, _MINOR, _READ_AHEAD, flags, 16, 12, 4096, 1, pages, 0, 0, *[0] * 7)
