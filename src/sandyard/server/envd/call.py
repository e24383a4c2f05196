"""One request to the envd of one sandbox, and the names it uses there: users and paths."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import posixpath
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode, SandyardError
from sandyard.guest.base import UserInfo
from sandyard.sandboxes import Sandbox
from sandyard.server.envd.connect import RpcError
from sandyard.server.envd.sessions import Sessions
from sandyard.server.envd.watchers import Watchers
from sandyard.server.web import Headers

USER_CACHE_SECONDS = 10.0
DEATH_GRACE_SECONDS = 1.0
LISTINGS_AT_ONCE = 2


class Aborted(Exception):
    """The sandbox died under a response that had begun: the connection must break, not end."""


@dataclass(slots=True)
class Guest:
    """What the server holds of one sandbox's envd."""

    sandbox: Sandbox
    sessions: Sessions
    watchers: Watchers
    relink: Callable[[Sandbox], Awaitable[None]]
    users: dict[str, tuple[float, UserInfo]] = field(default_factory=dict)
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    listings: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LISTINGS_AT_ONCE))

    def die(self) -> None:
        self.dead.set()
        self.sessions.abort()
        self.watchers.abort()

    async def lost(self, error: SandyardError) -> bool:
        """Whether `error` came from the death of the sandbox, which is known a moment later.

        If it did not, there is a new link when this returns: the next request may well succeed."""
        if not isinstance(error, AgentLinkError):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_GRACE_SECONDS):
                await self.dead.wait()
        if not self.dead.is_set():
            await self.relink(self.sandbox)
        return self.dead.is_set()

    async def user(self, name: str) -> UserInfo:
        """Raises `RpcError(unauthenticated)` for a user the sandbox does not know."""
        known = self.users.get(name)
        now = time.monotonic()
        if known is not None and now - known[0] < USER_CACHE_SECONDS:
            return known[1]
        try:
            info = await self.sandbox.agent.user(name)
        except GuestError as error:
            if error.code is GuestErrorCode.NO_USER:
                raise unknown_user(name) from error
            raise
        if len(self.users) > 64:
            self.users.clear()
        self.users[name] = (now, info)
        return info

    async def path(self, user: UserInfo, path: str) -> str:
        """The absolute form: `~` and relative paths start at the user's home."""
        if not path or path == "~":
            return user.home
        if path.startswith("~/"):
            path = posixpath.join(user.home, path[2:])
        return posixpath.normpath(posixpath.join(user.home, path))


def unknown_user(name: str) -> RpcError:
    return RpcError("unauthenticated", f"invalid username: '{name}'")


@dataclass(slots=True)
class Call:
    scope: Scope
    receive: Receive
    send: Send
    headers: Headers
    guest: Guest
    started: bool = False

    @property
    def sandbox(self) -> Sandbox:
        return self.guest.sandbox

    def user_name(self) -> str:
        """From Basic authentication, else the template's. Raises `RpcError`."""
        header = self.headers.get(b"authorization", b"")
        if header[:6].lower() != b"basic ":
            return self.sandbox.defaults.user
        try:
            name = base64.b64decode(header[6:].strip(), validate=True).partition(b":")[0].decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise RpcError("unauthenticated", "the Authorization header is not Basic authentication") from error
        return name or self.sandbox.defaults.user

    async def user(self) -> UserInfo:
        return await self.guest.user(self.user_name())

    async def start(self, content_type: bytes) -> None:
        self.started = True
        headers = [(b"content-type", content_type)]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Waits while the client does not read."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        await self.send({"type": "http.response.body", "body": data})
