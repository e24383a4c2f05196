"""One fork server for all envs of an event loop that ask for the same limits and packages."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from sandyard.envs.process.limits import SessionLimits
from sandyard.envs.process.server import SessionServer

_Key = tuple[SessionLimits, tuple[str, ...]]


@dataclass(slots=True)
class _Shared:
    server: SessionServer
    users: int = 0


@dataclass(slots=True)
class _Servers:
    by_key: dict[_Key, _Shared] = field(default_factory=dict)


_LOOPS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Servers] = weakref.WeakKeyDictionary()


class ServerShare:
    """A share of this loop's fork server, taken with `acquire`; the last `release` ends the server."""

    def __init__(self, limits: SessionLimits, packages: Sequence[str]) -> None:
        self._key: _Key = (limits, tuple(packages))
        self._shared: _Shared | None = None

    def acquire(self) -> SessionServer:
        """The server; the same one on every call until `release`."""
        if self._shared is None:
            servers = _LOOPS.setdefault(asyncio.get_running_loop(), _Servers()).by_key
            shared = servers.get(self._key)
            if shared is None:
                shared = servers[self._key] = _Shared(SessionServer(self._key[0], packages=self._key[1]))
            shared.users += 1
            self._shared = shared
        return self._shared.server

    async def release(self) -> None:
        """Idempotent."""
        shared, self._shared = self._shared, None
        if shared is None:
            return
        shared.users -= 1
        if shared.users == 0:
            servers = _LOOPS[asyncio.get_running_loop()].by_key
            if servers.get(self._key) is shared:
                del servers[self._key]
            await shared.server.close()
