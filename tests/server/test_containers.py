"""The server over real containers: the SDK's view, clients that die, a server that is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from e2b import CommandExitException, RateLimitException, Sandbox, SandboxException

from sandyard.config import SandboxSettings, Settings
from sandyard.server.embedded import EmbeddedServer
from tests.yard import node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(240), pytest.mark.usefixtures("clean")]


@pytest.fixture
def settings() -> Iterator[Settings]:
    """A node of its own with the host's base template."""
    with node_home() as home:
        yield node_settings(home, high=64)


def sdk(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def test_commands_files_and_lifetimes(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer(settings) as server:
        sdk(server, monkeypatch)
        box = Sandbox.create("base", timeout=120, envs={"FOO": "bar"})
        shown = box.commands.run('echo "$FOO" $(id -un) $(pwd)')
        assert shown.stdout == "bar user /home/user\n"
        data = os.urandom(3 << 20)
        box.files.write("/tmp/deep/er/blob", data)
        assert bytes(box.files.read("/tmp/deep/er/blob", format="bytes")) == data
        assert box.files.read("/proc/sys/kernel/random/boot_id").count("-") == 4
        watcher = box.files.watch_dir("/tmp/deep")
        box.files.write("/tmp/deep/new", "1")
        assert [event.type.value for event in watcher.get_new_events()] == ["create", "chmod", "write"]
        web = box.commands.run("cd /tmp/deep && python3 -m http.server 8000", background=True)
        headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "8000"}
        wait_for(lambda: httpx.get(f"{server.url}/er/blob", headers=headers).status_code == 200)
        assert httpx.get(f"{server.url}/er/blob", headers=headers).content == data
        web.kill()
        assert httpx.get(f"{server.url}/er/blob", headers=headers).json()["message"].endswith("port is not open")
        box.set_timeout(1)
        wait_for(lambda: not box.is_running())


def test_a_memory_bomb_is_told_as_oom_or_contained(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer(settings) as server:
        sdk(server, monkeypatch)
        box = Sandbox.create("base", timeout=120)
        for bomb in ("python3 -c 'x = bytearray(2 << 30)'", "python3 -c 'x = bytearray(2 << 30)'; exit $?"):
            with pytest.raises(CommandExitException) as taken:
                box.commands.run(bomb, timeout=60)
            assert "(out of memory: the sandbox's limit is 512 MiB)" in str(taken.value.error)
        with pytest.raises(CommandExitException) as other:
            box.commands.run("kill -9 $$")
        assert other.value.error == "signal: killed"
        assert box.commands.run("echo alive").stdout == "alive\n"


def test_a_sandbox_that_dies_of_memory_says_so(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no process holds (files of /dev/shm) leaves only PID 1 to kill."""
    small = settings.model_copy(update={"sandbox": SandboxSettings.model_validate({"memory_mb": 32})})
    with EmbeddedServer(small) as server, httpx.Client(base_url=server.url) as api:
        sdk(server, monkeypatch)
        box = Sandbox.create("base", timeout=120)
        for _ in range(20):
            try:
                box.commands.run("for n in 1 2 3 4; do head -c 60M /dev/zero > /dev/shm/$n; done", timeout=10)
                box.files.write("/dev/shm/agent", bytes(40 << 20))
            except (SandboxException, CommandExitException, httpx.HTTPError):
                pass  # whichever way it fails; the death below is what counts
            reply = api.get(f"/sandboxes/{box.sandbox_id}", headers={"X-API-Key": server.api_key})
            if reply.status_code == 404:
                break
        assert reply.json()["error_code"] == "sandbox_dead_oom", reply.text
        gone = api.get("/health", headers={"E2b-Sandbox-Id": box.sandbox_id})
        assert (gone.status_code, gone.headers["x-sandyard-death"]) == (502, "oom")


def test_a_full_node_answers_429(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    small = settings.model_copy(update={"sandbox": SandboxSettings.model_validate({"max_count": 2})})
    with EmbeddedServer(small) as server:
        sdk(server, monkeypatch)
        boxes = [Sandbox.create("base", timeout=60) for _ in range(2)]
        with pytest.raises(RateLimitException, match="all 2 places are taken"):
            Sandbox.create("base", timeout=60, retries=0)
        boxes[0].kill()
        assert Sandbox.create("base", timeout=60).commands.run("echo 1").stdout == "1\n"


def test_a_client_that_is_killed_loses_its_sandboxes_with_its_lease(settings: Settings) -> None:
    client = (
        "import os, httpx, time\n"
        "api = httpx.Client(base_url=os.environ['E2B_API_URL'], headers={'X-API-Key': os.environ['E2B_API_KEY']})\n"
        "lease = api.post('/leases', json={'ttl': 2}).json()['leaseID']\n"
        "for _ in range(3):\n"
        "    body = {'templateID': 'base', 'metadata': {'sandyard.lease': lease}}\n"
        "    assert api.post('/v2/sandboxes', json=body).status_code == 201\n"
        "print('made', flush=True)\n"
        "while True:\n"
        "    api.post(f'/leases/{lease}/renew')\n"
        "    time.sleep(0.5)\n"
    )
    with EmbeddedServer(settings) as server:
        environment = {**os.environ, **server.environment()}
        child = subprocess.Popen([sys.executable, "-c", client], env=environment, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"made\n"
        child.stdout.close()
        headers = {"X-API-Key": server.api_key}
        with httpx.Client(base_url=server.url, headers=headers) as api:
            time.sleep(3)
            made = [s["sandboxID"] for s in api.get("/v2/sandboxes").json()]
            assert len(made) == 3
            child.kill()
            child.wait()
            wait_for(lambda: api.get("/v2/sandboxes").json() == [])
            assert api.get(f"/sandboxes/{made[0]}").json()["error_code"] == "sandbox_dead_lease"


def test_what_a_killed_server_promised_is_kept_by_the_next(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedServer(settings).start()
    sdk(server, monkeypatch)
    box = Sandbox.create("base", timeout=120, metadata={"a": "b"})
    box.files.write("kept", "yes")
    sleeper = box.commands.run("sleep 1000", background=True)
    kill_server(server)
    with EmbeddedServer(settings) as after:
        sdk(after, monkeypatch)
        again = Sandbox.connect(box.sandbox_id)
        assert again.files.read("kept") == "yes"
        assert again.get_info().metadata == {"a": "b"}
        assert sleeper.pid in [process.pid for process in again.commands.list()]
        assert again.commands.kill(sleeper.pid)
        assert again.commands.run("echo 1").stdout == "1\n"


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
def test_a_server_killed_in_a_burst_leaves_nothing_behind(settings: Settings, seed: int) -> None:
    server = EmbeddedServer(settings).start()
    stop = threading.Event()
    acknowledged: list[str] = []

    def client() -> None:
        headers = {"X-API-Key": server.api_key}
        with httpx.Client(base_url=server.url, headers=headers, timeout=30) as api:
            while not stop.is_set():
                try:
                    made = api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 120}).json()["sandboxID"]
                    if random.random() < 0.3:
                        api.delete(f"/sandboxes/{made}")
                    else:
                        acknowledged.append(made)
                except httpx.TransportError:
                    return

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(random.Random(seed).uniform(0.3, 1.5))
    kill_server(server)
    stop.set()
    for thread in threads:
        thread.join()
    with (
        EmbeddedServer(settings) as after,
        httpx.Client(base_url=after.url, headers={"X-API-Key": after.api_key}, timeout=30) as api,
    ):
        living = {s["sandboxID"] for s in api.get("/v2/sandboxes", params={"limit": 100}).json()}
        assert set(acknowledged) <= living, "a sandbox that was promised is gone"
        for sandbox_id in living:
            assert api.get("/health", headers={"E2b-Sandbox-Id": sandbox_id}).status_code == 204


def kill_server(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()


def wait_for(true: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
