"""Where the server is and with which key: one rule for the command line, the envs and the recipes.

| setting | what |
|---|---|
| `AENV_API_URL`, `E2B_API_URL` | the API; both may be set if they agree |
| `E2B_SANDBOX_URL` | where sandbox traffic goes; default: the API's URL, which is right for Sandyard |
| `E2B_DOMAIN` | instead of the URLs: a deployment with wildcard DNS |
| `E2B_API_KEY`, `AENV_API_KEY` | the key |

An argument wins over the environment, that over the file `sandyard auth` wrote, that over a server on
this machine (127.0.0.1:8000 with the key it generated). Nothing is ever sent to a host that was not
named, and a stored or generated key never travels to another host than its own.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sandyard.config import Settings, load_settings
from sandyard.errors import ConfigError

LOCAL_URL = "http://127.0.0.1:8000"
_HOSTED = "e2b.app"  # routes sandbox traffic by host name


@dataclass(frozen=True, slots=True)
class Connection:
    """A server and its key. `sandbox_url` is None where the deployment routes by host name."""

    api_url: str
    api_key: str = field(repr=False)
    sandbox_url: str | None = None
    domain: str | None = None

    @classmethod
    def to(cls, server: Any) -> Connection:
        """To an embedded server, or anything else with `url` and `api_key`."""
        return cls(server.url, server.api_key, server.url)

    def sdk_options(self) -> dict[str, Any]:
        """Keyword arguments for the E2B SDK that leave nothing to its own look at the environment."""
        options: dict[str, Any] = {"api_url": self.api_url, "api_key": self.api_key, "debug": False}
        if self.sandbox_url is not None:
            options["sandbox_url"] = self.sandbox_url
        if self.domain is not None:
            options["domain"] = self.domain
        return options

    def headers(self) -> dict[str, str]:
        return {"X-API-Key": self.api_key}


def resolve_connection(
    api_url: str | None = None,
    api_key: str | None = None,
    *,
    sandbox_url: str | None = None,
    environ: Mapping[str, str] | None = None,
    settings: Settings | None = None,
) -> Connection:
    """Find the server. Raises `ConfigError` naming the setting that is missing or contradicts another."""
    environ = os.environ if environ is None else environ
    domain = environ.get("E2B_DOMAIN") or None
    stored = read_credentials(environ)
    named = api_url or named_url(environ) or (f"https://api.{domain}" if domain else None)
    url = (named or (stored.api_url if stored else LOCAL_URL)).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"the server's URL {url!r} is not an http(s) URL", remedy="write it as http://host:port")
    key = api_key or environ.get("E2B_API_KEY") or environ.get("AENV_API_KEY") or _own_key(url, stored, settings)
    if not key:
        raise ConfigError(f"no API key for {url}", remedy="run `sandyard auth` or set E2B_API_KEY")
    by_host_name = domain is not None or parts.hostname == _HOSTED or parts.hostname.endswith("." + _HOSTED)
    traffic = sandbox_url or environ.get("E2B_SANDBOX_URL") or (None if by_host_name else url)
    return Connection(url, key, traffic.rstrip("/") if traffic else None, domain)


def named_url(environ: Mapping[str, str]) -> str | None:
    """The API's URL that the environment names, if it names one. Raises `ConfigError` if it names two."""
    one, other = environ.get("AENV_API_URL") or None, environ.get("E2B_API_URL") or None
    if one and other and one.rstrip("/") != other.rstrip("/"):
        raise ConfigError(
            f"AENV_API_URL and E2B_API_URL name different servers: {one} and {other}", remedy="set one of them"
        )
    return one or other


def _own_key(url: str, stored: Connection | None, settings: Settings | None) -> str | None:
    if stored is not None and stored.api_url == url:
        return stored.api_key
    return local_key(settings or load_settings()) if url == LOCAL_URL else None


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


def is_loopback(host: str) -> bool:
    """Whether a host, by what its name says, is this machine alone: `127.example` is not."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
