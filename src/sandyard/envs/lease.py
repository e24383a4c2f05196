"""A dead man's lease: sandboxes that die with the process that asked for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from sandyard.connection import Connection, resolve_connection
from sandyard.envs.attribution import capacity_error
from sandyard.errors import BadRequest, CapacityError, NotFound, SandboxError, SandyardError, Unauthorized

logger = logging.getLogger(__name__)

LEASE_KEY = "sandyard.lease"
_REQUEST_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many sandboxes the server has room for. `free` counts what a create could have now."""

    max_sandboxes: int
    running: int
    warm: int
    free: int


class SandboxLease:
    """`async with SandboxLease(...) as lease`: creates carry `lease.metadata`.

    The lease is renewed in the background every third of `ttl` seconds. When this process dies, the
    server kills every sandbox of the lease within `ttl`; on exit they are killed at once. `warm`
    (template: count) asks the server to have sandboxes ready for a burst. A renewal that fails is
    logged and tried again until the lease is over; `lost` then says so.
    """

    def __init__(
        self,
        connection: Connection | None = None,
        *,
        ttl: float = 60.0,
        labels: Mapping[str, str] | None = None,
        warm: Mapping[str, int] | None = None,
    ) -> None:
        self.connection = connection or resolve_connection()
        self.ttl = ttl
        self.labels = dict(labels or {})
        self.warm = dict(warm or {})
        self.lost = False
        self._lease_id: str | None = None
        self._client: httpx.AsyncClient | None = None
        self._renewing: asyncio.Task[None] | None = None

    @property
    def lease_id(self) -> str:
        if self._lease_id is None:
            raise BadRequest("the lease is not held", remedy="use it inside `async with`")
        return self._lease_id

    @property
    def metadata(self) -> dict[str, str]:
        """What a create must carry to belong to the lease."""
        return {LEASE_KEY: self.lease_id}

    async def __aenter__(self) -> SandboxLease:
        """Raises `Unauthorized`, `CapacityError`, `BadRequest` or `SandboxError` (no server there)."""
        self._client = httpx.AsyncClient(
            base_url=self.connection.api_url, headers=self.connection.headers(), timeout=_REQUEST_TIMEOUT
        )
        try:
            warm = [{"templateID": template, "count": count} for template, count in self.warm.items()]
            answer = await self._request("POST", "/leases", {"ttl": self.ttl, "labels": self.labels, "warm": warm})
            self._lease_id = str(_field(answer, "leaseID"))
        except BaseException:
            await self._client.aclose()
            raise
        self._renewing = asyncio.create_task(self._renew_for_ever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.ensure_future(self._end()))

    async def capacity(self) -> Capacity:
        answer = await self._request("GET", "/capacity")
        return Capacity(*(int(_field(answer, key)) for key in ("maxSandboxes", "running", "warm", "free")))

    async def _end(self) -> None:
        assert self._client is not None
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        try:
            await self._request("DELETE", f"/leases/{self.lease_id}")
        except NotFound:
            logger.debug("lease %s was over already", self.lease_id)
        except SandyardError as failure:
            logger.warning("lease %s was not ended, it runs out in %g s: %s", self.lease_id, self.ttl, failure)
        finally:
            await self._client.aclose()

    async def _renew_for_ever(self) -> None:
        while not self.lost:
            await asyncio.sleep(self.ttl / 3)
            try:
                await self._request("POST", f"/leases/{self.lease_id}/renew")
            except NotFound:
                self.lost = True
                logger.error("lease %s is over: the server no longer knows it; its sandboxes are gone", self.lease_id)
            except SandyardError as failure:
                logger.warning("lease %s could not be renewed, trying again: %s", self.lease_id, failure)

    async def _request(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        assert self._client is not None
        try:
            answer = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise SandboxError(f"{self.connection.api_url} does not answer: {error or type(error).__name__}") from error
        if answer.status_code >= 400:
            raise _refusal(method, path, answer)
        return _body(method, path, answer)


def _body(method: str, path: str, answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json() if answer.content else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SandboxError(f"{method} {path}: the answer is not Sandyard's: {answer.text[:100]!r}")
    return found


def _field(answer: Mapping[str, Any], name: str) -> Any:
    if name not in answer:
        raise SandboxError(f"the server's answer has no {name}: it is not a Sandyard server, or another version")
    return answer[name]


def _refusal(method: str, path: str, answer: httpx.Response) -> SandyardError:
    try:
        message = str(answer.json().get("message", answer.text))
    except (ValueError, AttributeError):
        message = answer.text[:300]
    text = f"{method} {path}: {answer.status_code} {message}"
    if answer.status_code in (401, 403):
        return Unauthorized(text, remedy="check E2B_API_KEY")
    if answer.status_code == 404:
        return NotFound(text)
    if answer.status_code in (429, 503):
        wait = answer.headers.get("Retry-After", "")
        refused = capacity_error(text)
        return CapacityError(refused.message, retry_after=float(wait)) if wait.isdigit() else refused
    return BadRequest(text) if answer.status_code < 500 else SandboxError(text)
