"""A whole server on a free port: over the in-memory runtime in this process, or over containers in a child."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import uvicorn

from sandyard.config import PathSettings, PoolSettings, SandboxSettings, ServerSettings, Settings
from sandyard.guest.base import ProcessSpec
from sandyard.guest.memory import MemoryAgent
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.server.app import Application
from sandyard.server.auth import Keys
from sandyard.server.build import application
from sandyard.server.listen import open_socket
from sandyard.server.serve import uvicorn_config
from tests.yard import clean_node, node_home, node_settings

T = TypeVar("T")


async def _flood(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
    return "é漢😀".encode() * int(spec.argv[1]), b"", 0


async def _env(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
    return "\n".join(f"{name}={value}" for name, value in sorted(spec.env.items())).encode(), spec.cwd.encode(), 0  # type: ignore[union-attr]


async def _fail(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
    return b"part\n", b"wrong\n", int(spec.argv[1])


class LiveServer:
    """A server in a thread of this process, its parts within reach."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runtime = MemoryRuntime(self._agent)
        self.agents: list[MemoryAgent] = []
        self.app: Application
        self.loop: asyncio.AbstractEventLoop
        self._up = threading.Event()
        self._server: uvicorn.Server | None = None
        self.tls: ssl.SSLContext | None = None
        self._listener = open_socket(settings)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    @property
    def key(self) -> str:
        return (self.settings.paths.state / "secrets" / "api-key").read_text().strip()

    @property
    def environment(self) -> dict[str, str]:
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.key}

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def client(self, key: str | None = None) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"X-API-Key": key or self.key}, timeout=20)

    def app_keys(self) -> Keys:
        return self.app.keys

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(20)

    def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _agent(self) -> MemoryAgent:
        agent = MemoryAgent({"flood": _flood, "env": _env, "fail": _fail})
        self.agents.append(agent)
        return agent

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        async with application(self.settings, self.runtime) as self.app:
            config = uvicorn_config(self.app, self.settings, self.tls)
            config.timeout_graceful_shutdown = 1
            self._server = uvicorn.Server(config)
            serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
            while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.005)
            self._up.set()
            await serving


@contextmanager
def running(settings: Settings) -> Iterator[LiveServer]:
    server = LiveServer(settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def memory_settings(home: Path, **sandbox: object) -> Settings:
    return Settings(
        paths=PathSettings(state=home / "state", run=home / "run"),
        sandbox=SandboxSettings.model_validate({"runtime": "memory", **sandbox}),
        pool=PoolSettings(low=0, high=4),
        server=ServerSettings.model_validate({"port": 0}),
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with running(memory_settings(tmp_path)) as live:
        yield live


@pytest.fixture
def start_server(tmp_path: Path) -> Callable[..., Any]:
    """Starts a server with other sandbox settings: a context manager."""
    return lambda **sandbox: running(memory_settings(tmp_path, **sandbox))


@pytest.fixture
def api(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def settings() -> Iterator[Settings]:
    """A node of its own with the host's templates; modules with other wishes have their own."""
    with node_home() as home:
        yield node_settings(home)


@pytest.fixture
async def clean(settings: Settings) -> AsyncIterator[None]:
    async with clean_node(settings):
        yield
