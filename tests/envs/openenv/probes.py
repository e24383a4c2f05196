"""Envs that tests serve by `module:Class`, and raw clients of the protocol."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import httpx
from websockets.asyncio.client import ClientConnection, connect

from sandyard.envs.base import Env, Execution, StepResult, ToolSpec
from sandyard.envs.memory import MemoryCodeEnv
from sandyard.envs.openenv.catalog import EnvSpec
from sandyard.envs.openenv.server import OpenEnvServer, ServerOptions
from sandyard.errors import CapacityError, DeathReason, SandboxDied
from sandyard.tasks.base import Task

_ANY = {"type": "object", "properties": {"how": {"type": "string"}}, "required": ["how"]}


class TroubleEnv(Env):
    """Does what its `do(how)` says, mostly wrong."""

    async def reset(self, task: Task | None = None) -> StepResult:
        return StepResult("ready", info={"pid": os.getpid(), "odd": object()})

    async def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        match str(arguments["how"]):
            case "exit":
                raise SystemExit("out")
            case "raise":
                raise KeyError("lost")
            case "die":
                raise SandboxDied("s1", DeathReason.OOM)
            case "full":
                raise CapacityError("no room", retry_after=7)
            case "nan":
                return StepResult("odd", reward=float("nan"))
            case "kill":
                os._exit(7)
            case "long":
                await asyncio.sleep(30)
            case "big":
                return StepResult("x" * (1 << 20))
            case "cut":
                return StepResult("cut", reward=0.25, truncated=True)
        await asyncio.sleep(0.05)
        return StepResult(str(arguments["how"]), info={"pid": os.getpid()})

    def tools(self) -> Sequence[ToolSpec]:
        return [ToolSpec("do", "Do it.", _ANY)]

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        return Execution("", "", 0)

    @property
    def submission(self) -> str | None:
        return None

    async def close(self) -> None:
        return


class UnmakeableEnv(TroubleEnv):
    """Can be made once in a process: by the check at a worker's start, and never for a session."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        if type(self).made > 1:
            raise RuntimeError("no more of these")


class QuickCodeEnv(MemoryCodeEnv):
    """Programs are ended after half a second."""

    def __init__(self) -> None:
        super().__init__(run_timeout=0.5)


TROUBLE = "tests.envs.openenv.probes:TroubleEnv"
UNMAKEABLE = "tests.envs.openenv.probes:UnmakeableEnv"


def serving(name: str = TROUBLE, backend: str | None = None, **options: Any) -> OpenEnvServer:
    chosen: dict[str, Any] = {"port": 0, "workers": 1, "drain": 2.0} | options
    return OpenEnvServer(ServerOptions(EnvSpec(name, backend), **chosen))


class Raw:
    """The protocol by hand."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), 20))
        return message

    async def send(self, message: object) -> None:
        await self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    async def ask(self, message: object) -> dict[str, Any]:
        await self.send(message)
        return await self.hear()

    async def do(self, how: str) -> dict[str, Any]:
        return await self.ask({"type": "step", "data": {"tool": "do", "arguments": {"how": how}}})

    async def code_of(self, message: object) -> str:
        answer = await self.ask(message)
        assert answer["type"] == "error", answer
        return str(answer["data"]["code"])


class Caller:
    """JSON-RPC over HTTP, a connection a call, as a client behind a pool does."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._url = f"{server.url}/mcp"

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        body = {"jsonrpc": "2.0", "id": 5, "method": method, "params": params}
        async with httpx.AsyncClient(timeout=20) as web:
            answer = await web.post(self._url, json=body)
        assert (answer.status_code, answer.json()["id"]) == (200, 5)
        told: dict[str, Any] = answer.json()
        return told

    async def create(self) -> str:
        return str((await self.ask("openenv/session/create"))["result"]["session_id"])

    async def say(self, session: str, message: str) -> dict[str, Any]:
        call: Mapping[str, Any] = {"name": "echo", "arguments": {"message": message}}
        return await self.ask("tools/call", session_id=session, **call)


@asynccontextmanager
async def raw(server: OpenEnvServer, path: str = "/ws") -> AsyncIterator[Raw]:
    async with connect(server.url.replace("http", "ws") + path, compression=None, proxy=None) as socket:
        yield Raw(socket)


class Cut:
    """A relay to a server. `cut` is what a pulled cable does: nothing passes any more, and nobody is told."""

    def __init__(self, target: str) -> None:
        self._host, port = target.removeprefix("http://").split(":")
        self._port = int(port)
        self._whole = asyncio.Event()
        self._whole.set()
        self._pumps: list[asyncio.Task[None]] = []
        self.url = ""

    def cut(self) -> None:
        self._whole.clear()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        for pair in ((reader, back), (there, writer)):
            self._pumps.append(asyncio.create_task(self._pump(*pair)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._whole.wait()
                writer.write(data)
            await self._whole.wait()
        finally:
            writer.close()


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait until `condition()` holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  what is waited for is in another process
            await asyncio.sleep(0.02)


RESET = {"type": "reset", "data": {}}
