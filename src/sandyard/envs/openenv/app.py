"""A worker's ASGI application: sessions on `/ws` and `/mcp`, the rest over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from sandyard.envs.openenv.catalog import EnvSpec
from sandyard.envs.openenv.conversation import Conversation, Receive, Send
from sandyard.envs.openenv.held import HeldSession, HeldSessions
from sandyard.envs.openenv.http import HttpSide
from sandyard.envs.openenv.protocol import ErrorCode, capacity_message, error_message
from sandyard.envs.openenv.seat import Seat
from sandyard.envs.openenv.session import Session

logger = logging.getLogger(__name__)
SESSION_PATHS = ("/ws", "/mcp")


class App:
    """Every connection's state carries its `seat`."""

    def __init__(
        self,
        spec: EnvSpec,
        *,
        idle_timeout: float,
        step_timeout: float,
        max_sessions: int,
        tell: Callable[[int, bool], None],
    ) -> None:
        """`tell(seat, taken)`: of the sessions that no socket holds."""
        self._spec = spec
        self._idle_timeout = idle_timeout
        self._step_timeout = step_timeout
        self._live: set[Conversation] = set()
        self.held = HeldSessions(
            lambda: Session(spec.make(), step_timeout=step_timeout),
            idle_timeout=idle_timeout,
            room=lambda: (len(self._live) - self.held.joined + len(self.held), max_sessions),
            tell=tell,
        )
        self._http = HttpSide(spec, step_timeout, self.held)
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http.serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._talk(scope, receive, send)

    def stop(self) -> None:
        """Sessions end after what they were already asked."""
        for conversation in self._live:
            conversation.stop()

    async def wait_idle(self) -> None:
        """Until no session is left."""
        await self._idle.wait()

    async def _talk(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        if scope["path"] not in SESSION_PATHS:
            await send({"type": "websocket.close", "code": 1008})
            return
        await send({"type": "websocket.accept"})
        seat: Seat = scope["state"]["seat"]
        conversation = Conversation(receive, send, idle_timeout=self._idle_timeout, rpc=scope["path"] == "/mcp")
        if seat.refused is not None:
            await conversation.refuse(capacity_message(*seat.refused))
            return
        names = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_id")
        if names:
            await self._talk_in(names[0], conversation, seat)
            return
        try:
            session = Session(self._spec.make(), step_timeout=self._step_timeout)
        except (Exception, SystemExit) as error:  # a foreign env's constructor; the client is told
            logger.exception("env %s could not be made", self._spec.name)
            text = f"env {self._spec.name} could not be made: {error}"
            await conversation.refuse(error_message(ErrorCode.FACTORY_ERROR, text, factory_name=self._spec.name))
            return
        await self._converse(conversation, session, seat)

    async def _talk_in(self, name: str, conversation: Conversation, seat: Seat) -> None:
        held = self.held.join(name)
        if held is None:
            text = f"{self.held.unknown(name)}, or another socket is in it"
            await conversation.refuse(error_message(ErrorCode.SESSION_ERROR, text))
            return
        await self._converse(conversation, held, seat)

    async def _converse(self, conversation: Conversation, session: Session | HeldSession, seat: Seat) -> None:
        self._live.add(conversation)
        self._idle.clear()
        try:
            await conversation.run(session, seat)
        finally:
            self._live.discard(conversation)
            if not self._live:
                self._idle.set()
