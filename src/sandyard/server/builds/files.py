"""Archives that clients upload for COPY, by tenant and hash: checked, bounded, forgotten when long unused.

The hash is the client's own, over the files before they were packed; it cannot be computed again from the
archive. It is a name, then, and one that only the same tenant can use.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import structlog

from sandyard.config import BuildSettings
from sandyard.errors import BadRequest, HostError
from sandyard.images.build.archive import check_archive

log = structlog.get_logger("sandyard.builds")

AT_ONCE = 2  # archives that are checked
UNPACKED_TIMES = 8  # how much larger the files may be than the limit of the archive
_HASH = re.compile(r"[A-Za-z0-9_-]{8,128}")
_PART = ".part-"


class TooLarge(BadRequest):
    http_status = 413


class FileStore:
    """`home` is this object's own. Used from one event loop."""

    def __init__(self, home: Path, settings: BuildSettings) -> None:
        self._home = home
        self._settings = settings
        # Of its own: to read archives takes long, and what shares its threads would wait.
        self._checkers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="archives")

    def close(self) -> None:
        """Check no more archives."""
        self._checkers.shutdown(wait=False, cancel_futures=True)

    @property
    def upload_limit(self) -> int:
        """Bytes of one archive as it is sent."""
        return self._settings.upload_mb << 20

    def path(self, tenant: str, files_hash: str) -> Path | None:
        """Where the archive lies; None if it is not here. It counts as used now."""
        path = self._path(tenant, files_hash)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    async def receive(self, tenant: str, files_hash: str, chunks: AsyncIterator[bytes]) -> int:
        """Keep an archive in place of an earlier one of that hash; its bytes.

        Raises `BadRequest` for what is no tar archive or too large, `HostError` where the disk fails."""
        path = self._path(tenant, files_hash)
        part = path.with_name(f"{_PART}{os.urandom(8).hex()}")
        try:
            await asyncio.to_thread(path.parent.mkdir, 0o700, True, True)
            size = await self._write(part, chunks)
            limit = self.upload_limit * UNPACKED_TIMES
            await asyncio.get_running_loop().run_in_executor(self._checkers, check_archive, part, limit)
            await asyncio.to_thread(part.rename, path)
        except OSError as error:
            raise HostError(f"files {files_hash}: {error.strerror}", remedy="check the disk of paths.state") from error
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
        await self.collect()
        return size

    async def collect(self) -> None:
        """Remove what is too old, then the longest unused until the rest fits; and parts of uploads that broke off."""
        await asyncio.to_thread(self._collect, time.time())

    def refuse_size(self) -> NoReturn:
        """Raises `TooLarge`."""
        raise TooLarge(f"the archive passes {self._settings.upload_mb} MiB", remedy="raise build.upload_mb")

    async def _write(self, part: Path, chunks: AsyncIterator[bytes]) -> int:
        size = 0
        with part.open("xb") as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > self.upload_limit:
                    self.refuse_size()
                await asyncio.to_thread(file.write, chunk)
        return size

    def _path(self, tenant: str, files_hash: str) -> Path:
        if not _HASH.fullmatch(files_hash):
            raise BadRequest(f"hash '{files_hash[:80]}': use 8 to 128 of A-Z, a-z, 0-9, '_' and '-'", field="hash")
        owner = hashlib.sha256(tenant.encode()).hexdigest()[:24]
        return self._home / owner / files_hash

    def _collect(self, now: float) -> None:
        if not self._home.is_dir():
            return
        kept: list[tuple[float, int, Path]] = []
        for path in self._home.glob("*/*"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                age = now - stat.st_mtime
                if age > (86400 if path.name.startswith(_PART) else self._settings.files_days * 86400):
                    path.unlink()
                else:
                    kept.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= self._settings.files_mb << 20:
                break
            with suppress(FileNotFoundError):
                path.unlink()
                total -= size
                log.info("uploaded files forgotten", path=path.name, bytes=size)
