"""A small OpenEnv server that misbehaves as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

FIELDS = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
Handler = Callable[[dict[str, Any]], Awaitable[Any]]


def observation(reward: object = None, done: bool = False, **fields: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


def error(code: str, message: str = "so it is", **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


@dataclass
class Stub:
    """`answers(message)` gives a message, several, text as it is, or None for silence. State is always answered."""

    answers: Handler
    greeting: Callable[[int], dict[str, Any] | None] = lambda number: None
    schema: dict[str, Any] = field(default_factory=lambda: FIELDS)
    url: str = ""
    sessions: int = 0
    heard: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)

    async def talk(self, socket: ServerConnection) -> None:
        number, self.sessions = self.sessions, self.sessions + 1
        greeting = self.greeting(number)
        if greeting is not None:
            await socket.send(json.dumps(greeting))
            return
        try:
            async for text in socket:
                message = json.loads(text)
                if message["type"] == "close":
                    return
                await self._answer(socket, message)
        except ConnectionClosed:
            return

    async def _answer(self, socket: ServerConnection, message: dict[str, Any]) -> None:
        if message["type"] == "state":
            await socket.send('{"type":"state","data":{"episode_id":null,"step_count":0}}')
            return
        self.heard.append(message)
        answer = await self.answers(message)
        for part in answer if isinstance(answer, list) else [answer]:
            if part is not None:
                await socket.send(part if isinstance(part, str) else json.dumps(part))

    def look(self, connection: ServerConnection, request: Request) -> Response | None:
        self.headers.append(request.headers)
        if request.path == "/ws":
            return None
        body = json.dumps({"action": self.schema, "observation": {}, "state": {}})
        return connection.respond(HTTPStatus.OK, body)


@asynccontextmanager
async def stubbed(answers: Handler, **options: Any) -> AsyncIterator[Stub]:
    stub = Stub(answers, **options)
    async with serve(stub.talk, "127.0.0.1", 0, process_request=stub.look) as server:
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield stub


async def echoing(message: dict[str, Any]) -> dict[str, Any]:
    """An honest server: says the message back, a little later."""
    await asyncio.sleep(0.02)
    return observation(said=message["data"].get("message"))
