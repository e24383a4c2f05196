"""Templates, builds and tags through the API and the SDK, over the in-memory runtime."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from e2b import BuildException, LogEntry, Sandbox, SandboxException, Template

from sandyard.config import BuildSettings
from sandyard.errors import BadRequest, CapacityError
from sandyard.images.build import Cached, Level, State
from sandyard.runtimes.base import Instance, SandboxSpec
from sandyard.server.builds import BuildLog, FileStore, workshop
from sandyard.server.builds import queue as queue_module
from sandyard.server.builds import tickets as tickets_module
from sandyard.server.builds.cache import LayerCache
from sandyard.server.builds.files import UPLOADS
from sandyard.server.builds.gate import Gate
from tests.images.test_build_parts import pack
from tests.server.conftest import memory_settings, running

if TYPE_CHECKING:
    from tests.server.conftest import LiveServer

BASE = {"fromTemplate": "base"}


def register(api: httpx.Client, name: str, **body: Any) -> dict[str, Any]:
    reply = api.post("/v3/templates", json={"name": name, **body})
    assert reply.status_code == 202, reply.text
    made: dict[str, Any] = reply.json()
    return made


def begin(api: httpx.Client, made: dict[str, Any], **body: Any) -> httpx.Response:
    return api.post(f"/v2/templates/{made['templateID']}/builds/{made['buildID']}", json={**BASE, **body})


def status_of(api: httpx.Client, made: dict[str, Any], **params: Any) -> dict[str, Any]:
    reply = api.get(f"/templates/{made['templateID']}/builds/{made['buildID']}/status", params=params)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def ended(api: httpx.Client, made: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while (found := status_of(api, made))["status"] in ("building", "waiting"):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def build(api: httpx.Client, name: str, *commands: str, **body: Any) -> dict[str, Any]:
    made = register(api, name)
    steps = [{"type": "RUN", "args": [command]} for command in commands]
    assert begin(api, made, steps=steps, **body).status_code == 202
    found = ended(api, made)
    assert found["status"] == "ready", found
    return made


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def other(server: LiveServer) -> Iterator[httpx.Client]:
    """Another tenant."""
    with server.client(server.call(server.app_keys().issue("other"))) as client:
        yield client


# --- the way of an SDK ---


def test_a_template_is_built_by_the_sdk_and_started(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/file.txt").write_text("hello")
    said: list[LogEntry] = []
    template = (
        Template(file_context_path=tmp_path)
        .from_base_image()
        .copy("dir", "/srv/dir", mode=0o640)
        .set_envs({"A": "1"})
        .run_cmd("echo built")
        .set_workdir("/srv")
        .set_start_cmd("sleep 5", "true")
    )
    info = Template.build(template, "mine:v1", tags=["stable"], cpu_count=1, memory_mb=256, on_build_logs=said.append)
    assert info.tags == ["v1", "stable"]
    assert "built" in [entry.message for entry in said]
    box = Sandbox.create("mine:stable", timeout=60)
    assert box.files.read("/srv/dir/file.txt") == "hello"
    assert box.get_info().memory_mb == 256
    assert {tag.tag: tag.build_id for tag in Template.get_tags("mine")} == {
        "v1": info.build_id,
        "stable": info.build_id,
    }
    assert Template.exists("mine")
    assert Template.exists("mine:v1")
    assert not Template.exists("mine:v2")
    with pytest.raises(SandboxException, match="404: tag 'default' does not exist for template 'mine'"):
        Sandbox.create("mine", timeout=60)
    assert Template.assign_tags("mine:v1", "production").build_id == info.build_id
    Template.remove_tags("mine", ["stable"])
    assert sorted(tag.tag for tag in Template.get_tags("mine")) == ["production", "v1"]
    said.clear()
    Template.build(template, "mine:v2", on_build_logs=said.append)
    assert [entry.message for entry in said if entry.message.startswith("CACHED")][-1] == "CACHED START"
    assert any("already cached" in entry.message for entry in said)


@pytest.mark.parametrize("starts", [True, False])
def test_what_is_started_is_kept_with_its_memory_where_that_can_be(server: LiveServer, starts: bool) -> None:
    runtime = server.runtime
    runtime.capabilities = replace(runtime.capabilities, memory_snapshot=True)
    with server.client() as api:
        commands = {"startCmd": "sleep 50", "readyCmd": "true"} if starts else {}
        made = build(api, "app", "echo built", **commands)
        reply = api.post("/sandboxes", json={"templateID": "app"})
        assert reply.status_code == 201, reply.text
    manager = server.app.manager
    sandbox = manager.look(reply.json()["sandboxID"])
    layers = manager.catalog.resolve("app", sandbox.tenant)[1].rootfs.layers
    kept = [layer.with_name(f"{layer.name}.memory").exists() for layer in layers if layer.is_file()]
    assert kept[0] is starts
    # The start command of one that was kept so runs in it already; it is not run again.
    assert server.call(sandbox.agent.processes()) == []
    assert len(layers) - len(sandbox.instance.spec.rootfs.layers) == starts
    assert made["buildID"]


def test_a_machine_that_is_more_than_the_host_is_the_callers_mistake(server: LiveServer) -> None:
    runtime = server.runtime
    runtime.capabilities = replace(runtime.capabilities, shared_kernel=False)
    with server.client() as api:
        assert api.post("/v3/templates", json={"name": "huge", "memoryMB": 10_000_000}).status_code == 400
        order = {"image": "base", "memoryMB": 10_000_000}
        reply = api.post("/sandboxes-cold", json=order)
        assert (reply.status_code, reply.json()["code"]) == (400, 400)
        assert "more than this host can have" in reply.json()["message"]


def test_a_build_says_what_takes_long(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = server.runtime
    runtime.capabilities = replace(runtime.capabilities, memory_snapshot=True)
    plain = runtime.create

    async def create(spec: SandboxSpec) -> Instance:
        await asyncio.sleep(0.2)
        return await plain(spec)

    monkeypatch.setattr(runtime, "create", create)
    monkeypatch.setattr(workshop, "_SILENT_SECONDS", 0.05)
    with server.client() as api:
        made = build(api, "slow", "echo built", startCmd="sleep 50", readyCmd="true")
        said = [entry["message"] for entry in status_of(api, made)["logEntries"]]
    assert "starting a sandbox …" in said
    assert "starting it as every sandbox of it, to be kept with its memory …" in said


def test_a_failed_step_reaches_the_sdk_with_its_number(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    template = Template().from_base_image().run_cmd("echo fine").run_cmd("fail 3")
    with pytest.raises(BuildException, match="failed to run command 'fail 3': exit status 3"):
        Template.build(template, "broken")
    assert not Template.exists("broken")
    with pytest.raises(BuildException, match="invalid username: 'root123'"):
        Template.build(Template().from_base_image().run_cmd("whoami", user="root123"), "broken")


# --- builds ---


def test_a_registered_build_has_its_names_and_tags(api: httpx.Client) -> None:
    made = register(api, "Team/One:V1", tags=["v2", "v1"], cpuCount=2, memoryMB=256)
    assert (made["names"], made["aliases"], made["tags"], made["public"]) == (["one"], ["one"], ["v1", "v2"], False)
    again = register(api, "one")
    assert (again["templateID"], again["tags"]) == (made["templateID"], ["default"])
    assert again["buildID"] != made["buildID"]
    old = api.post("/v2/templates", json={"alias": "two"})
    assert (old.status_code, old.json()["aliases"]) == (202, ["two"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "name: it is missing"),
        ({"name": "-x"}, "name '-x'"),
        ({"name": "a b"}, "name 'a b'"),
        ({"name": "x:"}, "tag ''"),
        ({"name": "x:1f691ab6-47b0-4abd-a912-5e26eed56ce4"}, "is a UUID"),
        ({"name": "x", "tags": ["a/b"]}, "tag 'a/b'"),
        ({"name": "x", "memoryMB": 64}, "memoryMB: Input should be greater"),
        ({"name": "x", "memoryMB": 1 << 24}, "more than the"),
        ({"name": "x", "cpuCount": 0}, "cpuCount"),
    ],
)
def test_a_build_that_cannot_be_is_refused(api: httpx.Client, body: dict[str, Any], words: str) -> None:
    reply = api.post("/v3/templates", json=body)
    assert reply.status_code == 400
    assert words in reply.json()["message"]
    assert api.get("/templates").json()[0]["names"] == ["base"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"fromTemplate": None}, "fromImage, fromTemplate: give one"),
        ({"fromImage": "x"}, "fromImage, fromTemplate: give one"),
        ({"steps": [{"type": "FETCH"}]}, "steps.0.type: 'FETCH'"),
        ({"steps": [{"type": "RUN", "args": ["a"]}, {"type": "COPY", "args": ["a", "b"]}]}, "steps.1.filesHash"),
        ({"steps": [{"type": "RUN", "args": [1]}]}, "steps.0.args.0"),
        ({"fromImageRegistry": {"type": "aws"}}, "'aws' is not supported"),
    ],
)
def test_an_order_that_makes_no_sense_leaves_the_build_waiting(
    api: httpx.Client, body: dict[str, Any], words: str
) -> None:
    made = register(api, "x")
    reply = begin(api, made, **body)
    assert reply.status_code == 400
    assert words in reply.json()["message"]
    assert status_of(api, made)["status"] == "waiting"


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ({"fromTemplate": "nothing-like-it"}, "template 'nothing-like-it' not found"),
        ({"fromTemplate": "base:v9"}, "tag 'v9' does not exist"),
        ({"fromTemplate": None, "fromImage": "oci:/etc"}, "give the name of an image in a registry"),
        ({"fromTemplate": None, "fromImage": "ubuntu:22.04"}, "names no registry"),
        ({"fromTemplate": None, "fromImage": "127.0.0.1:9/x:1"}, "could not be pulled"),
        ({"fromTemplate": None, "fromImage": "e2bdev/code-interpreter:latest"}, "stands for a template here"),
    ],
)
def test_a_start_that_is_not_there_fails_the_base_step(api: httpx.Client, origin: dict[str, Any], words: str) -> None:
    made = register(api, "x")
    assert begin(api, made, **origin).status_code == 202
    found = ended(api, made)
    assert (found["status"], found["reason"]["step"]) == ("error", "base")
    assert words in found["reason"]["message"]
    assert found["reason"]["logEntries"][-1]["level"] == "error"


def test_credentials_of_a_registry_are_kept_nowhere(server: LiveServer, api: httpx.Client) -> None:
    made = register(api, "x")
    registry = {"type": "registry", "username": "me", "password": "pass-4711"}
    begin(api, made, fromTemplate=None, fromImage="127.0.0.1:9/x:1", fromImageRegistry=registry)
    assert "pass-4711" not in str(ended(api, made))
    for path in server.settings.paths.state.rglob("*"):
        assert not path.is_file() or b"pass-4711" not in path.read_bytes(), path


def test_the_log_comes_in_pages(api: httpx.Client) -> None:
    made = build(api, "x", *[f"echo line{n}" for n in range(120)])
    whole: list[str] = []
    while page := status_of(api, made, logsOffset=len(whole))["logs"]:
        assert len(page) <= 100
        whole += page
    lines = [line for line in whole if line.startswith("line")]
    assert lines == [f"line{n}" for n in range(120)]
    assert status_of(api, made, limit=0)["logEntries"] == []
    debug = [e for e in status_of(api, made, level="warn")["logEntries"] if e["level"] in ("debug", "info")]
    assert not debug
    url = f"/templates/{made['templateID']}/builds/{made['buildID']}/logs"
    last = api.get(url, params={"direction": "backward", "limit": 2}).json()["logs"]
    assert [entry["message"] for entry in reversed(last)] == whole[-2:]
    assert api.get(url, params={"cursor": int(time.time() * 1000) + 60_000}).json()["logs"] == []
    first = api.get(url, params={"cursor": 0, "limit": 1}).json()["logs"]
    assert (first[0]["message"], first[0]["step"]) == (whole[0], "base")
    for wrong in ({"limit": 101}, {"logsOffset": -1}, {"level": "loud"}):
        assert api.get(f"{url[:-5]}/status", params=wrong).status_code == 400


def test_an_unknown_build_is_named(api: httpx.Client) -> None:
    made = register(api, "x")
    for url in (f"/templates/{made['templateID']}/builds/nope/status", "/templates/x/builds/nope/logs"):
        reply = api.get(url)
        assert (reply.status_code, reply.json()["message"]) == (400, "Build 'nope' not found")
    assert api.get("/templates/zzz/builds/nope/status").status_code == 404


def test_one_build_of_a_tag_at_a_time(api: httpx.Client) -> None:
    made, rival = register(api, "x:v1"), register(api, "x:v1")
    assert begin(api, made, steps=[{"type": "RUN", "args": ["sleep 30"]}]).status_code == 202
    assert status_of(api, made)["status"] == "building"
    twice = begin(api, made)
    assert (twice.status_code, "not in waiting state" in twice.json()["message"]) == (400, True)
    for reply in (begin(api, rival), api.post("/v3/templates", json={"name": "x:v1"})):
        assert (reply.status_code, made["buildID"] in reply.json()["message"]) == (409, True)
    build(api, "x:v2")
    # Whoever waits for the build finds it by its tag, though nothing starts from it yet.
    tags = {tag["tag"]: tag["buildID"] for tag in api.get("/templates/x/tags").json()}
    assert tags["v1"] == made["buildID"]
    reply = api.post("/v2/sandboxes", json={"templateID": f"x:{made['buildID']}"})
    assert reply.status_code == 404
    assert reply.json()["message"].startswith(f"tag '{made['buildID']}' does not exist for template 'x'")
    assert api.delete("/templates/x").status_code == 204


def test_a_rebuild_moves_its_tag_when_it_is_ready(api: httpx.Client) -> None:
    first = build(api, "x")
    second = register(api, "x")
    begin(api, second, steps=[{"type": "RUN", "args": ["fail 1"]}])
    assert ended(api, second)["status"] == "error"
    assert api.get("/templates/x/tags").json()[0]["buildID"] == first["buildID"]
    third = build(api, "x", "echo 1")
    assert api.get("/templates/x/tags").json()[0]["buildID"] == third["buildID"]
    for build_id in (first["buildID"], third["buildID"]):
        assert api.post("/v2/sandboxes", json={"templateID": f"x:{build_id}"}).status_code == 201


def test_builds_have_a_number(start_server: Callable[..., Any], tmp_path: Path) -> None:
    with start_server() as server:
        server.app.builds._settings = BuildSettings(per_tenant=2)
        with server.client() as api:
            for name in ("a", "b"):
                assert begin(api, register(api, name), steps=[{"type": "RUN", "args": ["sleep 30"]}]).status_code == 202
            reply = api.post("/v3/templates", json={"name": "c"})
            assert reply.status_code == 429
            assert "maximum number of concurrent" in reply.json()["message"]
            assert int(reply.headers["retry-after"]) > 0


def test_what_one_tenant_queues_keeps_no_other_waiting(
    server: LiveServer, api: httpx.Client, other: httpx.Client
) -> None:
    queued = [register(api, f"long{n}") for n in range(4)]
    for made in queued:
        assert begin(api, made, steps=[{"type": "RUN", "args": ["sleep 30"]}]).status_code == 202
    until(lambda: any("RUN sleep" in line for line in status_of(api, queued[0])["logs"]))
    build(other, "short", "echo 1")
    assert [status_of(api, made)["status"] for made in queued] == ["building"] * 4
    assert "waiting for another build to end" in status_of(api, queued[-1])["logs"]


def test_the_time_of_a_build_begins_with_its_turn(tmp_path: Path) -> None:
    settings = memory_settings(tmp_path)
    settings = settings.model_copy(update={"build": BuildSettings(at_once=1, timeout=1.5)})
    with running(settings) as server, server.client() as api:
        queued = [register(api, f"x{n}") for n in range(3)]
        for made in queued:
            begin(api, made, steps=[{"type": "RUN", "args": ["sleep 0.9"]}])
        assert [ended(api, made)["status"] for made in queued] == ["ready"] * 3
        late = register(api, "late")
        begin(api, late, steps=[{"type": "RUN", "args": ["sleep 10"]}])
        assert ended(api, late)["reason"]["message"] == "the build took longer than 1.5 s"


async def test_tenants_take_turns() -> None:
    gate, order = Gate(1), list[str]()

    async def work(tenant: str) -> None:
        async with gate.place(tenant, lambda: None):
            order.append(tenant)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work(tenant)) for tenant in "aaaabbc"]
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(order) == ["a", "a", "a", "b", "b", "c"]
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert sorted(order[3:5]) == ["a", "b"]
    async with asyncio.timeout(1), gate.place("a", lambda: pytest.fail("a place was lost")):
        pass


def test_builds_that_came_to_nothing_do_not_pile_up(
    server: LiveServer, api: httpx.Client, other: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "LEFTOVERS", 3)
    kept = build(api, "x")
    theirs = register(other, "y")
    failed = register(api, "x")
    begin(api, failed, steps=[{"type": "RUN", "args": ["fail 1"]}])
    assert ended(api, failed)["status"] == "error"
    waiting = [register(api, "x") for _ in range(6)]
    found = {b["buildID"]: b["status"] for b in api.get("/templates/x").json()["builds"]}
    assert found == {kept["buildID"]: "ready", **{made["buildID"]: "waiting" for made in waiting[-3:]}}
    assert status_of(other, theirs)["status"] == "waiting"
    assert (begin(api, waiting[0]).status_code, begin(api, waiting[-1]).status_code) == (400, 202)
    assert not (server.settings.paths.state / "builds" / f"{failed['buildID']}.log").exists()


def test_templates_of_a_tenant_have_a_number(tmp_path: Path) -> None:
    settings = memory_settings(tmp_path)
    settings = settings.model_copy(update={"build": BuildSettings(templates=2)})
    with running(settings) as server, server.client() as api:
        assert [register(api, name)["names"] for name in ("a", "b", "a")] == [["a"], ["b"], ["a"]]
        full = api.post("/v3/templates", json={"name": "c"})
        assert (full.status_code, "2 templates of yours" in full.json()["message"]) == (429, True)
        assert api.delete("/templates/b").status_code == 204
        register(api, "c")


def test_a_build_waits_for_a_place_and_takes_one(start_server: Callable[..., Any]) -> None:
    with start_server(max_count=1) as server, server.client() as api:
        box = api.post("/v2/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
        made = register(api, "x")
        begin(api, made, steps=[{"type": "RUN", "args": ["sleep 2"]}])
        until(lambda: any("waiting for a place" in line for line in status_of(api, made)["logs"]))
        api.delete(f"/sandboxes/{box}")
        until(lambda: any("RUN sleep" in line for line in status_of(api, made)["logs"]))
        full = api.post("/v2/sandboxes", json={"templateID": "base"})
        assert full.status_code == 429
        assert ended(api, made)["status"] == "ready"
        assert api.post("/v2/sandboxes", json={"templateID": "base"}).status_code == 201


def test_the_first_generation_is_refused_by_name(api: httpx.Client) -> None:
    reply = api.post("/templates", json={"dockerfile": "FROM x"})
    assert (reply.status_code, "first generation" in reply.json()["message"]) == (400, True)


# --- uploads ---


def link(api: httpx.Client, template: str, files_hash: str) -> dict[str, Any]:
    reply = api.get(f"/templates/{template}/files/{files_hash}")
    assert reply.status_code == 201, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_an_upload_needs_its_link_only_and_works_once(api: httpx.Client, other: httpx.Client, tmp_path: Path) -> None:
    register(api, "x")
    register(other, "x")
    data = pack(tmp_path / "a", ("f", b"1")).read_bytes()
    found = link(api, "x", "a" * 64)
    assert found["present"] is False
    assert httpx.put(found["url"], content=data).status_code == 204
    again = httpx.put(found["url"], content=data)
    assert (again.status_code, "was used" in again.json()["message"]) == (401, True)
    renewed = link(api, "x", "a" * 64)
    assert renewed["present"] is True
    assert httpx.put(renewed["url"], content=data).status_code == 204
    assert link(other, "x", "a" * 64)["present"] is False


def test_a_link_is_used_from_the_first_byte_on_unless_its_upload_fails(api: httpx.Client, tmp_path: Path) -> None:
    register(api, "x")
    data = pack(tmp_path / "a", ("f", b"1")).read_bytes()
    url = link(api, "x", "a" * 64)["url"]
    begun, go_on = threading.Event(), threading.Event()

    def slow(rest: bytes) -> Iterator[bytes]:
        yield data[:10]
        begun.set()
        assert go_on.wait(10)
        yield rest

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.put, url, content=slow(b"garbage"), timeout=20)
        assert begun.wait(10)
        until(lambda: httpx.put(url, content=data).status_code == 401)
        go_on.set()
        assert first.result(20).status_code == 400
    assert httpx.put(url, content=data).status_code == 204
    assert httpx.put(url, content=data).status_code == 401


async def test_uploads_of_one_tenant_are_few_at_once(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files", BuildSettings())
    archive = pack(tmp_path / "a", ("f", b"1")).read_bytes()
    go_on = asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield archive[:10]
        await go_on.wait()
        yield archive[10:]

    coming = [asyncio.create_task(store.receive("me", f"{n:064}", chunks())) for n in range(UPLOADS)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError, match="are coming already"):
        await store.receive("me", "b" * 64, chunks())
    other = asyncio.create_task(store.receive("other", "b" * 64, chunks()))
    coming.pop().cancel()
    await asyncio.sleep(0.05)
    again = asyncio.create_task(store.receive("me", "b" * 64, chunks()))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*coming, other, again)
    assert store.path("me", "b" * 64) is not None
    assert not list((tmp_path / "files").rglob(".part-*"))
    store.close()


def test_a_link_that_was_changed_or_is_old_is_refused(
    api: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(api, "x")
    data = pack(tmp_path / "a", ("f", b"1")).read_bytes()
    url = link(api, "x", "a" * 64)["url"]
    payload, _, signature = url.rpartition("/")[2].partition(".")
    base = url.rpartition("/")[0]
    for wrong in (f"{payload}x.{signature}", f"{payload}.{signature[:-1]}", payload, f"{payload}.", "é.é"):
        assert httpx.put(f"{base}/{wrong}", content=data).status_code == 401
    monkeypatch.setattr(tickets_module, "LASTS", -1.0)
    assert httpx.put(link(api, "x", "a" * 64)["url"], content=data).status_code == 401


def test_what_is_no_archive_is_refused_and_not_kept(server: LiveServer, api: httpx.Client, tmp_path: Path) -> None:
    register(api, "x")
    hostile = pack(tmp_path / "a", ("../../etc/passwd", b"1")).read_bytes()
    bomb = pack(tmp_path / "b", ("f", bytes(20 << 20))).read_bytes()
    server.app.builds.files._settings = BuildSettings(upload_mb=2)
    for data, status, words in (
        (b"", 400, "cannot be read"),
        (os.urandom(5000), 400, "cannot be read"),
        (hostile, 400, "leaves the build context"),
        (bomb, 400, "pass 16777216 bytes"),
        (bytes(3 << 20), 413, "passes 2 MiB"),
    ):
        reply = httpx.put(link(api, "x", "a" * 64)["url"], content=data)
        assert (reply.status_code, words in reply.json()["message"]) == (status, True), reply.text
    chunked = httpx.put(link(api, "x", "a" * 64)["url"], content=iter([bytes(1 << 20)] * 3))
    assert chunked.status_code == 413
    assert link(api, "x", "a" * 64)["present"] is False
    kept = [path for path in (server.settings.paths.state / "files").rglob("*") if path.is_file()]
    assert kept == []
    assert api.get("/templates/x/files/..%2f..%2fetc").status_code in (400, 404)
    assert api.get("/templates/x/files/a.b.c.d.e.f").status_code == 400


async def test_uploads_are_forgotten_by_age_and_by_size(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files", BuildSettings(files_mb=1, files_days=1))

    async def send(name: str, size: int, tenant: str = "me") -> None:
        async def chunks() -> Any:
            yield pack(tmp_path / "a", ("f", os.urandom(size))).read_bytes()

        await store.receive(tenant, name * 8, chunks())

    await send("a", 600_000)
    await send("b", 300_000)
    await send("c", 100_000)
    old = store.path("me", "c" * 8)
    assert old is not None
    os.utime(old, (time.time() - 90_000,) * 2)
    (old.parent / ".part-1").write_bytes(b"x")
    await store.collect()
    assert (store.path("me", "a" * 8), store.path("me", "b" * 8)) != (None, None)
    assert store.path("me", "c" * 8) is None
    first = store.path("me", "a" * 8)
    assert first is not None
    os.utime(first, (time.time() - 60,) * 2)
    await send("d", 600_000)
    await store.collect()
    assert store.path("me", "a" * 8) is None
    assert store.path("me", "d" * 8) is not None
    await send("e", 900_000, "another")
    assert None not in (store.path("me", "d" * 8), store.path("another", "e" * 8))
    with pytest.raises(BadRequest, match="hash"):
        store.path("me", "../../x")
    store.close()


# --- names, tags, tenants ---


def test_tags_that_cannot_be(api: httpx.Client) -> None:
    build(api, "x:v1")
    for tags in ([":bad"], ["x:"], ["a b"], [], ["1f691ab6-47b0-4abd-a912-5e26eed56ce4"]):
        assert api.post("/templates/tags", json={"target": "x:v1", "tags": tags}).status_code == 400
    for target in ("x:v9", "nope:v1", "x"):
        assert api.post("/templates/tags", json={"target": target, "tags": ["a"]}).status_code == 404
    reply = api.request("DELETE", "/templates/tags", json={"name": "x", "tags": ["v1", "gone"]})
    assert (reply.status_code, "'gone'" in reply.json()["message"]) == (404, True)
    assert [tag["tag"] for tag in api.get("/templates/x/tags").json()] == ["v1"]
    assert api.post("/templates/tags", json={"target": "base", "tags": ["a"]}).status_code == 403


def test_a_name_exists_once_a_build_of_it_may_be_used(api: httpx.Client) -> None:
    def answer(name: str) -> int:
        return api.get(f"/templates/aliases/{name}").status_code

    assert (answer("base"), answer("base:default"), answer("base:v1"), answer("x")) == (200, 200, 404, 404)
    made = register(api, "x:v1")
    assert answer("x") == 404
    begin(api, made, steps=[{"type": "RUN", "args": ["fail 1"]}])
    ended(api, made)
    assert answer("x") == 404
    build(api, "x:v1")
    assert (answer("x"), answer("x:v1"), answer("ns%2Fx:v1"), answer("x:v2")) == (200, 200, 200, 404)
    assert answer(made["templateID"]) == 200


def test_no_tenant_touches_another_ones_templates(api: httpx.Client, other: httpx.Client) -> None:
    made = build(api, "x:default")
    template_id, build_id = made["templateID"], made["buildID"]
    for method, url, body in (
        ("GET", f"/templates/{template_id}", None),
        ("GET", f"/templates/{template_id}/tags", None),
        ("GET", f"/templates/aliases/{template_id}", None),
        ("GET", f"/templates/{template_id}/files/{'a' * 64}", None),
        ("GET", f"/templates/{template_id}/builds/{build_id}/status", None),
        ("GET", f"/templates/{template_id}/builds/{build_id}/logs", None),
        ("POST", f"/v2/templates/{template_id}/builds/{build_id}", BASE),
        ("POST", "/templates/tags", {"target": "x", "tags": ["a"]}),
        ("DELETE", "/templates/tags", {"name": "x", "tags": ["default"]}),
        ("PATCH", f"/v2/templates/{template_id}", {"public": True}),
        ("DELETE", f"/templates/{template_id}", None),
        ("POST", "/v2/sandboxes", {"templateID": template_id}),
    ):
        assert other.request(method, url, json=body).status_code == 404, url
    assert [t["names"] for t in other.get("/templates").json()] == [["base"]]
    started = register(other, "y")
    begin(other, started, fromTemplate="x")
    assert ended(other, started)["status"] == "error"
    mine = build(other, "x:default")
    assert mine["templateID"] != template_id


def test_what_clients_ask_for_by_themselves_is_never_another_tenants(api: httpx.Client, other: httpx.Client) -> None:
    made = build(api, "code-interpreter-v1")
    assert api.patch(f"/v2/templates/{made['templateID']}", json={"public": True}).status_code == 200
    assert api.post("/v2/sandboxes", json={"templateID": "code-interpreter-v1"}).status_code == 201
    assert other.post("/v2/sandboxes", json={"templateID": "code-interpreter-v1"}).status_code == 404
    assert other.post("/v2/sandboxes", json={"templateID": made["templateID"]}).status_code == 201


def test_a_public_template_is_used_and_not_changed(api: httpx.Client, other: httpx.Client) -> None:
    made = build(api, "x")
    assert api.patch(f"/v2/templates/{made['templateID']}", json={"public": True}).json() == {"names": ["x"]}
    assert other.post("/v2/sandboxes", json={"templateID": "x"}).status_code == 201
    assert other.get("/templates/aliases/x").json()["public"] is True
    for method, url, body in (
        ("DELETE", "/templates/x", None),
        ("PATCH", "/templates/x", {"public": False}),
        ("POST", "/templates/tags", {"target": "x", "tags": ["a"]}),
        ("GET", f"/templates/x/builds/{made['buildID']}/logs", None),
    ):
        reply = other.request(method, url, json=body)
        assert reply.status_code == 403, url
    own = build(other, "x")
    assert own["templateID"] != made["templateID"]
    assert other.get("/templates/aliases/x").json()["templateID"] == own["templateID"]


def test_the_nodes_own_is_nobodys_to_change(api: httpx.Client) -> None:
    assert api.post("/v3/templates", json={"name": "base"}).status_code == 403
    assert api.delete("/templates/base").status_code == 403


# --- lists and deletion ---


def test_templates_are_listed_in_pages(api: httpx.Client) -> None:
    for name in ("a", "b", "c"):
        register(api, name, cpuCount=3, memoryMB=300)
    first = api.get("/v2/templates", params={"limit": 3})
    rest = api.get("/v2/templates", params={"limit": 3, "nextToken": first.headers["x-next-token"]})
    assert [t["names"] for t in [*first.json(), *rest.json()]] == [["c"], ["b"], ["a"], ["base"]]
    assert "x-next-token" not in rest.headers
    shown = first.json()[0]
    assert (shown["buildStatus"], shown["buildCount"], shown["cpuCount"], shown["memoryMB"]) == ("waiting", 1, 3, 300)
    assert shown["createdBy"] is None
    assert api.get("/v2/templates", params={"nextToken": "%%"}).status_code == 400
    for _ in range(2):
        register(api, "a")
    info = api.get("/templates/a", params={"limit": 2})
    more = api.get("/templates/a", params={"limit": 2, "nextToken": info.headers["x-next-token"]})
    assert (len(info.json()["builds"]), len(more.json()["builds"])) == (2, 1)
    assert "x-next-token" not in more.headers


def test_a_template_in_use_is_not_deleted(server: LiveServer, api: httpx.Client) -> None:
    made = build(api, "x", "echo 1")
    box = api.post("/v2/sandboxes", json={"templateID": "x"}).json()["sandboxID"]
    refused = api.delete("/templates/x")
    assert (refused.status_code, box in refused.json()["message"]) == (400, True)
    api.delete(f"/sandboxes/{box}")
    layers = list((server.settings.paths.state / "layers").iterdir())
    assert layers
    assert api.delete(f"/templates/{made['templateID']}").status_code == 204
    assert api.get("/templates/x").status_code == 404
    assert api.delete("/templates/x").status_code == 404
    assert not list((server.settings.paths.state / "builds").glob("*.log"))


def test_a_snapshot_is_deleted_state_by_state(api: httpx.Client) -> None:
    box = api.post("/v2/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
    url = f"/sandboxes/{box}/snapshots"
    first, second, bare = (api.post(url, json=b).json()["snapshotID"] for b in ({"name": "s:a"}, {"name": "s:b"}, {}))
    child = api.post("/v2/sandboxes", json={"templateID": first}).json()["sandboxID"]
    assert api.delete(f"/templates/{first.replace(':', '%3A')}").status_code == 204
    assert api.delete(f"/templates/ns%2F{first}").status_code == 404
    assert {s["snapshotID"] for s in api.get("/snapshots").json()} == {second, bare}
    assert api.get(f"/sandboxes/{child}").status_code == 200
    assert api.delete(f"/templates/{second}").status_code == 204
    assert api.delete(f"/templates/{second}").status_code == 404
    assert api.delete(f"/templates/{bare}").status_code == 204
    assert api.get("/snapshots").json() == []
    build(api, "x:v1")
    assert api.delete("/templates/x:v1").status_code == 400


def test_deleting_ends_what_is_being_built(server: LiveServer, api: httpx.Client) -> None:
    made = register(api, "x")
    begin(api, made, steps=[{"type": "RUN", "args": ["sleep 60"]}])
    until(lambda: bool(server.runtime.instances))
    assert api.delete("/templates/x").status_code == 204
    assert not server.runtime.instances
    assert server.app.manager.admission.count == 0


def test_layers_go_when_neither_template_nor_cache_names_them(server: LiveServer, api: httpx.Client) -> None:
    build(api, "x", "echo 1")
    home = server.settings.paths.state / "layers"
    api.delete("/templates/x")
    assert list(home.iterdir())  # the cache keeps them for the next build
    server.app.builds._settings = BuildSettings(cache_mb=0)
    (home / "left-by-a-crash").write_bytes(b"x")
    server.call(server.app.builds.collect())
    assert list(home.iterdir()) == []
    build(api, "x", "echo 1")


def test_builds_without_a_tag_go_after_a_while(server: LiveServer, api: httpx.Client) -> None:
    failed = register(api, "x")
    begin(api, failed, steps=[{"type": "RUN", "args": ["fail 1"]}])
    ended(api, failed)
    old, new, idle = build(api, "x", "echo 1"), build(api, "x", "echo 2"), register(api, "x")
    catalog = server.app.manager.catalog

    async def age(days: float) -> None:
        template = catalog.find("x")
        for build_id, kept in list(template.builds.items()):
            await catalog.put_build(replace(kept, created_at=kept.created_at - days * 86400))
            assert build_id in template.builds
        await server.app.builds.collect()

    server.call(age(2))
    assert status_of(api, idle)["reason"]["message"] == "it was registered and never begun"
    assert [b["buildID"] for b in api.get("/templates/x").json()["builds"]][-1] == failed["buildID"]
    server.call(age(30))
    assert [b["buildID"] for b in api.get("/templates/x").json()["builds"]] == [new["buildID"]]
    assert api.post("/v2/sandboxes", json={"templateID": f"x:{old['buildID']}"}).status_code == 404
    assert api.post("/v2/sandboxes", json={"templateID": "x"}).status_code == 201
    logs = [path.stem for path in (server.settings.paths.state / "builds").glob("*.log")]
    assert logs == [new["buildID"]]


def test_the_cache_forgets_the_longest_unused(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path / "builds/cache.json")
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(100_000))
        cache.put(name, Cached((tmp_path / name,), State({"A": name}), 5))
    cache.save()
    again = LayerCache(tmp_path / "builds/cache.json")
    again.load()
    assert again.get("a") == Cached((tmp_path / "a",), State({"A": "a"}), 5)
    again.shrink(250_000, [], tmp_path)
    assert (again.get("b"), again.get("a") is None, again.get("c") is None) == (None, False, False)
    again.shrink(0, [tmp_path / "a"], tmp_path)
    assert again.layers == {tmp_path / "a"} or again.layers == set()
    (tmp_path / "a").unlink()
    assert again.get("a") is None
    (tmp_path / "builds/cache.json").write_text("{broken")
    again = LayerCache(tmp_path / "builds/cache.json")
    again.load()
    assert again.layers == set()


def test_a_log_is_bounded_and_survives(tmp_path: Path) -> None:
    log = BuildLog(tmp_path / "b/x.log", 100)
    for number in range(500):
        log(f"line {number}", step="1")
    for number in range(500):
        log(f"error {number}", level=Level.ERROR)
    log.save()
    with (tmp_path / "b/x.log").open("a") as file:
        file.write('{"t": 1, "m"')
    loaded = BuildLog.load(tmp_path / "b/x.log", 100).entries()
    assert len(loaded) == 101 + 32
    assert (loaded[99].message, loaded[99].step) == ("line 99", "1")
    assert "left out" in loaded[100].message
    assert loaded[101].message == "error 0"
    wide = BuildLog(tmp_path / "b/y.log", 20_000)
    for _ in range(2000):
        wide("x" * 8000)
    assert sum(len(entry.message) for entry in wide.entries()) < 5 << 20


async def test_a_restart_makes_unfinished_builds_errors_and_keeps_the_rest(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    def first() -> tuple[dict[str, Any], dict[str, Any]]:
        with start_server() as server, server.client() as api:
            done = build(api, "done", "echo 1")
            going = register(api, "going")
            begin(api, going, steps=[{"type": "RUN", "args": ["sleep 60"]}])
            until(lambda: any("RUN" in line for line in status_of(api, going)["logs"]))
            return done, going

    def second(done: dict[str, Any], going: dict[str, Any]) -> None:
        with start_server() as server, server.client() as api:
            assert status_of(api, going)["status"] == "error"
            assert status_of(api, going)["reason"]["message"]
            assert any("RUN sleep 60" in line for line in status_of(api, going)["logs"])
            assert status_of(api, done)["status"] == "ready"
            assert api.post("/v2/sandboxes", json={"templateID": "done"}).status_code == 201
            again = build(api, "again", "echo 1")
            assert any("CACHED [1/1]" in line for line in status_of(api, again)["logs"])

    done, going = await asyncio.to_thread(first)
    await asyncio.to_thread(second, done, going)
