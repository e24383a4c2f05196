"""A server of one's own for a script or a test: on a free port, gone when the script is."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from sandyard.config import Settings, load_settings
from sandyard.errors import HostError

STOP_SECONDS = 30.0
DRAIN_SECONDS = 2.0  # its only client is the process that stops it


class EmbeddedServer:
    """Context manager (sync and async) around a server in a child process.

    `settings` None: those of this machine; the port is a free one whatever they say. The child
    stops gracefully at the end of the context, and also when this process dies, however it dies.
    Raises `HostError` with the child's own words when it does not become ready in `ready_seconds`.
    """

    def __init__(self, settings: Settings | None = None, *, ready_seconds: float = 60.0) -> None:
        base = settings or load_settings()
        drain = min(base.server.drain_seconds, DRAIN_SECONDS)
        server = base.server.model_copy(update={"host": "127.0.0.1", "port": 0, "drain_seconds": drain})
        self._settings = base.model_copy(update={"server": server})
        self._ready_seconds = ready_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._url = ""
        self._api_key = ""

    @property
    def url(self) -> str:
        return self._url

    @property
    def api_key(self) -> str:
        return self._api_key

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def environment(self) -> dict[str, str]:
        """What an E2B SDK reads to find this server."""
        return {"E2B_API_URL": self._url, "E2B_SANDBOX_URL": self._url, "E2B_API_KEY": self._api_key}

    def start(self) -> Self:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._child = subprocess.Popen(
            [sys.executable, "-m", "sandyard.server", "--embedded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # a Ctrl-C at the terminal is for the parent, which then stops the child
        )
        try:
            ready = self._handshake(self._child)
            self._url = ready["url"]
            self._api_key = Path(ready["key_file"]).read_text().strip()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop gracefully; kill what does not stop in time. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.close()
            try:
                child.wait(self._settings.server.drain_seconds + STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def errors(self) -> str:
        """What the child has written to stderr so far."""
        if self._stderr is None:
            return ""
        self._stderr.seek(0)
        return self._stderr.read().decode("utf-8", "replace").strip()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.stop))

    def _handshake(self, child: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(self._settings.model_dump_json().encode() + b"\n")
        child.stdin.flush()
        watchdog = threading.Timer(self._ready_seconds, child.kill)
        watchdog.start()
        try:
            line = child.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            child.wait()
            words = self.errors().splitlines() or [f"no answer in {self._ready_seconds:g} s"]
            raise HostError(f"the embedded server did not start: {words[-1]}")
        ready: dict[str, Any] = json.loads(line)
        return ready
