"""The named watchers of one sandbox, which clients poll."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from sandyard.guest.base import Watch, WatchEvent, WatchEventType
from sandyard.server.envd.connect import Message, RpcError

MAX_WATCHERS = 64

_TYPES = {
    WatchEventType.CREATE: "EVENT_TYPE_CREATE",
    WatchEventType.WRITE: "EVENT_TYPE_WRITE",
    WatchEventType.REMOVE: "EVENT_TYPE_REMOVE",
    WatchEventType.RENAME: "EVENT_TYPE_RENAME",
    WatchEventType.CHMOD: "EVENT_TYPE_CHMOD",
}


def event_message(event: WatchEvent) -> Message:
    """Raises `RpcError` where events were lost: a gap must not look like silence."""
    kind = _TYPES.get(event.type)
    if kind is None:
        raise RpcError("resource_exhausted", "events came faster than they were taken, some are lost")
    return {"name": event.name, "type": kind}


@dataclass(frozen=True, slots=True)
class Watcher:
    """A watch on the directory `path`; `with_entries`: events carry what is there now."""

    watch: Watch
    path: str
    with_entries: bool


class Watchers:
    def __init__(self) -> None:
        self._watchers: dict[str, Watcher] = {}

    def add(self, watcher: Watcher) -> str:
        """The id of the watcher."""
        watcher_id = secrets.token_hex(8)
        self._watchers[watcher_id] = watcher
        return watcher_id

    def check_room(self) -> None:
        """Raises `RpcError` when there are too many already."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise RpcError("resource_exhausted", f"{MAX_WATCHERS} watchers exist already; remove some")

    def get(self, watcher_id: str) -> Watcher:
        """Raises `RpcError(not_found)`."""
        watcher = self._watchers.get(watcher_id)
        if watcher is None:
            raise RpcError("not_found", f"watcher with id {watcher_id} not found")
        return watcher

    def pop(self, watcher_id: str) -> Watcher:
        watcher = self.get(watcher_id)
        del self._watchers[watcher_id]
        return watcher

    def abort(self) -> None:
        """The sandbox is dead, its watches with it."""
        self._watchers.clear()
