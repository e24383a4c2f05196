"""Running a server: socket, signals, ready line, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import math
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from sandyard.config import Settings
from sandyard.errors import ConfigError, HostError
from sandyard.server.build import application
from sandyard.server.lock import DirectoryLock
from sandyard.server.logs import set_up_logs
from sandyard.server.protocol import BoundedHttp, Stoppable
from sandyard.server.tokens import KEY_FILE, secrets_dir

KEEP_ALIVE_SECONDS = 120  # longer than clients keep idle connections, so that they close them and not we
SELF_CHECK_SECONDS = 10.0

Ready = Callable[[str, Path], None]
Stop = Callable[[Callable[[], None]], None]


def run_server(settings: Settings, *, on_ready: Ready | None = None, watch_stop: Stop | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully; a second signal cuts the draining short.

    `on_ready` gets the URL and the path of the API key once the server answers (default: print
    them); `watch_stop` is given a function that stops the server, callable from the event loop.
    Raises `ConfigError`, `Conflict` (another server has the directories) and `HostError`.
    """
    set_up_logs()
    check_address(settings)
    with DirectoryLock(settings.paths.state) as state, _run_lock(settings), open_socket(settings) as listener:
        state.describe(url_of(listener))
        uvloop.run(_serve(settings, listener, on_ready or print_ready, watch_stop))


def print_ready(url: str, key_file: Path) -> None:
    print(f"sandyard is ready at {url}; the API key lies in {key_file}", flush=True)


def check_address(settings: Settings) -> None:
    """Raises `ConfigError` for an address that others can reach, unless that was asked for."""
    host = settings.server.host
    if settings.server.allow_public or host == "localhost":
        return
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    raise ConfigError(
        f"setting server.host: {host} can be reached from elsewhere, and the API has no TLS of its own",
        remedy="listen on 127.0.0.1 and forward the port by SSH, or set server.allow_public",
    )


def open_socket(settings: Settings) -> socket.socket:
    """Bind and listen. Raises `HostError` with the remedy."""
    host, port = settings.server.host, settings.server.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Inherited by connections; without it the second write of a response may wait 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = f"see who has it with 'ss -ltnp sport = :{port}', or set another server.port"
            raise HostError(f"port {port} on {host} is in use", remedy=remedy) from error
        raise HostError(f"cannot listen on {host} port {port}: {error.strerror}", remedy="check server.host") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _run_lock(settings: Settings) -> Iterator[None]:
    if settings.paths.run.resolve() == settings.paths.state.resolve():
        yield
        return
    with DirectoryLock(settings.paths.run):
        yield


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again before the sandboxes are gone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def uvicorn_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        Stoppable(app),
        http=BoundedHttp,
        ws="websockets-sansio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(settings.server.drain_seconds),
        ws_max_size=16 << 20,
    )


async def _serve(settings: Settings, listener: socket.socket, on_ready: Ready, watch_stop: Stop | None) -> None:
    async with application(settings) as app:
        server = _Server(uvicorn_config(app, settings))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        if watch_stop is not None:
            watch_stop(server.stop)
        gc.collect()
        gc.freeze()  # what is loaded now stays: the collector need not look at it again
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await _answers(listener)
            on_ready(url_of(listener), secrets_dir(settings.paths.state) / KEY_FILE)
        except BaseException:
            server.stop()
            raise
        finally:
            await serving


async def _answers(listener: socket.socket) -> None:
    """Return when the server answers a request of its own. Raises `HostError`."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        async with asyncio.timeout(SELF_CHECK_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
    except (OSError, TimeoutError) as error:
        raise HostError(f"the server does not answer on {host} port {port}: {error}") from error
    if b" 204 " not in status:
        raise HostError(f"the server answers its own health check with {status!r}")
