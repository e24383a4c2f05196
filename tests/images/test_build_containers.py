"""The step engine over real containers: owners, modes, links, users, images with little in them."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from sandyard.config import Settings
from sandyard.images.base import build_base
from sandyard.images.build import Base, BuildFailed, Built, Engine, Step
from sandyard.images.build.shell import output_of
from sandyard.images.owners import shift_tree
from sandyard.runtimes.base import Rootfs
from sandyard.runtimes.container import ContainerRuntime
from tests.images.test_build_parts import pack
from tests.images.workshop import PlainCache, TestWorkshop, Uploads, Words
from tests.yard import leftovers, node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


@pytest.fixture
def settings() -> Iterator[Settings]:
    with node_home() as home:
        yield node_settings(home)
        assert leftovers(home) == []


@pytest_asyncio.fixture
async def runtime(settings: Settings) -> AsyncIterator[ContainerRuntime]:
    opened = ContainerRuntime(settings)
    yield opened
    left = await opened.list()
    for sandbox_id in left:
        await opened.destroy(sandbox_id)
    await opened.close()
    assert left == []


class Site:
    def __init__(self, runtime: ContainerRuntime, home: Path, base: Rootfs) -> None:
        home.mkdir(exist_ok=True)
        self.base = Base(base, "key", "base")
        self.words = Words()
        self.uploads = Uploads()
        self.cache = PlainCache()
        self.workshop = TestWorkshop(runtime, home)

    async def build(self, *steps: Step) -> Built:
        from sandyard.images.build import Plan

        engine = Engine(self.workshop, self.uploads, self.cache, self.words)
        try:
            return await engine.run(Plan(self.base, steps))
        finally:
            assert not self.workshop.open_ids

    async def ask(self, built: Built, *argv: str) -> str:
        """What a command of root says in a sandbox of what was built."""
        bench = await self.workshop.open(built.rootfs)
        try:
            _, said = await output_of(bench.agent, *argv)
        finally:
            await bench.close()
        return said.decode().strip()


def site_of(runtime: ContainerRuntime, settings: Settings, base: Rootfs) -> Site:
    return Site(runtime, settings.paths.state / "layers", base)


@pytest_asyncio.fixture
async def site(runtime: ContainerRuntime, settings: Settings) -> Site:
    return site_of(runtime, settings, (await build_base(Settings())).rootfs)


def busybox(settings: Settings, applets: Sequence[str]) -> Rootfs:
    """A root file system of BusyBox alone: no bash, no accounts."""
    program = shutil.which("busybox")
    if program is None or b"/ld-" in Path(program).read_bytes()[:4096]:  # where a dynamic one names its loader
        pytest.skip("needs a static BusyBox: apt-get install busybox-static")
    root = settings.paths.state / f"busybox{len(applets)}"
    (root / "bin").mkdir(parents=True)
    shutil.copy(program, root / "bin/busybox")
    for applet in applets:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "tmp").mkdir(mode=0o777)
    root.chmod(0o755)
    shift_tree(root, settings.container.uid_base)
    return Rootfs([root])


def run(command: str, *more: str) -> Step:
    return Step("RUN", [command, *more])


STAT = ("stat", "-c", "%n %F %a %U:%G")


async def test_copies_keep_what_docker_keeps(site: Site, tmp_path: Path) -> None:
    site.uploads.files["tree"] = pack(
        tmp_path / "u",
        ("d", None),
        ("d/f", b"one"),
        ("d/empty", None),
        ("d/sub", None),
        ("d/sub/g", b"two"),
        ("d/sub/with space é", b"x"),
        ("d/" + "n" * 180, b"long"),
        links=(
            ("d/rel", "f", tarfile.SYMTYPE),
            ("d/out", "/etc/passwd", tarfile.SYMTYPE),
            ("d/dangling", "nowhere", tarfile.SYMTYPE),
            ("d/hard", "d/f", tarfile.LNKTYPE),
        ),
    )
    built = await site.build(
        run(
            "mkdir -p /opt/d/sub /opt/real && chmod 700 /opt/d/sub && echo old > /opt/d/f && ln -s real /opt/link",
            "root",
        ),
        Step("COPY", ["d", "/opt/d", "root", ""], "tree"),
        Step("COPY", ["d/*", "rel"], "tree"),
        Step("COPY", ["d/f", "/opt/link"], "tree"),
        Step("COPY", ["d/f", "/opt/new/name", "nobody:root", "4750"], "tree"),
        Step("COPY", ["d/f", "/opt/dir/"], "tree"),
        Step("COPY", ["d/rel", "/opt/alone"], "tree"),
        Step("COPY", ["d", "/opt/modes", "1000:1000", "0700"], "tree"),
    )
    told = await site.ask(
        built,
        "sh",
        "-c",
        "cd /opt; stat -c '%n %F %a %U:%G' d/f d/sub d/sub/g d/empty real/f new/name dir dir/f alone modes/sub/g"
        " /home/user/rel /home/user/rel/f /home/user/rel/rel; cat d/f; readlink d/out d/dangling alone;"
        " stat -c %h d/f; wc -c < d/$(printf 'n%.0s' $(seq 180)); cat 'd/sub/with space é'; readlink link",
    )
    assert told.splitlines() == [
        "d/f regular file 644 root:root",
        "d/sub directory 700 root:root",  # it was there: its mode stays
        "d/sub/g regular file 644 root:root",
        "d/empty directory 755 root:root",
        "real/f regular file 644 user:user",  # into the directory that the link leads to
        "new/name regular file 4750 nobody:root",
        "dir directory 755 user:user",
        "dir/f regular file 644 user:user",
        "alone symbolic link 777 user:user",
        "modes/sub/g regular file 700 user:user",
        "/home/user/rel directory 755 user:user",
        "/home/user/rel/f regular file 644 user:user",
        "/home/user/rel/rel symbolic link 777 user:user",
        "one/etc/passwd",
        "nowhere",
        "f",
        "2",
        "4",
        "xreal",
    ]


async def test_a_file_in_the_way_of_the_destination_is_an_error(site: Site, tmp_path: Path) -> None:
    site.uploads.files["tree"] = pack(tmp_path / "u", ("d", None), ("d/sub", None), ("d/sub/g", b"two"))
    with pytest.raises(BuildFailed, match="failed to run COPY d /tmp/x/sub"):
        await site.build(run("mkdir /tmp/x && touch /tmp/x/sub"), Step("COPY", ["d", "/tmp/x/sub"], "tree"))


async def test_users_and_directories_are_made(site: Site) -> None:
    built = await site.build(
        Step("USER", ["dev"]),
        Step("WORKDIR", ["/srv/app"]),
        run("id -un > who; pwd >> who; echo $HOME >> who; touch ~/mine; whoami"),
        run("id -un >> who", "root"),
        Step("USER", ["1000:1000"]),
        run("id -u > /tmp/number"),
    )
    assert site.words.of("3")[-1] == "dev"
    assert (built.rootfs.user, built.rootfs.workdir) == ("1000:1000", "/srv/app")
    told = await site.ask(built, "sh", "-c", "cat /srv/app/who /tmp/number; stat -c %U /home/dev/mine /srv/app")
    assert told.split() == ["dev", "/srv/app", "/home/dev", "root", "1000", "dev", "dev"]


async def test_a_login_bash_runs_commands(site: Site) -> None:
    await site.build(run("shopt -q login_shell && [[ $0 == /bin/bash ]] && echo yes; echo no >&2"))
    assert sorted(site.words.of("1")[1:]) == ["no", "yes"]


async def test_deletions_reach_the_layers_above(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from sandyard.images.build import engine

    monkeypatch.setattr(engine, "COMMIT_AFTER", 0.0)
    built = await site.build(
        run("mkdir /tmp/d && touch /tmp/d/a /tmp/d/b"),
        run("rm /tmp/d/a; sudo rm -r /etc/skel"),
        run("rm -r /tmp/d; mkdir /tmp/d; touch /tmp/d/c"),
    )
    assert len(built.rootfs.layers) == 1 + 3
    assert await site.ask(built, "sh", "-c", "ls /tmp/d; ls -d /etc/skel 2>/dev/null") == "c"


async def test_busybox_with_a_shell_and_a_tar(runtime: ContainerRuntime, settings: Settings, tmp_path: Path) -> None:
    site = site_of(runtime, settings, busybox(settings, ["sh", "tar", "ls", "cat", "stat", "id", "mkdir", "chmod"]))
    site.uploads.files["tree"] = pack(
        tmp_path / "u",
        ("d", None),
        ("d/f", b"one"),
        ("d/sub", None),
        ("d/sub/g", b"two"),
        ("d/" + "n" * 180, b"long"),
        links=(("d/rel", "f", tarfile.SYMTYPE), ("d/hard", "d/f", tarfile.LNKTYPE)),
    )
    built = await site.build(
        run("id -u -n; mkdir -p /tmp/t/sub; chmod 700 /tmp/t/sub"),
        Step("COPY", ["d", "/tmp/t"], "tree"),
        Step("USER", ["dev"]),
        run("id -u -n; echo $HOME"),
    )
    assert site.words.of("1")[1:] == ["user"]
    assert site.words.of("4")[1:] == ["dev", "/home/dev"]
    told = await site.ask(
        built, "sh", "-c", "cd /tmp/t; stat -c '%n %a %U %h' f sub sub/g rel; cat rel; cat n*; cat /etc/passwd"
    )
    lines = told.splitlines()
    assert lines[:3] == ["f 644 user 2", "sub 700 user 2", "sub/g 644 user 1"]
    assert lines[3].startswith("rel 777")  # its owner stays root: BusyBox does not change that of links
    assert lines[4].startswith("onelong")
    assert "user:x:1000:1000::/home/user:/bin/sh" in lines
    assert "dev:x:1001:1001::/home/dev:/bin/sh" in lines


async def test_an_image_with_nothing_in_it(runtime: ContainerRuntime, settings: Settings, tmp_path: Path) -> None:
    root = settings.paths.state / "nothing"
    root.mkdir()
    shift_tree(root, settings.container.uid_base)
    site = site_of(runtime, settings, Rootfs([root]))
    site.uploads.files["tree"] = pack(tmp_path / "u", ("d", None), ("d/f", b"one" * 100_000), ("d/e", b""))
    built = await site.build(
        Step("COPY", ["d", "/app", "root", "0640"], "tree"), Step("USER", ["dev"]), Step("WORKDIR", ["/w"])
    )
    bench = await site.workshop.open(built.rootfs)
    info = await bench.agent.stat("/app/f")
    assert (info.size, info.mode, info.uid) == (300_000, 0o640, 0)
    assert (await bench.agent.stat("/w")).owner == "dev"
    await bench.close()
    with pytest.raises(BuildFailed, match="the image has neither /bin/bash nor /bin/sh"):
        await site.build(run("true"))
    site.uploads.files["links"] = pack(tmp_path / "l", links=(("l", "f", tarfile.SYMTYPE),))
    with pytest.raises(BuildFailed, match="neither tar nor ln"):
        await site.build(Step("COPY", ["l", "/app/l"], "links"))


async def test_a_copy_larger_than_the_disk_fails(site: Site, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(1 << 20) * 300)
    with tarfile.open(tmp_path / "u", "w") as tar:
        tar.add(tmp_path / "big", "big")
    site.uploads.files["big"] = tmp_path / "u"
    with pytest.raises(BuildFailed, match=r"(?i)no space|wrote only"):
        await site.build(Step("COPY", ["big", "/opt/"], "big"))


async def test_a_build_that_runs_out_of_memory_says_so(site: Site) -> None:
    with pytest.raises(BuildFailed, match=r"killed by signal 9|exit status 137|oom"):
        await site.build(run("python3 -c 'x = bytearray(1 << 30)'; exit $?"))
