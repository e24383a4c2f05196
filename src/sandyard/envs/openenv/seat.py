"""A place among a server's sessions: it is free again when its socket and its env are both gone."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Seat:
    """`refused`, if set, is what to tell instead of a session: sessions in use and how many there are."""

    on_free: Callable[[], None]
    refused: tuple[int, int] | None = None
    _parts: set[str] = field(default_factory=lambda: {"socket"})
    _freed: bool = False

    def hold(self, part: str) -> None:
        self._parts.add(part)

    def leave(self, part: str) -> None:
        """Idempotent."""
        self._parts.discard(part)
        if not self._parts and not self._freed:
            self._freed = True
            self.on_free()


class SeatSocket(socket.socket):
    """An accepted socket that leaves its seat when it is closed, whichever protocol closes it."""

    seat: Seat | None = None

    def close(self) -> None:
        super().close()
        if self.seat is not None:
            self.seat.leave("socket")

    @classmethod
    def take(cls, fd: int, seat: Seat) -> SeatSocket:
        taken = cls(fileno=fd)
        taken.setblocking(False)
        taken.seat = seat
        return taken
