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
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import structlog

from sandyard.config import BuildSettings
from sandyard.errors import BadRequest, CapacityError, HostError
from sandyard.images.build.archive import check_archive
from sandyard.server.builds.gate import Gate

log = structlog.get_logger("sandyard.builds")

AT_ONCE = 2  # archives that are checked
UPLOADS = 8  # of one tenant, at once
BUSY_SECONDS = 5.0
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
        self._gate = Gate(AT_ONCE)
        self._coming: Counter[str] = Counter()  # uploads by tenant

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

        Raises `BadRequest` for what is no tar archive or too large, `CapacityError` where too many of the tenant
        come at once, and `HostError` where the disk fails."""
        path = self._path(tenant, files_hash)
        if self._coming[tenant] >= UPLOADS:
            raise CapacityError(f"{UPLOADS} uploads are coming already", retry_after=BUSY_SECONDS)
        self._coming[tenant] += 1
        try:
            size = await self._receive(tenant, path, chunks)
        except OSError as error:
            raise HostError(f"files {files_hash}: {error.strerror}", remedy="check the disk of paths.state") from error
        finally:
            self._coming[tenant] -= 1
            self._coming += Counter()  # forgets who has none
        await self.collect()
        return size

    async def collect(self) -> None:
        """Remove what is too old, then each tenant's longest unused until its rest fits; and parts of uploads that
        broke off."""
        await asyncio.to_thread(self._collect, time.time())

    def refuse_size(self) -> NoReturn:
        """Raises `TooLarge`."""
        raise TooLarge(f"the archive passes {self._settings.upload_mb} MiB", remedy="raise build.upload_mb")

    async def _receive(self, tenant: str, path: Path, chunks: AsyncIterator[bytes]) -> int:
        part = path.with_name(f"{_PART}{os.urandom(8).hex()}")
        limit = self.upload_limit * UNPACKED_TIMES
        try:
            await asyncio.to_thread(path.parent.mkdir, 0o700, True, True)
            size = await self._write(part, chunks)
            async with self._gate.place(tenant, lambda: None):
                await asyncio.get_running_loop().run_in_executor(self._checkers, check_archive, part, limit)
            await asyncio.to_thread(part.rename, path)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
        return size

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
        for home in self._home.iterdir():
            self._collect_of(home, now)

    def _collect_of(self, home: Path, now: float) -> None:
        """Of one tenant: what another sends is no reason to forget its files."""
        kept: list[tuple[float, int, Path]] = []
        for path in home.glob("*"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                part = path.name.startswith(_PART)
                if now - stat.st_mtime > (86400 if part else self._settings.files_days * 86400):
                    path.unlink()
                elif not part:  # else it would be taken from under its upload
                    kept.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= self._settings.files_mb << 20:
                break
            with suppress(FileNotFoundError):
                path.unlink()
                total -= size
                log.info("uploaded files forgotten", path=path.name, bytes=size)
