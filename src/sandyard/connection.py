"""Where the server is and with which key: one rule for the command line, the envs and the recipes.

A flag wins over the environment (`AENV_API_URL`, `E2B_API_URL`, `E2B_API_KEY`), that over the file
`sandyard auth` wrote, that over a server on this machine (127.0.0.1:8000 with the key it generated).
Nothing is ever sent to a host that was not named: there is no cloud default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandyard.config import Settings
from sandyard.errors import ConfigError

LOCAL_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Connection:
    api_url: str
    api_key: str
    sandbox_url: str

    def sdk(self) -> dict[str, Any]:
        """Keyword arguments for every call of the `e2b` SDK."""
        return {"api_url": self.api_url, "sandbox_url": self.sandbox_url, "api_key": self.api_key}

    def environment(self) -> dict[str, str]:
        """What another program needs in its environment to reach the same server."""
        return {"E2B_API_URL": self.api_url, "E2B_SANDBOX_URL": self.sandbox_url, "E2B_API_KEY": self.api_key}

    def headers(self) -> dict[str, str]:
        return {"X-API-Key": self.api_key}


def resolve_connection(
    api_url: str | None = None,
    api_key: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    settings: Settings | None = None,
) -> Connection:
    """Find the server. Raises `ConfigError` naming what is missing.

    A stored or generated key is only used for the URL it belongs to: a key never travels to another
    host because a variable was half set.
    """
    environ = os.environ if environ is None else environ
    stored = read_credentials(environ)
    url = (
        api_url or environ.get("AENV_API_URL") or environ.get("E2B_API_URL") or (stored and stored.api_url) or LOCAL_URL
    )
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"server URL {url!r} has no scheme", remedy="write it as http://host:port")
    key = api_key or environ.get("E2B_API_KEY") or environ.get("AENV_API_KEY")
    if not key and stored and stored.api_url == url:
        key = stored.api_key
    if not key and url == LOCAL_URL:
        key = local_key(settings or Settings())
    if not key:
        raise ConfigError(f"no API key for {url}", remedy="run `sandyard auth` or set E2B_API_KEY")
    return Connection(url, key, (environ.get("E2B_SANDBOX_URL") or url).rstrip("/"))


def credentials_path(environ: Mapping[str, str]) -> Path:
    home = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return home / "sandyard" / "credentials"


def read_credentials(environ: Mapping[str, str]) -> Connection | None:
    path = credentials_path(environ)
    try:
        data = json.loads(path.read_text())
        return Connection(data["api_url"], data["api_key"], data["api_url"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"credentials file {path}: {error!r}", remedy="run `sandyard auth` again") from error


def write_credentials(connection: Connection, environ: Mapping[str, str]) -> Path:
    """Store URL and key, readable by this user alone. Replaces the file atomically."""
    path = credentials_path(environ)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"api_url": connection.api_url, "api_key": connection.api_key}, file)
    draft.replace(path)
    return path


def local_key(settings: Settings) -> str | None:
    """The key that a server on this machine generated at its first start, if we may read it."""
    path = settings.paths.state / "secrets" / "api-key"
    try:
        return path.read_text().strip()
    except OSError:
        return None
