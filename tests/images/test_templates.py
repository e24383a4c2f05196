"""Templates: found by name, made whole or not at all, finished without running anything of theirs."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest

from sandyard.config import ContainerSettings, ImageSettings, PathSettings, SandboxSettings, Settings
from sandyard.errors import BadRequest, Conflict, HostError, NotFound
from sandyard.images import bootstrap
from sandyard.images.base import build_base, recipe_of
from sandyard.images.finish import finish, missing_commands
from sandyard.images.owners import shift_tree
from sandyard.images.progress import run_watched
from sandyard.images.setup import install_line, needed_packages
from sandyard.images.templates import Origin, TemplateStore

UID_BASE = 100_000


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    paths = PathSettings(state=tmp_path / "state", run=tmp_path / "run")
    return Settings(paths=paths, container=ContainerSettings.model_validate({"uid_base": UID_BASE}))


def tree(root: Path) -> Path:
    """A root file system as small as one can be that `base` accepts."""
    for folder in ("usr/bin", "etc/skel", "dev"):
        (root / folder).mkdir(parents=True)
    for name in ("bash", "python3", "git", "curl", "sudo", "tput", "ls", "ps"):
        (root / "usr/bin" / name).write_text("#!/bin/false\n")
    (root / "usr/bin/sudo").chmod(0o4755)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\nnode:x:1000:1000::/home/node:/bin/sh")
    (root / "etc/group").write_text("root:x:0:\nnode:x:1000:\n")
    (root / "etc/shadow").write_text("root:*:19000:0:99999:7:::\n")
    (root / "etc/skel/.profile").write_text("umask 022\n")
    return root


def install(store: TemplateStore, name: str) -> str:
    with store.building() as (scratch, _):
        (scratch / "rootfs").mkdir()
        return store.install(name, scratch / "rootfs", Origin("a test", "recipe", 7, {"A": "1"}, "/w", "u")).template_id


def test_a_template_is_found_by_name_and_id(settings: Settings) -> None:
    store = TemplateStore(settings)
    assert store.list() == []
    with pytest.raises(NotFound, match="sandyard setup"):
        store.get("base")
    template_id = install(store, "base")
    found = store.get("base")
    assert found == store.get(template_id) == TemplateStore(settings).list()[0]
    assert (found.source, found.size_bytes, found.rootfs.env, found.rootfs.user) == ("a test", 7, {"A": "1"}, "u")
    assert found.rootfs.layers[0].is_dir()
    with pytest.raises(NotFound, match="did you mean base"):
        store.get("bass")


def test_a_new_build_keeps_the_one_before_and_drops_older_ones(settings: Settings) -> None:
    store = TemplateStore(settings)
    ids = [install(store, "base") for _ in range(3)]
    assert store.get("base").template_id == ids[2]
    assert sorted(entry.name for entry in (store.home / "base").iterdir() if entry.is_dir()) == sorted(ids[1:])


def test_half_a_template_is_none(settings: Settings) -> None:
    store = TemplateStore(settings)
    install(store, "base")
    (store.home / "base" / "template.json").write_text('{"name": "ba')
    assert store.find("base") is None
    assert store.list() == []


def test_what_a_killed_build_left_is_removed_by_the_next(settings: Settings) -> None:
    store = TemplateStore(settings)
    (store.home / ".building-old").mkdir(parents=True)
    with store.building() as (scratch, _):
        assert not (store.home / ".building-old").exists()
        (scratch / "file").write_text("x")
    assert [entry.name for entry in store.home.iterdir()] == [".lock"]


def test_one_build_at_a_time(settings: Settings) -> None:
    store = TemplateStore(settings)
    inside = threading.Event()

    def build() -> None:
        with store.building():
            inside.set()

    waiting = threading.Thread(target=build)
    with store.building():
        waiting.start()
        assert not inside.wait(0.2)
    assert inside.wait(5)
    waiting.join()


def test_delete(settings: Settings) -> None:
    store = TemplateStore(settings)
    install(store, "base")
    store.delete("base")
    assert store.list() == []
    with pytest.raises(NotFound):
        store.delete("base")


@pytest.mark.root
async def test_import_of_a_tarball(settings: Settings, tmp_path: Path) -> None:
    archive = tmp_path / "root.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree(tmp_path / "tree"), ".")
    store = TemplateStore(settings)
    made = await store.import_tarball("mine", archive, env={"X": "y"})
    assert made == store.get("mine")
    root = made.rootfs.layers[0]
    assert root.stat().st_uid == UID_BASE
    assert (root / "usr/bin/sudo").stat().st_uid == UID_BASE
    assert stat.S_IMODE((root / "usr/bin/sudo").stat().st_mode) == 0o4755
    with pytest.raises(Conflict):
        await store.import_tarball("mine", archive)
    with pytest.raises(BadRequest, match="template name"):
        await store.import_tarball("../mine", archive)


async def test_a_refused_tarball_leaves_nothing(settings: Settings, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tar"
    bad.write_bytes(b"no archive")
    store = TemplateStore(settings)
    with pytest.raises(BadRequest):
        await store.import_tarball("mine", bad)
    assert [entry.name for entry in store.home.iterdir()] == [".lock"]


def test_finish_adds_the_user_under_a_free_id(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: run `sudo make test`")
    root = tree(tmp_path / "root")
    finish(root)
    assert "\nuser:x:1001:1001::/home/user:/bin/bash\n" in (root / "etc/passwd").read_text()
    assert (root / "etc/passwd").read_text().count("\nuser:") == 1
    assert (root / "home/user").stat().st_uid == 1001
    assert (root / "home/user/.profile").stat().st_uid == 1001
    assert stat.S_IMODE((root / "etc/sudoers.d/sandyard").stat().st_mode) == 0o440
    assert os.readlink(root / "usr/bin/python") == "python3"
    before = (root / "etc/passwd").read_text()
    finish(root)
    assert (root / "etc/passwd").read_text() == before


def test_a_login_shell_starts_no_program_to_learn_its_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: run `sudo make test`")
    root = tree(tmp_path / "root")
    profile = root / "etc/profile"
    profile.write_text('if [ "$(id -u)" -eq 0 ]; then who=root; else who=$(id -u); fi; echo $who\n')
    finish(root)
    once = profile.read_text()
    expected = "root" if os.geteuid() == 0 else str(os.geteuid())
    for shell in ("bash", "dash"):
        answer = subprocess.run([shell, profile], capture_output=True, text=True, check=True)
        assert answer.stdout.strip() == expected
    without = subprocess.run(
        ["/bin/bash", profile], env={"PATH": "/nowhere"}, capture_output=True, text=True, check=True
    )
    assert (without.stdout.strip(), without.stderr) == (expected, "")
    finish(root)
    assert profile.read_text() == once


@pytest.mark.parametrize("name", ["etc", "etc/passwd", "etc/sudoers.d", "home"])
def test_finish_refuses_to_edit_through_a_symlink(tmp_path: Path, name: str) -> None:
    root, outside = tree(tmp_path / "root"), tmp_path / "outside"
    outside.mkdir()
    (outside / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    if os.path.lexists(root / name):
        (root / name).rename(root / "moved")
    os.symlink(outside / "passwd" if name == "etc/passwd" else outside, root / name)
    with pytest.raises(BadRequest, match="is not a"):
        finish(root)
    assert (outside / "passwd").read_text() == "root:x:0:0:root:/root:/bin/bash\n"
    assert os.listdir(outside) == ["passwd"]


def test_missing_commands_are_named(tmp_path: Path) -> None:
    root = tree(tmp_path / "root")
    assert missing_commands(root) == []
    (root / "usr/bin/git").unlink()
    assert missing_commands(root) == ["git"]


@pytest.mark.root
def test_owners_are_shifted_once(tmp_path: Path) -> None:
    root = tree(tmp_path / "root")
    os.link(root / "usr/bin/sudo", root / "usr/bin/again")
    os.symlink("/etc/shadow", root / "etc/link")
    os.chown(root / "etc/shadow", 0, 42)
    os.mknod(root / "dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    outside = Path("/etc/shadow").stat()
    for _ in range(2):
        assert shift_tree(root, UID_BASE) > 0
        assert {path.lstat().st_uid for path in (root, *root.rglob("*"))} == {UID_BASE}
    assert (root / "etc/shadow").stat().st_gid == UID_BASE + 42
    assert stat.S_IMODE((root / "usr/bin/again").stat().st_mode) == 0o4755
    assert not (root / "dev/null").exists()
    assert Path("/etc/shadow").stat().st_uid == outside.st_uid


@pytest.mark.root
async def test_base_from_a_tarball_is_made_once(settings: Settings, tmp_path: Path) -> None:
    archive = tmp_path / "root.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(tree(tmp_path / "tree"), ".")
    wanted = settings.model_copy(update={"images": ImageSettings(base=str(archive))})
    heard: list[str] = []
    made = await build_base(wanted, lambda stage, fraction, line: heard.append(line))
    assert made.source == f"tarball {archive}"
    assert (made.rootfs.layers[0] / "home/user").stat().st_uid == UID_BASE + 1001
    assert await build_base(wanted, lambda stage, fraction, line: heard.append(line)) == made
    assert heard[-1].startswith("template base is there")
    again = await build_base(wanted, force=True)
    assert again.template_id != made.template_id
    os.utime(archive, (1, 1))
    assert recipe_of(wanted).digest() != made.recipe


async def test_a_tarball_that_is_missing_is_said(settings: Settings) -> None:
    wanted = settings.model_copy(update={"images": ImageSettings(base="./no/such.tar.gz")})
    with pytest.raises(HostError, match=r"no/such\.tar\.gz does not exist"):
        await build_base(wanted)


@pytest.mark.root
async def test_every_source_that_failed_is_listed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    images = ImageSettings(base="registry.invalid/debian:stable", mirror="file:///nowhere", suite="bookworm")
    with pytest.raises(HostError) as failure:
        await build_base(settings.model_copy(update={"images": images}))
    text = str(failure.value)
    assert "registry.invalid/debian:stable: skopeo and umoci not installed" in text
    assert "neither mmdebstrap nor debootstrap" in text
    assert "apt-get install mmdebstrap" in text
    assert TemplateStore(settings).list() == []
    assert [entry.name for entry in TemplateStore(settings).home.iterdir()] == [".lock"]


async def test_sources_are_the_host_s_own_for_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = [
        "http://mirror.invalid/debian/ trixie main",
        "http://mirror.invalid/debian/ trixie main",
        "http://mirror.invalid/debian-security/ trixie-security main",
        "http://mirror.invalid/debian/ trixie contrib",
        "http://mirror.invalid/debian/ sid main",
        "http://other.invalid/apt nodistro main",
    ]

    async def fake(command: object, on_line: object, **more: object) -> None:
        assert callable(on_line)
        for line in listing:
            on_line(line)

    monkeypatch.setattr(bootstrap, "run_watched", fake)
    assert await bootstrap.host_sources("trixie") == [
        "deb http://mirror.invalid/debian trixie main",
        "deb http://mirror.invalid/debian-security trixie-security main",
    ]
    with pytest.raises(HostError, match="no source for the suite jammy"):
        await bootstrap.host_sources("jammy")


async def test_a_watched_command_that_fails_tells_its_last_words() -> None:
    lines: list[str] = []
    with pytest.raises(HostError, match=r"sh ended with 3: one \| two"):
        await run_watched(["sh", "-c", "echo one; echo two >&2; exit 3"], lines.append)
    assert lines == ["one", "two"]
    with pytest.raises(HostError, match="no-such-command"):
        await run_watched(["no-such-command"], lines.append)


async def test_a_cancelled_command_is_gone_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 77 & echo $! > {tmp_path}/pid; echo ready; wait"
    ready = asyncio.Event()
    running = asyncio.ensure_future(run_watched(["sh", "-c", script], lambda line: ready.set()))
    await asyncio.wait_for(ready.wait(), 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    child = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not _lives(child):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"child {child} lives on")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_packages_are_named_for_what_is_missing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandyard.images.setup._SYSTEM_PATH", "/nonexistent")
    assert needed_packages(settings) == ["crun", "e2fsprogs", "util-linux", "mmdebstrap"]
    assert install_line(["a", "b"]).endswith("install -y --no-install-recommends a b")
    memory = settings.model_copy(update={"sandbox": SandboxSettings.model_validate({"runtime": "memory"})})
    assert needed_packages(memory) == []
    pulled = settings.model_copy(update={"images": ImageSettings(base="debian:stable")})
    assert needed_packages(pulled)[-2:] == ["skopeo", "umoci"]


def test_the_record_is_readable_by_people(settings: Settings) -> None:
    store = TemplateStore(settings)
    install(store, "base")
    record = json.loads((store.home / "base" / "template.json").read_text())
    assert record["source"] == "a test"
