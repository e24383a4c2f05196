"""`filesystem.Filesystem`: look at files, move them, make and remove them."""

from __future__ import annotations

import asyncio

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest.base import FileInfo, FileType
from sandyard.server.envd.call import Call
from sandyard.server.envd.connect import Message, RpcError, number, text, to_json
from sandyard.server.envd.entries import entry

LIST_STEP = 200


async def stat(call: Call, message: Message) -> Message:
    path = await _path(call, message, "path")
    return {"entry": entry(await _stat(call, path))}


async def make_dir(call: Call, message: Message) -> Message:
    path = await _path(call, message, "path")
    try:
        await call.sandbox.agent.make_dir(path, user=call.user_name())
    except GuestError as error:
        if error.code is GuestErrorCode.EXISTS and await _is_directory(call, path):
            raise RpcError("already_exists", f"directory already exists: {path}") from error
        if error.code in (GuestErrorCode.EXISTS, GuestErrorCode.NOT_DIRECTORY):
            raise RpcError("invalid_argument", f"path already exists but it is not a directory: {path}") from error
        raise
    return {"entry": entry(await _stat(call, path))}


async def move(call: Call, message: Message) -> Message:
    source = await _path(call, message, "source")
    destination = await _path(call, message, "destination")
    try:
        await call.sandbox.agent.move(source, destination, user=call.user_name())
    except GuestError as error:
        if error.code is GuestErrorCode.NOT_FOUND:
            raise RpcError("not_found", f"source file not found: {source}") from error
        raise
    return {"entry": entry(await _stat(call, destination))}


async def list_dir(call: Call, message: Message) -> bytes:
    path = await _path(call, message, "path")
    # A listing is bounded but large, and a client may ask for it as often as it likes.
    async with call.guest.listings:
        return await _list_dir(call, path, number(message, "depth") or 1)


async def _list_dir(call: Call, path: str, depth: int) -> bytes:
    try:
        infos = await call.sandbox.agent.list_dir(path, depth)
    except GuestError as error:
        if error.code is GuestErrorCode.NOT_FOUND:
            raise RpcError("not_found", f"directory not found: {path}") from error
        if error.code is GuestErrorCode.NOT_DIRECTORY:
            raise RpcError("invalid_argument", f"path is not a directory: {path}") from error
        raise
    parts = []
    for at in range(0, len(infos), LIST_STEP):
        parts += [to_json(entry(info)) for info in infos[at : at + LIST_STEP]]
        await asyncio.sleep(0)  # others want to be served too
    return b'{"entries":[' + b",".join(parts) + b"]}"


async def remove(call: Call, message: Message) -> Message:
    await call.sandbox.agent.remove(await _path(call, message, "path"))
    return {}


async def _path(call: Call, message: Message, name: str) -> str:
    return await call.guest.path(await call.user(), text(message, name))


async def _stat(call: Call, path: str) -> FileInfo:
    try:
        return await call.sandbox.agent.stat(path)
    except GuestError as error:
        if error.code in (GuestErrorCode.NOT_FOUND, GuestErrorCode.NOT_DIRECTORY):
            raise RpcError("not_found", f"file not found: {path}") from error
        raise


async def _is_directory(call: Call, path: str) -> bool:
    info = await call.sandbox.agent.stat(path)
    return FileType.DIRECTORY in (info.type, info.target_type)
