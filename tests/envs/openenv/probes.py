"""Envs that tests serve by `module:Class`, and raw clients of the protocol."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

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


@asynccontextmanager
async def raw(server: OpenEnvServer, path: str = "/ws") -> AsyncIterator[Raw]:
    async with connect(server.url.replace("http", "ws") + path, compression=None, proxy=None) as socket:
        yield Raw(socket)


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait until `condition()` holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  what is waited for is in another process
            await asyncio.sleep(0.02)


RESET = {"type": "reset", "data": {}}
