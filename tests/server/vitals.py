"""Whether a server stays well while something is done to it: a probe and a real use, over and over."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from sandyard.server.envd.connect import frame
from tests.server.conftest import LiveServer

PAUSE = 0.05


@dataclass(slots=True)
class Vitals:
    """Seconds that each probe (`GET /health`) and each use (create, exec, delete) took; what went wrong."""

    probes: list[float] = field(default_factory=list)
    uses: list[float] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def check(self, *, probe: float, use: float) -> None:
        """No trouble, and the slowest of each within these seconds."""
        assert not self.troubles, self.troubles[:5]
        assert self.probes, "never probed"
        assert self.uses, "never used"
        assert max(self.probes) < probe, f"a health probe took {max(self.probes):.2f} s"
        assert max(self.uses) < use, f"create and exec took {max(self.uses):.2f} s"


@contextmanager
def watched(server: LiveServer) -> Iterator[Vitals]:
    """Probe and use the server from a thread of its own until the block ends; the event loop's complaints count."""
    vitals, stop = Vitals(), threading.Event()

    def complain(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        vitals.troubles.append(f"event loop: {context.get('message')} {context.get('exception')!r}")

    def run() -> None:
        with server.client() as api:
            while not stop.is_set():
                try:
                    _look(api, vitals)
                except (httpx.HTTPError, AssertionError, ValueError) as error:
                    vitals.troubles.append(repr(error))
                stop.wait(PAUSE)

    server.loop.call_soon_threadsafe(server.loop.set_exception_handler, complain)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield vitals
    finally:
        stop.set()
        thread.join()


def _look(api: httpx.Client, vitals: Vitals) -> None:
    began = time.monotonic()
    assert api.get("/health").status_code == 204
    vitals.probes.append(time.monotonic() - began)
    began = time.monotonic()
    made = api.post("/sandboxes", json={"templateID": "base", "timeout": 60, "metadata": {"vitals": "1"}})
    assert made.status_code == 201, made.text
    sandbox_id = made.json()["sandboxID"]
    start = frame(json.dumps({"process": {"cmd": "echo", "args": ["alive"]}, "stdin": False}).encode())
    headers = {"content-type": "application/connect+json", "e2b-sandbox-id": sandbox_id}
    reply = api.post("/process.Process/Start", content=start, headers=headers)
    assert b"YWxpdmUK" in reply.content, reply.content
    assert api.delete(f"/sandboxes/{sandbox_id}").status_code == 204
    vitals.uses.append(time.monotonic() - began)
