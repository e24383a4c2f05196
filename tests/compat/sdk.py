"""Every feature of a sandbox through the Python SDK `e2b`, alone: E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY lead
to the server. Prints one line a check and ends with 1 if any failed. Works with 2.45.1 and newer."""

from __future__ import annotations

import sys
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any

from e2b import (
    CommandExitException,
    FilesystemEventType,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxQuery,
    SandboxState,
    Template,
    TimeoutException,
)
from e2b.sandbox.commands.command_handle import PtySize

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def life() -> None:
    with Sandbox.create("base", timeout=120, metadata={"check": "life"}, envs={"FOO": "b a r"}) as box:
        again = Sandbox.connect(box.sandbox_id, timeout=300)
        assert again.commands.run("echo $FOO").stdout == "b a r\n"
        info = box.get_info()
        assert (info.metadata, info.state, info.name) == ({"check": "life"}, SandboxState.RUNNING, "base")
        assert 290 < (info.end_at - info.started_at).total_seconds() < 330  # the connect made it longer
        box.set_timeout(30)
        assert (box.get_info().end_at - info.end_at).total_seconds() < -200
        assert box.is_running()
        assert box.kill() is True
        assert (box.kill(), box.is_running()) == (False, False)
    refused(NotFoundException, lambda: Sandbox.connect(box.sandbox_id))
    assert "not found" in str(refused(SandboxException, lambda: Sandbox.create("no-such-template")))


def lists() -> None:
    mark = {"run": uuid.uuid4().hex, "odd key": "ü=&% +"}
    boxes = [Sandbox.create("base", timeout=60, metadata=mark) for _ in range(3)]
    boxes[1].pause()
    running, paused = [SandboxState.RUNNING], [SandboxState.PAUSED]
    assert ids(SandboxQuery(metadata=mark)) == [box.sandbox_id for box in reversed(boxes)]
    assert ids(SandboxQuery(metadata=mark, state=paused)) == [boxes[1].sandbox_id]
    assert ids(SandboxQuery(metadata=mark, state=running), limit=1) == [boxes[2].sandbox_id, boxes[0].sandbox_id]
    assert ids(SandboxQuery(metadata=mark | {"odd key": "other"})) == []
    for box in boxes:
        box.kill()
    assert ids(SandboxQuery(metadata=mark)) == []


def commands() -> None:
    with Sandbox.create("base", timeout=120) as box:
        result = box.commands.run("echo out; echo err >&2; whoami; pwd", envs={"A": "1"}, cwd="/tmp", user="root")
        assert (result.stdout, result.stderr) == ("out\nroot\n/tmp\n", "err\n")
        failure = refused(CommandExitException, lambda: box.commands.run("exit 7"))
        assert failure.exit_code == 7
        refused(TimeoutException, lambda: box.commands.run("sleep 30", timeout=1))
        reader = box.commands.run("cat", background=True, stdin=True)
        assert reader.pid in [process.pid for process in box.commands.list()]
        box.commands.send_stdin(reader.pid, "line\n")
        box.commands.close_stdin(reader.pid)
        assert reader.wait().stdout == "line\n"
        sleeper = box.commands.run("sleep 300", background=True)
        assert box.commands.connect(sleeper.pid).kill() is True
        refused(CommandExitException, sleeper.wait)


def files() -> None:
    with Sandbox.create("base", timeout=120) as box:
        written = box.files.write("deep/er/file", "text", metadata={"origin": "check"})
        assert (written.path, written.metadata) == ("/home/user/deep/er/file", {"origin": "check"})
        info = box.files.get_info("deep/er/file")
        assert (info.metadata, info.size, info.owner) == ({"origin": "check"}, 4, "user")
        box.files.rename("deep/er/file", "/tmp/moved")
        assert (box.files.exists("deep/er/file"), box.files.read("/tmp/moved")) == (False, "text")
        data = bytes(range(256)) * 4096
        box.files.write("/tmp/blob", data, gzip=True)
        assert b"".join(box.files.read("/tmp/blob", format="stream")) == data
        assert [entry.name for entry in box.files.list("deep", depth=2)] == ["er"]
        box.files.remove("deep")
        refused(NotFoundException, lambda: box.files.list("deep"))


def watching() -> None:
    with Sandbox.create("base", timeout=120) as box:
        box.files.make_dir("/tmp/watched/below")
        watch = box.files.watch_dir("/tmp/watched", recursive=True, include_entry=True)
        box.files.write("/tmp/watched/below/new", "1")
        events = watch.get_new_events()
        kinds = [FilesystemEventType.CREATE, FilesystemEventType.CHMOD, FilesystemEventType.WRITE]
        assert [(event.type, event.name) for event in events] == [(kind, "below/new") for kind in kinds]
        assert events[-1].entry is not None
        assert events[-1].entry.size == 1
        watch.stop()


def terminal() -> None:
    with Sandbox.create("base", timeout=120) as box:
        seen: list[bytes] = []
        pty = box.pty.create(PtySize(rows=24, cols=80), envs={"ABC": "123"}, cwd="/")
        box.pty.resize(pty.pid, PtySize(rows=10, cols=99))
        box.pty.send_stdin(pty.pid, b"echo $ABC-$(tput cols)\nexit 0\n")
        assert pty.wait(on_pty=seen.append).exit_code == 0
        assert b"123-99" in b"".join(seen)


def pause_and_resume() -> None:
    with Sandbox.create("base", timeout=120) as box:
        sleeper = box.commands.run("sleep 300", background=True)
        boot = box.files.read(BOOT_ID)
        assert box.pause() is not False
        assert (box.is_running(), box.get_info().state) == (False, SandboxState.PAUSED)
        assert Sandbox.pause(box.sandbox_id) is False
        box.connect(timeout=100)
        assert sleeper.pid in [process.pid for process in box.commands.list()]
        assert box.files.read(BOOT_ID) == boot
        box.files.write("/home/user/kept", "kept")
        box.pause(keep_memory=False)
        box.connect(timeout=100)
        assert box.files.read("/home/user/kept") == "kept"
        assert box.files.read(BOOT_ID) != boot
        assert sleeper.pid not in [process.pid for process in box.commands.list()]


def pause_instead_of_death() -> None:
    lifecycle: Any = {"on_timeout": "pause"}
    with Sandbox.create("base", timeout=120, lifecycle=lifecycle) as box:
        box.files.write("/home/user/kept", "kept")
        box.set_timeout(0)
        wait_for(lambda: box.get_info().state == SandboxState.PAUSED)
        assert box.connect(timeout=60).files.read("/home/user/kept") == "kept"
    wakes: Any = {"on_timeout": "pause", "auto_resume": True}
    with Sandbox.create("base", timeout=120, lifecycle=wakes) as box:
        box.pause()
        assert box.commands.run("echo awake").stdout == "awake\n"
        assert box.get_info().state == SandboxState.RUNNING


def snapshots() -> None:
    with Sandbox.create("base", timeout=120) as box:
        box.files.write("/home/user/state", "before")
        snapshot = box.create_snapshot()
        box.files.write("/home/user/state", "after")
        for _ in range(2):
            with Sandbox.create(snapshot.snapshot_id, timeout=60) as copy:
                assert copy.files.read("/home/user/state") == "before"
        assert box.files.read("/home/user/state") == "after"
        assert snapshot.snapshot_id in [found.snapshot_id for found in box.list_snapshots().next_items()]
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
        refused(SandboxException, lambda: Sandbox.create(snapshot.snapshot_id))


def forks() -> None:
    with Sandbox.create("base", timeout=120, metadata={"of": "fork"}) as box:
        box.files.write("/home/user/state", "before")
        children = [child for child in box.fork(count=2, timeout=60) if isinstance(child, Sandbox)]
        assert len({box.sandbox_id, *(child.sandbox_id for child in children)}) == 3
        for number, child in enumerate(children):
            child.files.write("/home/user/own", str(number))
            assert child.files.read("/home/user/state") == "before"
        assert [child.files.read("/home/user/own") for child in children] == ["0", "1"]
        assert box.files.exists("/home/user/own") is False
        for child in children:
            child.kill()


def templates() -> None:
    name = f"check-{uuid.uuid4().hex[:12]}"
    recipe = Template().from_base_image().set_envs({"SHOP": "yard"}).run_cmd("mkdir /opt/shop", user="root")
    final = recipe.set_workdir("/opt").set_start_cmd("sleep 3600", "test -d /opt/shop")
    lines: list[str] = []
    built = Template.build(final, f"{name}:v1", memory_mb=256, on_build_logs=lambda entry: lines.append(entry.message))
    assert lines
    assert Template.exists(name)
    Template.assign_tags(f"{name}:v1", "stable")
    assert {"v1", "stable"} <= {tag.tag for tag in Template.get_tags(name)}
    for reference in (f"{name}:v1", f"{name}:stable", f"{name}:{built.build_id}"):
        with Sandbox.create(reference, timeout=60) as box:
            assert box.commands.run("echo $SHOP; pwd").stdout == "yard\n/opt\n"
            assert "sleep 3600" in [" ".join([process.cmd, *process.args]) for process in box.commands.list()]
    Template.remove_tags(name, "stable")
    refused(SandboxException, lambda: Sandbox.create(f"{name}:stable"))


def metrics() -> None:
    with Sandbox.create("base", timeout=120) as box:
        wait_for(lambda: bool(box.get_metrics()), seconds=30)
        sample = box.get_metrics()[-1]
        assert sample.cpu_count >= 1
        assert 0 < sample.mem_used < sample.mem_total
        assert 0 < sample.disk_used < sample.disk_total


def network() -> None:
    with Sandbox.create("base", timeout=120, allow_internet_access=False) as box:
        assert box.commands.run("curl -sS --max-time 2 http://192.0.2.1/ || true").exit_code == 0
        box.commands.run("cd /tmp && echo served > page && python3 -m http.server 8000", background=True)
        wait_for(lambda: box.commands.run("curl -s localhost:8000/page || true").stdout == "served\n")


CHECKS: tuple[Callable[[], None], ...] = (
    life,
    lists,
    commands,
    files,
    watching,
    terminal,
    pause_and_resume,
    pause_instead_of_death,
    snapshots,
    forks,
    templates,
    metrics,
    network,
)


def ids(query: SandboxQuery, limit: int | None = None) -> list[str]:
    """The ids of all pages of a list."""
    pages = Sandbox.list(query, limit=limit)
    found: list[str] = []
    while pages.has_next:
        found += [info.sandbox_id for info in pages.next_items()]
    return found


def refused(kind: type[Any], call: Callable[[], Any]) -> Any:
    """The error of that kind which `call` must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def wait_for(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        time.sleep(0.1)


def main() -> int:
    failed = 0
    for check in CHECKS:
        started = time.monotonic()
        try:
            check()
        except Exception as error:  # noqa: BLE001 - whatever a check raises is its result
            failed += 1
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
            print(f"FAIL {check.__name__}: line {lines[1]}: {type(error).__name__}: {str(error)[:300]!r}", flush=True)
        else:
            print(f"ok   {check.__name__}: {(time.monotonic() - started) * 1e3:.0f} ms", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
