"""The extension of a node over HTTP: `POST {url}/sandbox-hook/{hook}`, as AgentENV has it.

| hook | when | a failure |
|---|---|---|
| start-fresh | a sandbox was made, before its caller gets it | fails the create; nothing is left of the sandbox |
| start-resume | a paused sandbox goes on | fails the resume |
| patch-params | a caller patches the sandbox's parameters | fails the call; the parameters stay |
| stop | a sandbox was paused or is no more | is logged |

A failure is no connection, no answer in `extension.timeout_ms`, or a status other than 2xx. Each start
has a new `sandboxInstanceId`, and the stop that belongs to it carries the same one.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import structlog

from sandyard.config import ExtensionSettings
from sandyard.errors import BadRequest, CreateFailed, SandboxError, Unsupported
from sandyard.sandboxes import Sandbox

log = structlog.get_logger("sandyard.extension")

ANSWER_LIMIT = 1 << 20
SAID_LIMIT = 300  # characters of a refusal that are passed on
PARAMS, INSTANCE = "params", "instance"


class HookFailed(Exception):
    """The extension could not be reached, or refused. The message says how."""


class Hooks:
    """An `Extension` over HTTP. `close` waits for the stops that are under way."""

    def __init__(self, url: str, timeout_ms: int) -> None:
        self._url = url.rstrip("/")
        self._seconds = timeout_ms / 1000
        self._client = httpx.AsyncClient(timeout=self._seconds, trust_env=False)
        self._stops: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, settings: ExtensionSettings) -> Hooks | None:
        return cls(settings.url, settings.timeout_ms) if settings.url else None

    async def started(self, sandbox: Sandbox, *, fresh: bool) -> None:
        """Raises `CreateFailed` or, for a resume, `SandboxError`."""
        _take_instance(sandbox)  # a fork has that of its parent
        instance = str(uuid.uuid4())
        network = sandbox.instance.spec.network
        body = {
            **_who(sandbox.id, instance),
            "networkNamespacePath": str(network) if network is not None else None,
            "hostInteractionIp": None,  # the host reaches a sandbox through its agent
            "customExtensionParams": params_of(sandbox),
        }
        hook = "start-fresh" if fresh else "start-resume"
        try:
            await self._call(hook, body)
        except HookFailed as failure:
            if fresh:
                raise CreateFailed("extension", str(failure)) from failure
            raise SandboxError(f"sandbox {sandbox.id} was not resumed: {failure}") from failure
        sandbox.extension = {**sandbox.extension, INSTANCE: instance}

    def stopped(self, sandbox: Sandbox) -> None:
        instance = _take_instance(sandbox)
        if instance is None:
            return  # its start was refused, or its stop was told
        task = asyncio.create_task(self._stop(sandbox.id, instance))
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def patched(self, sandbox: Sandbox, patch: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters as the extension wants them after `patch`. Raises `BadRequest`."""
        try:
            answer = await self._call("patch-params", {"sandboxId": sandbox.id, "patch": patch})
        except HookFailed as failure:
            raise BadRequest(f"the parameters stay as they were: {failure}") from failure
        params = answer.get("customExtensionParams")
        if not isinstance(params, dict):
            raise BadRequest("the parameters stay as they were: the extension answered without customExtensionParams")
        return _tellable(params)

    async def close(self) -> None:
        await asyncio.gather(*self._stops)
        await self._client.aclose()

    async def _stop(self, sandbox_id: str, instance: str) -> None:
        try:
            await self._call("stop", _who(sandbox_id, instance))
        except HookFailed as failure:
            log.warning("the extension was not told of a stop", sandbox=sandbox_id, error=str(failure))

    async def _call(self, hook: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the extension answers. Raises `HookFailed`."""
        try:
            async with asyncio.timeout(self._seconds), self._stream(hook, body) as answer:
                data = await _read(answer, hook)
        except TimeoutError as error:
            raise HookFailed(f"extension hook {hook} did not answer within {self._seconds:g} s") from error
        except httpx.HTTPError as error:
            raise HookFailed(f"extension hook {hook}: {error or type(error).__name__}") from error
        return _object(data)

    def _stream(self, hook: str, body: Mapping[str, Any]) -> AbstractAsyncContextManager[httpx.Response]:
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return self._client.stream("POST", f"{self._url}/sandbox-hook/{hook}", content=content, headers=headers)


def params_of(sandbox: Sandbox) -> dict[str, Any]:
    """What callers set for the extension; empty where they set nothing."""
    return dict(sandbox.extension.get(PARAMS) or {})


def checked_params(params: Mapping[str, Any], hooks: Hooks | None) -> dict[str, Any]:
    """What a new sandbox keeps of them. Raises `BadRequest`, and `Unsupported` where no extension would read them."""
    if params and hooks is None:
        raise Unsupported("customExtensionParams: this node has no extension", remedy="set extension.url")
    return {PARAMS: _tellable(params)} if params else {}


def _tellable(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that an answer can hold. Python reads more as JSON than JSON is. Raises `BadRequest`."""
    try:
        json.dumps(params, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"customExtensionParams: not JSON: {error}", field="customExtensionParams") from error
    return dict(params)


def _take_instance(sandbox: Sandbox) -> str | None:
    """The id of the instance that runs, which the sandbox then has no more; None where it has none."""
    instance = sandbox.extension.get(INSTANCE)
    sandbox.extension = {name: value for name, value in sandbox.extension.items() if name != INSTANCE}
    return str(instance) if instance is not None else None


def _who(sandbox_id: str, instance: str) -> dict[str, Any]:
    return {"sandboxId": sandbox_id, "sandboxInstanceId": instance}


async def _read(answer: httpx.Response, hook: str) -> bytes:
    data = b""
    async for chunk in answer.aiter_bytes():
        data += chunk
        if len(data) > ANSWER_LIMIT:
            raise HookFailed(f"extension hook {hook} answered with more than {ANSWER_LIMIT} bytes")
    if not answer.is_success:
        said = data[:SAID_LIMIT].decode("utf-8", "replace").strip()
        raise HookFailed(f"extension hook {hook} answered {answer.status_code}" + (f": {said}" if said else ""))
    return data


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}  # only patch-params needs an answer, and misses it
    return value if isinstance(value, dict) else {}
