"""The server of the code interpreter, run here as it runs in a sandbox: with real kernels."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import sandyard.interpreter

PROGRAM = Path(sandyard.interpreter.__file__).parent


class Interpreter:
    """A client of one server. `pid` is the server's."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.http = httpx.Client(base_url=url, timeout=30)
        self.pid = process.pid

    def run(self, code: str, **options: Any) -> list[dict[str, Any]]:
        """What an execution says, line by line."""
        reply = self.http.post("/execute", json={"code": code, **options})
        assert reply.status_code == 200, reply.text
        said = [json.loads(line, parse_constant=_refuse) for line in reply.text.splitlines()]
        assert said.pop() == {"type": "end_of_execution"}
        return [item for item in said if item["type"] != "keepalive"]

    def text(self, code: str, **options: Any) -> str:
        """All text of an execution that must not fail: stdout, then the main result."""
        said = self.run(code, **options)
        assert [item for item in said if item["type"] == "error"] == []
        return "".join(item["text"] for item in said if item["type"] == "stdout" or item.get("is_main_result"))

    def error(self, code: str, **options: Any) -> dict[str, Any]:
        """The one error of an execution."""
        (error,) = (item for item in self.run(code, **options) if item["type"] == "error")
        return error

    def context(self, **options: Any) -> dict[str, str]:
        reply = self.http.post("/contexts", json=options)
        assert reply.status_code == 200, reply.text
        made: dict[str, str] = reply.json()
        return made


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    home = tmp_path_factory.mktemp("home")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "program", "--port", str(port), "--home", str(home)]
    with subprocess.Popen(command, cwd=PROGRAM) as process:
        client = Interpreter(f"http://127.0.0.1:{port}", process)
        try:
            until_ready(client)
            yield client
        finally:
            client.http.close()
            process.terminate()


def until_ready(client: Interpreter) -> None:
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline, "the server did not become ready"
        try:
            if client.http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.05)
