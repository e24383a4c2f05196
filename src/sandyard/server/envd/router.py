"""Which request to a sandbox's envd is answered by what."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import parse_qsl

from sandyard.errors import BadRequest, GuestError, SandyardError
from sandyard.server.envd import files, filesystem, process, watching
from sandyard.server.envd.call import Aborted, Call
from sandyard.server.envd.connect import (
    FRAME_LIMIT,
    HTTP_STATUS,
    Message,
    RpcError,
    end_frame,
    frame,
    parse_frames,
    parse_message,
    rpc_error,
    stream_messages,
    to_json,
)
from sandyard.server.usage import MIB, UsageHistory
from sandyard.server.web import BodyTooLarge, ClientGone, body_chunks, read_body, respond, respond_error, respond_json

Unary = Callable[[Call, Message], Awaitable[Message | bytes]]  # bytes: JSON already
ServerStream = Callable[[Call, Message], Awaitable[None]]
ClientStream = Callable[[Call, AsyncIterator[Message]], Awaitable[Message]]

UNARY: dict[str, Unary] = {
    "/process.Process/List": process.list_processes,
    "/process.Process/Update": process.update,
    "/process.Process/SendInput": process.send_input,
    "/process.Process/SendSignal": process.send_signal,
    "/process.Process/CloseStdin": process.close_stdin,
    "/filesystem.Filesystem/Stat": filesystem.stat,
    "/filesystem.Filesystem/MakeDir": filesystem.make_dir,
    "/filesystem.Filesystem/Move": filesystem.move,
    "/filesystem.Filesystem/ListDir": filesystem.list_dir,
    "/filesystem.Filesystem/Remove": filesystem.remove,
    "/filesystem.Filesystem/CreateWatcher": watching.create_watcher,
    "/filesystem.Filesystem/GetWatcherEvents": watching.get_watcher_events,
    "/filesystem.Filesystem/RemoveWatcher": watching.remove_watcher,
}
SERVER_STREAMS: dict[str, ServerStream] = {
    "/process.Process/Start": process.start,
    "/process.Process/Connect": process.connect,
    "/filesystem.Filesystem/WatchDir": watching.watch_dir,
}
CLIENT_STREAMS: dict[str, ClientStream] = {"/process.Process/StreamInput": process.stream_input}


class EnvdRouter:
    """Answers one request. Raises `Aborted` where the connection must be broken off, and
    `AgentLinkError` or `SandboxDied` where the sandbox went away before an answer began."""

    def __init__(self, usage: UsageHistory) -> None:
        self._usage = usage

    async def __call__(self, call: Call) -> None:
        path: str = call.scope["path"]
        if call.scope["method"] == "POST":
            if (unary := UNARY.get(path)) is not None:
                await _unary(call, unary)
                return
            if (server_stream := SERVER_STREAMS.get(path)) is not None:
                await _server_stream(call, server_stream)
                return
            if (client_stream := CLIENT_STREAMS.get(path)) is not None:
                await _client_stream(call, client_stream)
                return
        await self._plain(call, call.scope["method"], path)

    async def _plain(self, call: Call, method: str, path: str) -> None:
        if path == "/files" and method in ("GET", "POST"):
            await _files(call, method)
        elif path == "/health" and method == "GET":
            await call.sandbox.agent.hello()
            await respond(call.send, 204)
        elif path == "/metrics" and method == "GET":
            await respond_json(call.send, 200, await self._metrics(call))
        elif path == "/envs" and method == "GET":
            await respond_json(call.send, 200, {**call.sandbox.defaults.env, **call.sandbox.envs})
        elif method == "OPTIONS":
            await respond(call.send, 204, headers=_PREFLIGHT)
        elif path.startswith(("/process.", "/filesystem.")):
            await _rpc_failure(call, RpcError("unimplemented", f"{path} is not implemented"))
        else:
            await respond_error(call.send, 404, f"{method} {path} is not known here")

    async def _metrics(self, call: Call) -> Message:
        sample = await self._usage.now(call.sandbox)
        resources = call.sandbox.resources
        return {
            "ts": int(sample.at),
            "cpu_count": max(round(resources.cpu), 1),
            "cpu_used_pct": sample.cpu_percent,
            "mem_total": resources.memory_mb * MIB,
            "mem_used": sample.usage.memory_bytes,
            "mem_cache": sample.usage.memory_cache_bytes,
            "disk_used": sample.usage.disk_bytes,
            "disk_total": resources.disk_mb * MIB,
        }


_PREFLIGHT = [
    files.CORS,
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-allow-headers", b"*"),
    (b"access-control-max-age", b"7200"),
]


async def _unary(call: Call, method: Unary) -> None:
    try:
        if not call.headers.get(b"content-type", b"").startswith(b"application/json"):
            await respond(call.send, 415)
            return
        result = await method(call, parse_message(await read_body(call.receive, FRAME_LIMIT)))
    except RpcError as error:
        await _rpc_failure(call, error)
    except BodyTooLarge:
        await _rpc_failure(call, RpcError("resource_exhausted", f"request passes {FRAME_LIMIT} bytes"))
    except SandyardError as error:
        await _rpc_failure(call, await _attributed(call, error))
    else:
        await respond(call.send, 200, result if isinstance(result, bytes) else to_json(result))


async def _server_stream(call: Call, method: ServerStream) -> None:
    async def run() -> None:
        buffer = bytearray(await read_body(call.receive, FRAME_LIMIT + 5))
        messages = parse_frames(buffer)
        if len(messages) != 1 or buffer:
            raise RpcError("invalid_argument", "the request must be exactly one message")
        await method(call, messages[0])

    await _stream(call, run)


async def _client_stream(call: Call, method: ClientStream) -> None:
    async def run() -> None:
        result = await method(call, stream_messages(body_chunks(call.receive)))
        await call.start(b"application/connect+json")
        await call.finish(frame(json.dumps(result).encode()) + end_frame())

    await _stream(call, run)


async def _stream(call: Call, run: Callable[[], Awaitable[None]]) -> None:
    if not call.headers.get(b"content-type", b"").startswith(b"application/connect+json"):
        await respond(call.send, 415)
        return
    try:
        await run()
        return
    except RpcError as error:
        failure = error
    except BodyTooLarge:
        failure = RpcError("resource_exhausted", f"request passes {FRAME_LIMIT} bytes")
    except SandyardError as error:
        failure = await _attributed(call, error)
    if call.started:
        raise Aborted
    await call.start(b"application/connect+json")
    await call.finish(end_frame(failure))


async def _attributed(call: Call, error: SandyardError) -> RpcError:
    """The Connect error, unless the sandbox is the cause: then whoever serves the sandbox answers."""
    if await call.guest.lost(error):
        raise error
    return rpc_error(error)


async def _rpc_failure(call: Call, error: RpcError) -> None:
    await respond(call.send, HTTP_STATUS.get(error.code, 500), error.body())


async def _files(call: Call, method: str) -> None:
    query = dict(parse_qsl(call.scope["query_string"].decode("latin-1"), keep_blank_values=True))
    try:
        await (files.download(call, query) if method == "GET" else files.upload(call, query))
    except RpcError as error:
        await respond_error(call.send, HTTP_STATUS.get(error.code, 500), str(error), [files.CORS])
    except files.FileFailure as failure:
        await files.answer_guest_error(call, failure.path, failure.error)
    except (BadRequest, GuestError) as error:
        await respond_error(call.send, 400, str(error), [files.CORS])
    except ClientGone:
        pass  # nobody is left to answer
