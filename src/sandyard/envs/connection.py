"""Which server, with which key: from arguments, else from the environment, never from a default.

| setting | what |
|---|---|
| `AENV_API_URL`, `E2B_API_URL` | the API; both may be set if they agree |
| `E2B_SANDBOX_URL` | where sandbox traffic goes; default: the API's URL, which is right for Sandyard |
| `E2B_DOMAIN` | instead of the URLs: a deployment with wildcard DNS |
| `E2B_API_KEY`, `AENV_API_KEY` | the key |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sandyard.errors import ConfigError

_HOSTED = "e2b.app"


@dataclass(frozen=True, slots=True)
class Connection:
    """A server and its key. `sandbox_url` is None where the deployment routes by host name."""

    api_url: str
    api_key: str = field(repr=False)
    sandbox_url: str | None = None
    domain: str | None = None

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
) -> Connection:
    """Raises `ConfigError` naming the setting that is missing or contradicts another."""
    environ = os.environ if environ is None else environ
    domain = environ.get("E2B_DOMAIN") or None
    url = api_url or _one_of(environ, "AENV_API_URL", "E2B_API_URL") or (f"https://api.{domain}" if domain else None)
    if url is None:
        raise ConfigError(
            "no sandbox server is set", remedy="start `sandyard serve` and set AENV_API_URL (or E2B_API_URL) to its URL"
        )
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"the sandbox server's URL {url!r} is not an http(s) URL")
    key = api_key or environ.get("E2B_API_KEY") or environ.get("AENV_API_KEY")
    if not key:
        raise ConfigError(f"no key for the sandbox server {url}", remedy="set E2B_API_KEY (see `sandyard auth`)")
    by_host_name = domain is not None or (parts.hostname == _HOSTED or parts.hostname.endswith("." + _HOSTED))
    traffic = sandbox_url or environ.get("E2B_SANDBOX_URL") or (None if by_host_name else url)
    return Connection(url.rstrip("/"), key, traffic.rstrip("/") if traffic else None, domain)


def _one_of(environ: Mapping[str, str], first: str, second: str) -> str | None:
    one, other = environ.get(first) or None, environ.get(second) or None
    if one and other and one.rstrip("/") != other.rstrip("/"):
        raise ConfigError(f"{first} and {second} name different servers: {one} and {other}", remedy="set one of them")
    return one or other
