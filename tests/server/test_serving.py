"""Starting, refusing to start, stopping."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from sandyard.config import ServerSettings, Settings
from sandyard.errors import ConfigError, Conflict, HostError
from sandyard.server.embedded import EmbeddedServer
from sandyard.server.listen import check_address, open_socket
from sandyard.server.lock import DirectoryLock
from tests.server.conftest import memory_settings
from tests.server.test_data_plane import open_stream, read_on


def test_a_public_address_is_refused_unless_asked_for() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_address(Settings(server=ServerSettings(host=host)))
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="allow_public"):
            check_address(Settings(server=ServerSettings(host=host)))
    check_address(Settings(server=ServerSettings(host="0.0.0.0", allow_public=True)))


def test_a_port_in_use_names_itself_and_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HostError, match=rf"port {port} on 127.0.0.1 is in use; see who"):
            open_socket(Settings(server=ServerSettings.model_validate({"port": port})))


def test_two_servers_on_one_directory_refuse_each_other(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as first:
        first.describe("http://127.0.0.1:1")
        with pytest.raises(Conflict, match=rf"pid {os.getpid()}, http://127.0.0.1:1"):
            DirectoryLock(tmp_path)
    with DirectoryLock(tmp_path):
        pass


@pytest.mark.parametrize(
    ("number", "said", "remedy"),
    [
        (errno.ENOSPC, "No space left", "free space there"),
        (errno.EROFS, "Read-only", "a disk that can be written"),
        (errno.EACCES, "Permission denied", "run as root"),
        (errno.ENOTDIR, "Not a directory", "to directories"),
    ],
)
@pytest.mark.parametrize("step", ["open", "pwrite"])
def test_a_directory_that_takes_nothing_names_itself_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str, remedy: str, step: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"sandyard.server.lock.os.{step}", fail)
    with pytest.raises(HostError, match=f"directory {tmp_path}: {said}") as caught, DirectoryLock(tmp_path) as lock:
        lock.describe("http://127.0.0.1:1")
    assert remedy in (caught.value.remedy or "")


def test_an_embedded_server_serves_and_goes(tmp_path: Path) -> None:
    with EmbeddedServer(memory_settings(tmp_path)) as server:
        environment = server.environment()
        assert environment["E2B_API_URL"] == environment["E2B_SANDBOX_URL"] == server.url
        headers = {"X-API-Key": environment["E2B_API_KEY"]}
        assert httpx.get(f"{server.url}/v2/sandboxes", headers=headers).json() == []
        with pytest.raises(HostError, match=r"a server already runs on .*pid"):
            EmbeddedServer(memory_settings(tmp_path)).start()
        url = server.url
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    server.stop()


def test_what_clients_confide_is_private_on_disk(tmp_path: Path) -> None:
    settings = memory_settings(tmp_path)
    with EmbeddedServer(settings) as server:
        body = {"templateID": "base", "envVars": {"TOKEN": "x"}}
        httpx.post(f"{server.url}/v2/sandboxes", json=body, headers={"X-API-Key": server.api_key})
        files = list(settings.paths.state.glob("sandyard.db*"))
        assert len(files) >= 2
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


async def test_it_is_an_async_context_too(tmp_path: Path) -> None:
    async with EmbeddedServer(memory_settings(tmp_path)) as server, httpx.AsyncClient() as client:
        assert (await client.get(f"{server.url}/health")).status_code == 204


def test_it_dies_with_its_parent_even_when_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from sandyard.server.embedded import EmbeddedServer\n"
        "from sandyard.config import Settings\n"
        "server = EmbeddedServer(Settings.model_validate_json(sys.argv[1])).start()\n"
        "print(server.url, flush=True)\n"
        "time.sleep(600)\n"
    )
    settings = memory_settings(tmp_path).model_dump_json()
    parent = subprocess.Popen([sys.executable, "-c", program, settings], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    url = parent.stdout.readline().strip()
    assert httpx.get(f"{url}/health").status_code == 204
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while True:
        try:
            httpx.get(f"{url}/health")
        except httpx.TransportError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_child(settings: Settings, **more: str) -> tuple[subprocess.Popen[str], str]:
    """A server in a child, and the line that says it is ready."""
    environment = {
        **os.environ,
        "SANDYARD_PATHS__STATE": str(settings.paths.state),
        "SANDYARD_PATHS__RUN": str(settings.paths.run),
        "SANDYARD_SANDBOX__RUNTIME": "memory",
        "SANDYARD_SERVER__PORT": "0",
        **more,
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "sandyard.server"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child, child.stdout.readline()


def test_streams_that_outlast_the_drain_are_reset_without_a_traceback(tmp_path: Path) -> None:
    settings = memory_settings(tmp_path)
    child, ready = start_child(settings, SANDYARD_SERVER__DRAIN_SECONDS="0.5")
    key = (settings.paths.state / "secrets" / "api-key").read_text().strip()
    url = ready.split()[4].rstrip(";")
    made = httpx.post(f"{url}/v2/sandboxes", json={"templateID": "base"}, headers={"X-API-Key": key}).json()
    with open_stream(url, made["sandboxID"], made["envdAccessToken"], ["sleep", "50"]) as stream:
        child.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionResetError):
            read_on(stream)
    out, err = child.communicate(timeout=20)
    assert (child.returncode, out) == (0, "")
    assert "Traceback" not in err
    assert "Cancelled" not in err


def test_serve_says_when_it_is_ready_and_stops_on_sigterm(tmp_path: Path) -> None:
    settings = memory_settings(tmp_path)
    child, ready = start_child(settings)
    key = (settings.paths.state / "secrets" / "api-key").read_text().strip()
    assert ready.startswith("sandyard is ready at http://127.0.0.1:")
    assert key not in ready
    url = ready.split()[4].rstrip(";")
    reply = httpx.post(f"{url}/v2/sandboxes", json={"templateID": "base"}, headers={"X-API-Key": key})
    assert reply.status_code == 201
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=20)
    assert (child.returncode, out, err) == (0, "", "")
