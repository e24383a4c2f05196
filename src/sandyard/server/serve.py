"""Running a server: socket, signals, ready line, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvicorn
import uvloop
from starlette.types import ASGIApp

from sandyard.config import Settings
from sandyard.errors import SandyardError
from sandyard.server.build import application
from sandyard.server.listen import (
    Listener,
    answers,
    check_address,
    open_socket,
    open_tls_socket,
    url_of,
    with_public_port,
)
from sandyard.server.lock import DirectoryLock
from sandyard.server.logs import set_up_logs
from sandyard.server.protocol import BoundedHttp, Stoppable
from sandyard.server.tokens import KEY_FILE, secrets_dir

if TYPE_CHECKING:
    from sandyard.server.tls import TlsIdentity

log = structlog.get_logger("sandyard.server")

REFRESH_SECONDS = 6 * 3600.0  # between looks at whether the certificate is due or was replaced
KEEP_ALIVE_SECONDS = 120  # longer than clients keep idle connections, so that they close them and not we

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
    with contextlib.ExitStack() as held:
        state = held.enter_context(DirectoryLock(settings.paths.state))
        held.enter_context(_run_lock(settings))
        plain = held.enter_context(open_socket(settings))
        listeners = [Listener(plain)]
        if settings.server.tls_port is not None:
            from sandyard.server.tls import TlsIdentity  # cryptography takes 0.2 s to load

            listeners.append(Listener(held.enter_context(open_tls_socket(settings)), TlsIdentity(settings)))
            settings = with_public_port(settings, listeners[1].socket)
        state.describe(url_of(plain))
        uvloop.run(_serve(settings, listeners, on_ready, watch_stop))


def print_ready(url: str, key_file: Path) -> None:
    print(f"sandyard is ready at {url}; the API key lies in {key_file}", flush=True)


def tls_hint(domain: str | None, identity: TlsIdentity) -> str:
    """What a client must set to use the TLS port."""
    trust = f" SSL_CERT_FILE={identity.ca} NODE_EXTRA_CA_CERTS={identity.ca}" if identity.ca is not None else ""
    return f"for TLS set E2B_DOMAIN={domain or '<its domain>'}{trust}"


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


def uvicorn_config(app: ASGIApp, settings: Settings, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    config = uvicorn.Config(
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
    config.load()
    config.ssl = tls
    return config


async def _serve(
    settings: Settings, listeners: list[Listener], on_ready: Ready | None, watch_stop: Stop | None
) -> None:
    async with application(settings) as app:
        contexts = [where.tls.context if where.tls else None for where in listeners]
        servers = [_Server(uvicorn_config(app, settings, context)) for context in contexts]

        def stop() -> None:
            for server in servers:
                server.stop()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if watch_stop is not None:
            watch_stop(stop)
        gc.collect()
        gc.freeze()  # what is loaded now stays: the collector need not look at it again
        pairs = zip(servers, listeners, strict=True)
        serving = asyncio.gather(*(server.serve(sockets=[where.socket]) for server, where in pairs))
        refreshing = [asyncio.ensure_future(_refresh(where.tls)) for where in listeners if where.tls]
        try:
            for where in listeners:
                await answers(where)
            _tell_ready(settings, listeners, on_ready, app.made_with)
        except BaseException:
            stop()
            raise
        finally:
            await serving
            for task in refreshing:
                task.cancel()


def _tell_ready(settings: Settings, listeners: list[Listener], on_ready: Ready | None, made_with: str | None) -> None:
    ready = url_of(listeners[0].socket), secrets_dir(settings.paths.state) / KEY_FILE
    if on_ready is not None:
        on_ready(*ready)
        return
    print_ready(*ready)
    if made_with is not None:
        print(f"sandboxes are of runtime {settings.sandbox.runtime}: {made_with}", flush=True)
    for where in listeners:
        if where.tls:
            print(tls_hint(settings.server.domain, where.tls), flush=True)


async def _refresh(tls: TlsIdentity) -> None:
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        try:
            tls.refresh()
        except SandyardError as error:
            log.error("the TLS certificate could not be renewed; the old one is still shown", error=str(error))
