"""A registry, as the OCI distribution specification has it: tokens, manifests, blobs that go on after a break."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import httpx

from sandyard.config import Settings
from sandyard.connection import is_loopback
from sandyard.errors import ConfigError
from sandyard.images.oci.base import MANIFEST_LIMIT, OnBytes, Source, SourceError
from sandyard.images.oci.manifest import ACCEPTED, Descriptor

_TRIES = 4
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_CHALLENGE = re.compile(r'\b(\w{1,32})="([^"]*)"')
_CHALLENGE_LIMIT = 8192  # characters
_TOKEN_LIMIT = 1 << 20  # bytes of what a token service answers
_FAILURES = (httpx.HTTPError, httpx.InvalidURL)


class Credentials:
    """User and password by registry, from a file as `docker login` writes it."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        self._entries = entries

    @classmethod
    def load(cls, settings: Settings) -> Credentials:
        """Raises `ConfigError` for a file that was named and cannot be used."""
        named = settings.images.auth_file
        path = named or Path.home() / ".docker" / "config.json"
        try:
            auths = json.loads(path.read_text()).get("auths", {})
        except FileNotFoundError as error:
            if named is not None:
                raise ConfigError(f"images.auth_file: {path} does not exist") from error
            return cls({})
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"credentials {path}: {error}", remedy="write it anew with 'docker login'") from error
        return cls({_host(name): entry["auth"] for name, entry in auths.items() if entry.get("auth")})

    def of(self, registry: str) -> tuple[str, str] | None:
        try:
            user, colon, password = base64.b64decode(self._entries[registry]).decode().partition(":")
        except (KeyError, binascii.Error, UnicodeDecodeError):
            return None
        return (user, password) if colon else None


class _Unreachable(SourceError):
    """No answer, or one that says to come again."""


class RegistrySource(Source):
    """One repository of one registry, reached by `transport` if one is given, which is then this object's own.
    Use from one event loop; `close` it."""

    def __init__(
        self,
        registry: str,
        path: str,
        credentials: tuple[str, str] | None,
        *,
        plain_http: bool,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name = f"{registry}/{path}"
        self._registry = registry
        self._path = path
        self._credentials = credentials
        scheme = "http" if plain_http or _loopback(registry) else "https"
        self._base = f"{scheme}://{registry}/v2/{path}"
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, follow_redirects=True, transport=transport)
        self._authorization: str | None = None

    async def manifest(self, version: str) -> bytes:
        url = f"{self._base}/manifests/{version}"
        response = await self._get(url, {"accept": ", ".join(ACCEPTED)})
        try:
            if response.status_code != 200:
                raise SourceError(f"{self.name}: {_why(response.status_code, f'manifest of {version}')}")
            data = b""
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > MANIFEST_LIMIT:
                    raise SourceError(f"{self.name}: the manifest passes {MANIFEST_LIMIT} bytes")
            return data
        except httpx.HTTPError as error:
            raise SourceError(f"{self.name}: {_said(error)}") from error
        finally:
            await response.aclose()

    async def fetch(self, blob: Descriptor, target: Path, on_bytes: OnBytes) -> None:
        """Goes on where it stopped, a few times, when the connection breaks."""
        problem = ""
        with target.open("xb") as file:
            for attempt in range(_TRIES):
                if attempt:
                    await asyncio.sleep(0.5 * 2**attempt)
                try:
                    await self._more(blob, file, on_bytes)
                    if file.tell() >= blob.size:
                        return
                    problem = f"it ends after {file.tell()} of {blob.size} bytes"
                except httpx.HTTPError as error:
                    problem = _said(error)
                except _Unreachable as error:
                    problem = error.message.removeprefix(f"{self.name}: ")
        raise SourceError(f"{self.name}: blob {blob.digest}: {problem}")

    async def close(self) -> None:
        await self._client.aclose()

    async def _more(self, blob: Descriptor, out: IO[bytes], on_bytes: OnBytes) -> None:
        start = out.tell()
        headers = {"range": f"bytes={start}-"} if start else {}
        response = await self._get(f"{self._base}/blobs/{blob.digest}", headers)
        try:
            if start and response.status_code == 200:  # it does not know ranges: from the beginning
                out.seek(0)
                out.truncate()
                on_bytes(-start)
            elif response.status_code not in (200, 206):
                kind = _Unreachable if response.status_code in (429, 500, 502, 503, 504) else SourceError
                raise kind(f"{self.name}: {_why(response.status_code, f'blob {blob.digest}')}")
            # Raw: a proxy that packs the answer would change the content that the digest is of.
            async for chunk in response.aiter_raw():
                if out.tell() + len(chunk) > blob.size:
                    raise SourceError(f"{self.name}: blob {blob.digest} is longer than {blob.size} bytes")
                out.write(chunk)
                on_bytes(len(chunk))
        finally:
            await response.aclose()

    async def _get(self, url: str, headers: Mapping[str, str]) -> httpx.Response:
        response = await self._send(url, headers)
        if response.status_code == 401:
            challenge = response.headers.get("www-authenticate", "")
            await response.aclose()
            await self._authorize(challenge)
            response = await self._send(url, headers)
        return response

    async def _send(self, url: str, headers: Mapping[str, str]) -> httpx.Response:
        sent = {"accept-encoding": "identity", **headers}
        if self._authorization is not None:
            sent["authorization"] = self._authorization
        try:
            return await self._client.send(self._client.build_request("GET", url, headers=sent), stream=True)
        except _FAILURES as error:
            raise _Unreachable(f"{self.name}: {_said(error)}") from error

    async def _authorize(self, challenge: str) -> None:
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic" and self._credentials is not None:
            self._authorization = _basic(*self._credentials)
        elif kind.lower() == "bearer":
            self._authorization = await self._token(dict(_CHALLENGE.findall(rest[:_CHALLENGE_LIMIT])))
        else:
            raise SourceError(f"{self.name}: 401: credentials are needed", remedy="see images.auth_file")

    async def _token(self, challenge: Mapping[str, str]) -> str:
        """A token as the registry says where to get one (distribution specification, "Token authentication")."""
        realm = challenge.get("realm", "")
        if not realm.startswith(("http://", "https://")):
            raise SourceError(f"{self.name}: 401 with the realm '{realm}'")
        if self._credentials is not None and realm.startswith("http:") and self._base.startswith("https:"):
            raise SourceError(f"{self.name}: its token service has no TLS; the password is not sent there")
        query = {"service": challenge.get("service", ""), "scope": f"repository:{self._path}:pull"}
        try:
            document = json.loads(await self._answer(realm, query) or b"{}")
        except (*_FAILURES, ValueError, RecursionError) as error:
            raise SourceError(f"{self.name}: no token: {_said(error)}") from error
        fields = document if isinstance(document, dict) else {}
        token = fields.get("token") or fields.get("access_token")
        if token and not (isinstance(token, str) and token.isascii() and token.isprintable()):
            raise SourceError(f"{self.name}: no token: what its service answers is none")
        if not token:
            known = "the credentials are refused" if self._credentials else "credentials are needed"
            raise SourceError(f"{self.name}: 401: {known}", remedy="see images.auth_file")
        return f"Bearer {token}"

    async def _answer(self, realm: str, query: Mapping[str, str]) -> bytes:
        """What the token service says; nothing where it refuses. Raises `ValueError` where it says too much."""
        headers = {"accept-encoding": "identity"}
        if self._credentials is not None:
            headers["authorization"] = _basic(*self._credentials)
        async with self._client.stream("GET", realm, params=query, headers=headers) as response:
            if response.status_code != 200:
                return b""
            data = b""
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > _TOKEN_LIMIT:
                    raise ValueError(f"the answer passes {_TOKEN_LIMIT} bytes")
            return data


def _basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def _host(name: str) -> str:
    """`https://host/v1/` and `host` are the same to `docker login`."""
    with suppress(ValueError):
        if "://" in name:
            return urlsplit(name).netloc
    return name.partition("/")[0]


def _why(status: int, what: str) -> str:
    reasons = {401: "the credentials are refused", 403: "no permission", 404: f"no {what}", 429: "too many requests"}
    return f"{status}: {reasons.get(status, what)}"


def _said(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"timeout: {'no connection in 10 s' if isinstance(error, httpx.ConnectTimeout) else 'no answer in 30 s'}"
    return str(error) or type(error).__name__


def _loopback(registry: str) -> bool:
    """By what the name says: `127.example` is not of this host."""
    host = registry if registry.endswith("]") else registry.rpartition(":")[0] or registry
    return is_loopback(host.strip("[]"))
