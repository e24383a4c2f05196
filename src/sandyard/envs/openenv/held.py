"""Sessions that no socket holds: made over HTTP for MCP, and a WebSocket may join one (`/ws?session_id=…`)."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from sandyard.envs.openenv.protocol import ErrorCode, Fault, Message, Request, capacity_message
from sandyard.envs.openenv.session import RPC_PARAMS, RPC_SERVER, Session, rpc_error

CREATE, CLOSE = "openenv/session/create", "openenv/session/close"
_ENDED = "the session was closed"


class HeldSession:
    """One session for calls from many sides, which take turns. What a WebSocket closes is its part in it."""

    def __init__(self, session: Session, on_leave: Callable[[HeldSession], None]) -> None:
        self._session = session
        self._on_leave = on_leave
        self._turn = asyncio.Lock()
        self.uses = 0  # calls and sockets that are there now
        self.joined = False
        self.ended = False

    async def answer(self, request: Request) -> Message:
        async with self._turn:
            if self.ended:
                raise Fault(ErrorCode.SESSION_ERROR, _ENDED)
            try:
                return await self._session.answer(request)
            except asyncio.CancelledError:  # its socket left in the middle: nobody knows how far it came
                self._session.abandon()
                raise

    async def answer_rpc(self, call: Mapping[str, Any]) -> dict[str, Any]:
        async with self._turn:
            if self.ended:
                return rpc_error(call.get("id"), RPC_SERVER, _ENDED)
            return await self._session.answer_rpc(call)

    async def close(self) -> None:
        """The socket leaves. Idempotent."""
        if self.joined:
            self.joined = False
            self._on_leave(self)

    async def end(self) -> None:
        """Release the env, after the call that is running."""
        self.ended = True
        async with self._turn:
            await self._session.close()


class HeldSessions:
    """Those of a worker, at most `room()` of them at a time. One without a call or a socket for `idle_timeout`
    seconds is ended. `tell(number, taken)` says that a seat is taken or free."""

    def __init__(
        self,
        make: Callable[[], Session],
        *,
        idle_timeout: float,
        room: Callable[[], tuple[int, int]],
        tell: Callable[[int, bool], None],
    ) -> None:
        self._make = make
        self._idle_timeout = idle_timeout
        self._room = room
        self._tell = tell
        self._found: dict[str, HeldSession] = {}
        self._seats: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(-1, -1)  # a socket's seat has a positive one

    def __len__(self) -> int:
        return len(self._found)

    @property
    def joined(self) -> int:
        """Sockets in them, which take no seat of their own."""
        return sum(held.joined for held in self._found.values())

    def create(self, number: object) -> dict[str, Any]:
        """The JSON-RPC answer. Whatever the env's constructor raises comes out."""
        taken, most = self._room()
        if taken >= most:
            said = capacity_message(taken, most)["data"]
            more = {name: said[name] for name in ("code", "active_sessions", "max_sessions")}
            return rpc_error(number, RPC_SERVER, said["message"], data=more)
        name = secrets.token_urlsafe(18)
        self._found[name] = HeldSession(self._make(), lambda held: self._leave(name, held))
        self._seats[name] = next(self._numbers)
        self._tell(self._seats[name], True)
        self._rest(name)
        return {"jsonrpc": "2.0", "id": number, "result": {"session_id": name}}

    async def answer(self, name: object, call: Mapping[str, Any]) -> dict[str, Any]:
        """Do a JSON-RPC call in session `name`; `openenv/session/close` ends it."""
        number = call.get("id")
        if not isinstance(name, str) or name not in self._found:
            return rpc_error(number, RPC_PARAMS, self.unknown(name))
        if call.get("method") == CLOSE:
            joined = self._found[name].joined
            await self._end(name)
            return {"jsonrpc": "2.0", "id": number, "result": {"session_id": name, "closed": True, "joined": joined}}
        held = self._use(name)
        try:
            return await held.answer_rpc(call)
        finally:
            self._leave(name, held)

    def join(self, name: str) -> HeldSession | None:
        """For a WebSocket, one at a time; None where there is no such session, or another is in it."""
        held = self._found.get(name)
        if held is None or held.joined:
            return None
        held.joined = True
        return self._use(name)

    def _use(self, name: str) -> HeldSession:
        held = self._found[name]
        held.uses += 1
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        return held

    def _leave(self, name: str, held: HeldSession) -> None:
        held.uses -= 1
        if held.uses == 0 and not held.ended:
            self._rest(name)

    def unknown(self, name: object) -> str:
        return f"unknown session_id {name!r:.100}: closed, or ended after {self._idle_timeout:g} s without a request"

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(self._end(name) for name in list(self._found)), *self._ending)

    def _rest(self, name: str) -> None:
        self._timers[name] = asyncio.get_running_loop().call_later(self._idle_timeout, self._expire, name)

    def _expire(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._end(name))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, name: str) -> None:
        held = self._found.pop(name, None)
        if held is None:
            return
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        try:
            await held.end()
        finally:
            self._tell(self._seats.pop(name), False)
