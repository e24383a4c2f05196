"""One WebSocket to an OpenEnv server, on which an answer belongs to its request or to nobody.

The protocol has no request ids: answers are told apart by their order alone. So one request is on
its way at a time, and when its answer is given up (a deadline, a cancelled caller) the link is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from sandyard.connection import is_loopback
from sandyard.envs.openenv.failures import SessionLost
from sandyard.envs.openenv.protocol import Message
from sandyard.errors import BadRequest

_CLOSE_TIMEOUT = 5.0
# What a server may say unasked before it closes: why there is no session.
_UNASKED = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")


class Link:
    """Made by `open`. `lost` says why it is dead, or is None."""

    def __init__(self, socket: ClientConnection, url: str) -> None:
        self._socket = socket
        self._url = url
        self._waiter: asyncio.Future[Message] | None = None
        self._unasked: Message | None = None
        self._told = False  # what was said unasked is the answer to one request, not to all
        self.lost: str | None = None
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, url: str, *, headers: Mapping[str, str], timeout: float, max_message: int) -> Link:
        """Raises `SessionLost` when nobody answers or the handshake is refused, `BadRequest` for a wrong URL."""
        proxy = {"proxy": None} if _is_loopback(url) else {}
        options: dict[str, Any] = {"compression": None, "close_timeout": _CLOSE_TIMEOUT, **proxy}
        try:
            socket = await connect(
                url, additional_headers=dict(headers), open_timeout=timeout, max_size=max_message, **options
            )
        except InvalidURI as error:
            raise BadRequest(f"{url} is not a WebSocket's address: {error}", field="base_url") from error
        except (OSError, InvalidHandshake, EOFError) as error:
            raise SessionLost(f"no session at {url}: {error or type(error).__name__}") from error
        return cls(socket, url)

    async def ask(self, message: Message, expected: str, timeout: float) -> Message:
        """The answer, of type `expected` or `error`. Raises `SessionLost`, and the link is dead then.

        The caller asks one at a time.
        """
        if self._unasked is not None and not self._told:
            self._told = True
            return self._unasked
        if self.lost is not None:
            raise SessionLost(self.lost)
        waiter = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        kind = message["type"]
        try:
            async with asyncio.timeout(timeout):
                await self._socket.send(json.dumps(message))
                answer: Message = await waiter
        except TimeoutError as error:
            raise SessionLost(self._die(f"{kind} was not answered within {timeout:g} s by {self._url}")) from error
        except ConnectionClosed as error:
            if self._unasked is not None:
                return self._unasked
            raise SessionLost(self._die(f"{self._url} closed the session during {kind}: {error}")) from error
        except asyncio.CancelledError:
            self._die(f"{kind} was given up before {self._url} answered")
            raise
        finally:
            self._waiter = None
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # seen: the same loss was already told by the send
        if answer.get("type") not in (expected, "error"):
            raise SessionLost(self._die(f"{self._url} answered {kind} with {answer.get('type')!r:.100}"))
        return answer

    def lose(self, why: str) -> None:
        """Dead by the server's own word."""
        self._die(why)

    async def close(self) -> None:
        """End the session politely if it lives; bounded in time, idempotent."""
        if self.lost is None:
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await self._socket.send('{"type":"close"}')
                    await self._socket.wait_closed()
            self._die("the client was closed")
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._socket.wait_closed()

    async def _read(self) -> None:
        try:
            async for text in self._socket:
                if not self._hear(text):
                    return
            self._die(f"{self._url} closed the session")
        except ConnectionClosed as error:
            self._die(f"the connection to {self._url} broke: {error}")

    def _hear(self, text: str | bytes) -> bool:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("data"), dict):
            self._die(f"{self._url} sent what is not a message of the protocol")
            return False
        if message.get("type") == "error" and message["data"].get("code") in _UNASKED:
            self._unasked = message
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(message)
        elif self._unasked is None:
            self._die(f"{self._url} sent an answer that nobody waits for")
            return False
        return True

    def _die(self, why: str) -> str:
        """Dead from now on; the socket is dropped without a handshake: nothing that it still says counts."""
        if self.lost is None:
            self.lost = why
        self._socket.transport.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(SessionLost(self.lost))
        return self.lost


def _is_loopback(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")
