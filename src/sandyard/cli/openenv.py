"""`sandyard openenv`: serve an env over OpenEnv's protocol."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from sandyard.cli.console import stdout
from sandyard.connection import is_loopback
from sandyard.errors import ConfigError

if TYPE_CHECKING:
    from sandyard.envs.openenv.server import ServerOptions


def register(app: typer.Typer) -> None:
    noun = typer.Typer(help="Serve envs to OpenEnv clients.", no_args_is_help=True)
    noun.command("serve")(serve)
    app.add_typer(noun, name="openenv")


def serve(
    env: Annotated[
        str,
        typer.Option(help="code, shell, echo, blackjack, guessing, maze, reasoning/DATASET, or module:Class of an Env"),
    ] = "code",
    backend: Annotated[
        str | None, typer.Option(help="what runs the programs of the code env [CODE_RL_BACKEND, else sandbox]")
    ] = None,
    workers: Annotated[int, typer.Option(envvar="WORKERS", help="worker processes", min=1)] = 4,
    max_sessions: Annotated[
        int, typer.Option(envvar="MAX_CONCURRENT_ENVS", help="sessions of each worker", min=1)
    ] = 64,
    host: Annotated[str, typer.Option(envvar="HOST", help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="PORT", help="port to listen on; 0 takes a free one", min=0)] = 8000,
    imports: Annotated[
        str, typer.Option(help="modules that programs may import, by commas, where the back end has a list")
    ] = "",
    idle_timeout: Annotated[float, typer.Option(help="seconds without a request after which a session ends")] = 1800.0,
    step_timeout: Annotated[
        float, typer.Option(help="seconds after which a step is given up and its episode lost")
    ] = 300.0,
    drain: Annotated[float, typer.Option(help="seconds that a stop leaves to running steps", min=0)] = 10.0,
    allow_public: Annotated[
        bool, typer.Option("--allow-public", help="listen on a public address; there are no keys and no TLS here")
    ] = False,
) -> None:
    """Serve an env at ws://HOST:PORT/ws, a session per connection. Stops gracefully on SIGTERM or Ctrl-C."""
    try:
        from sandyard.envs.openenv.catalog import EnvSpec
        from sandyard.envs.openenv.server import ServerOptions
    except ModuleNotFoundError as error:
        raise ConfigError(str(error), remedy="pip install 'sandyard[openenv]'") from error
    if not allow_public and not is_loopback(host):
        raise ConfigError(
            f"{host} is a public address, and whoever reaches it runs programs here",
            remedy="listen on 127.0.0.1, or say --allow-public",
        )
    modules = tuple(name.strip() for name in imports.split(",") if name.strip())
    options = ServerOptions(
        EnvSpec(env, backend, modules),
        host=host,
        port=port,
        workers=workers,
        max_sessions=max_sessions,
        idle_timeout=idle_timeout,
        step_timeout=step_timeout,
        drain=drain,
    )
    asyncio.run(_serve(options))


async def _serve(options: ServerOptions) -> None:
    from sandyard.envs.openenv.server import OpenEnvServer

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with OpenEnvServer(options) as server:
        places = f"{options.workers} workers x {options.max_sessions} sessions"
        stdout.print(f"{options.spec.name} at {server.url}, {places}", markup=False, soft_wrap=True)
        await stop.wait()
