"""The root command: registers the nouns, turns errors into one line and an exit status.

Exit status: 0 done; 1 it failed; 2 the call was wrong; `exec` gives the command's own.
"""

from __future__ import annotations

import errno
import importlib
import sys
from typing import NoReturn

import e2b
import httpx
import typer

from sandyard.cli.console import stderr
from sandyard.errors import ClientError, SandyardError

NOUNS = (
    "serve",
    "setup",
    "doctor",
    "conformance",
    "auth",
    "sandbox",
    "snapshot",
    "template",
    "build",
    "pull",
    "store",
    "train",
    "evaluate",
    "openenv",
    "mcp",
    "envs",
)


_HOSTS = {
    errno.ENOSPC: "free space there, or set paths.state and paths.run to a bigger disk",
    errno.EDQUOT: "free space there, or set paths.state and paths.run to a bigger disk",
    errno.EROFS: "set paths.state and paths.run to a disk that can be written",
    errno.EACCES: "run as root",
}  # what the host lacks, wherever it is met


def build_app() -> typer.Typer:
    """The root command with every noun registered."""
    app = typer.Typer(
        name="sandyard",
        help="A self-hosted yard of sandboxes for agentic reinforcement learning.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for noun in NOUNS:
        importlib.import_module(f"sandyard.cli.{noun}").register(app)
    return app


def main() -> None:
    """Entry point of the `sandyard` command."""
    app = build_app()
    try:
        app()  # ends with SystemExit; a wrong call is already answered with its usage
    except SandyardError as error:
        _fail(str(error), 2 if isinstance(error, ClientError) else 1)
    except httpx.HTTPStatusError as error:
        _fail(f"{error.request.url} answered {error.response.status_code}: {error.response.text.strip()}", 1)
    except httpx.TransportError as error:
        _fail(f"no server answers ({error}); start one with `sandyard serve` or set E2B_API_URL", 1)
    except OSError as error:
        if error.errno not in _HOSTS:
            raise  # a fault of the program
        remedy = _HOSTS[error.errno]
        _fail(f"{error.filename or 'on this host'}: {error.strerror}; {remedy}", 1)
    except ModuleNotFoundError as error:
        _fail(f"{error}; install the extras: pip install 'sandyard[server,train,data]'", 1)
    except (e2b.SandboxException, e2b.TemplateException, e2b.AuthenticationException, e2b.RateLimitException) as error:
        _fail(str(error), 1)


def _fail(message: str, status: int) -> NoReturn:
    stderr.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(status)
