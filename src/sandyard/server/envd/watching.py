"""`filesystem.Filesystem`, the part that watches: `WatchDir` streams, `CreateWatcher` is polled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import Watch, WatchEvent
from sandyard.server.envd.call import Aborted, Call
from sandyard.server.envd.connect import Message, RpcError, end_frame, flag, frame, rpc_error, text
from sandyard.server.envd.entries import entry
from sandyard.server.envd.process import disconnected, keepalive_interval
from sandyard.server.envd.watchers import Watcher, event_message

_KEEPALIVE = frame(b'{"keepalive":{}}')
_START = frame(b'{"start":{}}')


async def watch_dir(call: Call, message: Message) -> None:
    """Stream events until the client, the directory or the sandbox is gone."""
    watcher = await _open(call, message)
    gone = asyncio.ensure_future(disconnected(call))
    dead = asyncio.ensure_future(call.guest.dead.wait())
    event: asyncio.Future[WatchEvent | None] | None = None
    try:
        await call.start(b"application/connect+json")
        await call.write(_START)
        while not gone.done():
            event = event or asyncio.ensure_future(_next(watcher.watch))
            await asyncio.wait(
                (event, gone, dead), timeout=keepalive_interval(call), return_when=asyncio.FIRST_COMPLETED
            )
            if dead.done():
                raise Aborted
            if not event.done():
                await call.write(_KEEPALIVE)
                continue
            happened, event = event.result(), None
            if happened is None:
                await call.finish(end_frame())
                return
            await call.write(frame(json.dumps({"filesystem": await _describe(call, watcher, happened)}).encode()))
    except RpcError as error:
        await call.finish(end_frame(error))
    except GuestError as error:
        await call.finish(end_frame(rpc_error(error)))
    finally:
        for waiting in (gone, dead, event):
            if waiting is not None:
                waiting.cancel()
        await watcher.watch.close()


async def create_watcher(call: Call, message: Message) -> Message:
    call.guest.watchers.check_room()
    return {"watcherId": call.guest.watchers.add(await _open(call, message))}


async def get_watcher_events(call: Call, message: Message) -> Message:
    watcher = call.guest.watchers.get(_watcher_id(message))
    await call.sandbox.agent.hello()  # whatever happened before this call has arrived with the answer
    try:
        events = watcher.watch.pending()
    except AgentLinkError as error:  # it watched over an earlier link
        call.guest.watchers.pop(_watcher_id(message))
        raise RpcError("not_found", f"the watcher was lost: {error}") from error
    return {"events": [await _describe(call, watcher, event) for event in events]}


async def remove_watcher(call: Call, message: Message) -> Message:
    await call.guest.watchers.pop(_watcher_id(message)).watch.close()
    return {}


async def _open(call: Call, message: Message) -> Watcher:
    path = await call.guest.path(await call.user(), text(message, "path"))
    try:
        watch = await call.sandbox.agent.watch(path, recursive=flag(message, "recursive"))
    except GuestError as error:
        if error.code is GuestErrorCode.NOT_FOUND:
            raise RpcError("not_found", f"path {path} does not exist") from error
        if error.code is GuestErrorCode.NOT_DIRECTORY:
            raise RpcError("invalid_argument", f"path {path} is not a directory") from error
        raise
    return Watcher(watch, path, flag(message, "includeEntry"))


async def _next(watch: Watch) -> WatchEvent | None:
    async for event in watch:
        return event
    return None


async def _describe(call: Call, watcher: Watcher, event: WatchEvent) -> Message:
    fields = event_message(event)
    if watcher.with_entries:
        with contextlib.suppress(GuestError):  # it may be gone again; an event without entry says just that
            fields["entry"] = entry(await call.sandbox.agent.stat(posixpath.join(watcher.path, event.name)))
    return fields


def _watcher_id(message: Message) -> str:
    return text(message, "watcherId") or text(message, "watcher_id")
