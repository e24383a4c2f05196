"""Sandboxes whose agent lies: it answers garbage, too much, nothing, or the right thing in the wrong order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

from sandyard.guest import open_agent
from sandyard.guest.wire import HEADER, MAGIC, Frame, u16, u32
from sandyard.runtimes.base import Instance, SandboxSpec
from sandyard.runtimes.memory import MemoryInstance, MemoryRuntime

GREETING = HEADER.pack(12, Frame.HELLO, 0, 0, 0) + MAGIC + u16(1) + u32(2) + b"id" + u32(1)
WAYS = ["garbage", "results", "flood", "silence", "frames", "errors", "close", "drip", "mixed"]
CALL_SECONDS = 0.4
LIAR_MEMORY = 130  # MiB: how a test asks for a sandbox whose agent lies


class LyingAgent:
    """A peer at a Unix socket that greets as an agent does and then answers in one of `WAYS`."""

    def __init__(self, path: Path, way: str, seed: int) -> None:
        self._path = path
        self._way = way
        self._rng = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()  # its task ends by that: a cancelled one would be complained about

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                writer.write(GREETING)
                while True:
                    head = await reader.readexactly(HEADER.size)
                    size, kind, _, _, stream = HEADER.unpack(head)
                    await reader.readexactly(size)
                    if not await self._answer(writer, kind, stream):
                        break
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, kind: int, stream: int) -> bool:
        """False to hang up."""
        way = self._rng.choice(WAYS[:-1]) if self._way == "mixed" else self._way
        rng = self._rng
        if way == "close":
            return False
        if way == "garbage":
            writer.write(rng.randbytes(rng.randrange(1, 5000)))
        elif way == "results" and kind == Frame.OPEN:
            payload = u16(0) + rng.randbytes(rng.randrange(0, 200))
            writer.write(_frame(Frame.RESULT, 0, stream, payload, rng.randrange(4)))
        elif way == "errors" and kind == Frame.OPEN:
            writer.write(_frame(Frame.RESULT, 0, stream, u16(rng.randrange(30)) + u32(rng.randrange(200)) + u32(0), 1))
        elif way == "frames":
            for _ in range(rng.randrange(1, 8)):
                near = max(stream + rng.randrange(-2, 3), 0)
                writer.write(_frame(rng.randrange(10), rng.randrange(4), near, rng.randbytes(rng.randrange(40)), 0))
        elif way == "flood":
            writer.write(_frame(Frame.RESULT, 0, stream, u16(0) + u32(7) + u32(1000)))
            for _ in range(200):
                writer.write(_frame(Frame.DATA, 1, stream, bytes(1000)))
        elif way == "drip":
            for byte in _frame(Frame.RESULT, 0, stream, u16(0), 1):
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        return True


def _frame(kind: int, channel: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return HEADER.pack(len(payload), kind, channel, flags, stream) + payload


class LyingRuntime(MemoryRuntime):
    """Sandboxes are honest, but for those of `LIAR_MEMORY`: their agents lie in the way that `way` says."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home
        self._liars: dict[str, LyingAgent] = {}
        self.way: str | None = None
        self.seed = 0

    async def create(self, spec: SandboxSpec) -> Instance:
        if self.way is None or spec.resources.memory_mb != LIAR_MEMORY:
            return await super().create(spec)
        self.seed += 1
        liar = LyingAgent(self._home / f"{spec.sandbox_id}.sock", self.way, self.seed)
        await liar.start()
        self._liars[spec.sandbox_id] = liar
        return await self._linked(spec)

    async def adopt(self, sandbox_id: str) -> Instance | None:
        instance = self.instances.get(sandbox_id)
        if instance is None or sandbox_id not in self._liars:
            return instance
        await instance.agent.close()
        return await self._linked(instance.spec)

    async def destroy(self, sandbox_id: str) -> None:
        await super().destroy(sandbox_id)
        liar = self._liars.pop(sandbox_id, None)
        if liar is not None:
            await liar.close()

    async def _linked(self, spec: SandboxSpec) -> Instance:
        agent = await open_agent(self._home / f"{spec.sandbox_id}.sock", 5, call_timeout=CALL_SECONDS)
        instance = MemoryInstance(spec, agent)
        self.instances[spec.sandbox_id] = instance
        return instance
