"""The store of this machine: through the server that runs on it, else under its lock."""

from __future__ import annotations

import asyncio
import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from sandyard.config import Settings
from sandyard.errors import Conflict, HostError
from sandyard.server.lock import LOCK_FILE, DirectoryLock
from sandyard.server.tokens import KEY_FILE, secrets_dir

if TYPE_CHECKING:
    from sandyard.sandboxes.storage.references import References

T = TypeVar("T")
_STARTING_SECONDS = 30.0  # for a server that has the lock and does not answer yet
_CONNECT_SECONDS = 10.0


def through_server(settings: Settings, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
    """The answer of the server that runs on this state, to a POST or (without a body) a GET; None where there is
    none. Raises `HostError` where it does not answer, or refuses."""
    end = time.monotonic() + _STARTING_SECONDS
    while True:
        url = _server(settings.paths.state)
        if url is None:
            return None
        if url:
            return _ask(settings, url + path, body)
        if time.monotonic() > end:
            raise HostError(f"the server on {settings.paths.state} does not come up", remedy="look at its log")
        time.sleep(0.2)


def alone(settings: Settings, work: Callable[[References], T]) -> T:
    """Do `work` while no server runs here, with what the database names. Raises `Conflict` where one began to."""
    from sandyard.sandboxes.storage.references import recorded
    from sandyard.store import open_store

    async def read() -> References:
        store = await open_store(settings)
        try:
            return await recorded(store)
        finally:
            await store.close()

    with _patient_lock(settings.paths.state):
        return work(asyncio.run(read()))


def make_room(settings: Settings) -> Callable[[int], None]:
    """What a pull asks for room: the server if one runs here, else this process."""

    def collect(count: int) -> None:
        from sandyard.images.garbage.collect import collect as remove
        from sandyard.images.garbage.collect import node_templates

        if through_server(settings, "/store/gc", {"freeBytes": max(count, 0)}) is None:
            alone(settings, lambda known: remove(settings, lambda: node_templates(settings) | known.in_use, free=count))

    return collect


def _ask(settings: Settings, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    key = (secrets_dir(settings.paths.state) / KEY_FILE).read_text().strip()
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)  # to read all that is stored takes its time
    try:
        with httpx.Client(headers={"X-API-Key": key}, timeout=timeout, trust_env=False) as client:
            answer = client.get(url) if body is None else client.post(url, json=body)
    except httpx.TransportError as error:
        raise HostError(f"the server at {url} does not answer: {error}", remedy="see its log, or stop it") from error
    if not answer.is_success:
        raise HostError(f"the server at {url} answered {answer.status_code}: {answer.text.strip()[:300]}")
    found: dict[str, Any] = answer.json()
    return found


def _server(state: Path) -> str | None:
    """The URL of the server that has the lock; empty while it starts, None where nobody has it."""
    try:
        with open(state / LOCK_FILE) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                try:
                    return str(json.loads(file.read())["url"]).rstrip("/")
                except (ValueError, KeyError, TypeError):
                    return ""
    except FileNotFoundError:
        pass
    return None


@contextmanager
def _patient_lock(state: Path) -> Iterator[None]:
    """Another command may have it for a moment."""
    end = time.monotonic() + _STARTING_SECONDS
    while True:
        try:
            lock = DirectoryLock(state)
            break
        except Conflict:
            if _server(state) or time.monotonic() > end:
                raise
            time.sleep(0.1)
    with lock:
        yield
