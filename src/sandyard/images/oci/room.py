"""Room for what a pull writes: within the store's high watermark, and never the last of the disk."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import HostError
from sandyard.images.oci.holds import Hold

RESERVE_BYTES = 256 << 20  # of the disk, left for sandboxes and the database
STEP_BYTES = 8 << 20  # at most, between two looks

# Remove what nobody uses, the longest unused first, until so many bytes are free, or nothing more may go. Blocking.
Collect = Callable[[int], None]


class NoRoom(HostError):
    """The store, or its disk, is full. Another source would not help."""

    http_status = 507


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Bytes that the layers of pulled images may take: once they pass `high`, they are brought to `low`."""

    low: int
    high: int

    @classmethod
    def of(cls, settings: Settings) -> Watermarks:
        """As set, else by the size of the disk."""
        high = settings.images.store_high_mb << 20
        if not high:
            home = settings.paths.state.absolute()
            while not home.exists():
                home = home.parent
            high = shutil.disk_usage(home).total * 2 // 5
        return cls(min(settings.images.store_low_mb << 20 or high * 4 // 5, high), high)


def collect_nothing(count: int) -> None:
    """A `Collect` where nobody knows what may go."""


class Room:
    """Of one pull. `used` tells what the store takes with all that is being written."""

    def __init__(
        self, home: Path, marks: Watermarks, hold: Hold, used: Callable[[], int], collect: Collect = collect_nothing
    ) -> None:
        self._home = home
        self._marks = marks
        self._hold = hold
        self._used = used
        self._collect = collect
        self._step = min(STEP_BYTES, marks.high // 64)
        self._ahead = 0  # taken and not looked at yet
        self._reserved = 0  # in the hold, for what this object was asked for
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """So many bytes are about to be written. Blocking. Raises `NoRoom`."""
        if count > self._marks.high:  # before anything is removed for what cannot be
            raise NoRoom(
                f"layer store {self._home}: {count >> 20} MiB are more than the {self._marks.high >> 20} MiB that it"
                " may take at all",
                remedy="raise images.store_high_mb",
            )
        with self._lock:
            self._ahead += count
            if self._ahead < self._step:
                return
            ahead, self._ahead = self._ahead, 0
        self._reserve(ahead)
        self._fit(ahead)

    def give(self, count: int) -> None:
        """So many bytes of what was taken are gone again. Blocking."""
        with self._lock:
            spent = min(self._ahead, count)
            self._ahead -= spent
        if count > spent:
            self._reserve(spent - count)

    def landed(self, count: int) -> None:
        """So many bytes of what was taken are a layer now, which the hold knows."""
        with self._lock:
            self._reserved -= count

    def close(self) -> None:
        """Nothing more is written: what is left of what was taken is free again. Blocking."""
        with self._lock:
            left = self._reserved
        self._reserve(-left)

    def check(self) -> None:
        """Raises `NoRoom` where what is there is too much already, whatever was taken for it. Blocking."""
        self._fit(0)

    def _reserve(self, count: int) -> None:
        with self._lock:
            self._reserved += count
        self._hold.reserve(count)

    def _fit(self, count: int) -> None:
        if (used := self._used()) > self._marks.high:
            self._collect(used - self._marks.low)
            if (used := self._used()) > self._marks.high:
                raise NoRoom(
                    f"layer store {self._home}: {used >> 20} MiB with this, more than the {self._marks.high >> 20} MiB"
                    " it may take, and the rest is in use",
                    remedy="raise images.store_high_mb, or delete templates (`sandyard store gc --dry-run` tells more)",
                )
        if (free := self._free()) < count + RESERVE_BYTES:
            self._collect(count + RESERVE_BYTES - free)
            if (free := self._free()) < count + RESERVE_BYTES:
                raise NoRoom(
                    f"disk of {self._home}: {free >> 20} MiB free, and {(count + RESERVE_BYTES) >> 20} MiB are needed",
                    remedy="free some, or set paths.state to another disk",
                )

    def _free(self) -> int:
        return shutil.disk_usage(self._home).free
