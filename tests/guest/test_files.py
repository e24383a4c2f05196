# ruff: noqa: ASYNC220, ASYNC221, ASYNC240 - the test and the agent share one machine; nothing else waits
from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest import FileType, LinkAgent
from tests.guest.conftest import RunningAgent, eventually, needs_root

ODD_NAMES = ["new\nline", "\udcff\udcfe", "-rf", "a b", "*", "\x01", "x" * 255, "é", "'\"\\"]


async def read(agent: LinkAgent, path: object, offset: int = 0, length: int | None = None) -> bytes:
    return b"".join([chunk async for chunk in agent.read_file(str(path), offset, length)])


async def code_of(awaitable: object) -> GuestErrorCode:
    with pytest.raises(GuestError) as caught:
        await awaitable  # type: ignore[misc]
    return caught.value.code


async def test_round_trip_of_sizes_around_every_boundary(agent: LinkAgent, tmp_path: Path) -> None:
    for size in (0, 1, 65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 1, 5_000_001):
        data = os.urandom(size)
        assert await agent.write_file(f"{tmp_path}/f", data) == size
        assert (tmp_path / "f").read_bytes() == data
        assert await read(agent, tmp_path / "f") == data


async def test_streamed_write_is_joined_to_large_writes(agent: LinkAgent, tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for i in range(1000):
            yield bytes([i % 256]) * 777

    assert await agent.write_file(f"{tmp_path}/a/b/f", pieces()) == 777_000
    assert (tmp_path / "a/b/f").read_bytes() == b"".join(bytes([i % 256]) * 777 for i in range(1000))


async def test_a_source_that_fails_fails_the_write(agent: LinkAgent, running: RunningAgent, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * 70_000
        raise ZeroDivisionError

    before = running.descriptors()
    with pytest.raises(ZeroDivisionError):
        await agent.write_file(f"{tmp_path}/f", broken())
    assert (await agent.hello())["streams"] == "0"
    assert running.descriptors() == before


async def test_modes_are_exact_and_overwriting_keeps_them(agent: LinkAgent, tmp_path: Path) -> None:
    await agent.write_file(f"{tmp_path}/d/f", b"x", mode=0o4751)
    assert stat.S_IMODE((tmp_path / "d/f").stat().st_mode) == 0o4751
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o755
    await agent.write_file(f"{tmp_path}/d/f", b"", mode=0o600)
    assert (tmp_path / "d/f").read_bytes() == b""
    assert (tmp_path / "d/f").stat().st_mode & 0o777 == 0o751
    await agent.make_dir(f"{tmp_path}/e", mode=0o2770)
    assert stat.S_IMODE((tmp_path / "e").stat().st_mode) == 0o2770


@needs_root
async def test_new_files_and_directories_belong_to_the_user(agent: LinkAgent, tmp_path: Path) -> None:
    await agent.write_file(f"{tmp_path}/a/b/f", b"x", user="daemon")
    await agent.make_dir(f"{tmp_path}/c/d", user="1234:5678")
    (tmp_path / "g").write_text("x")
    await agent.move(f"{tmp_path}/g", f"{tmp_path}/h/g", user="daemon")
    owners = {path: ((tmp_path / path).stat().st_uid, (tmp_path / path).stat().st_gid) for path in
              ("a", "a/b", "a/b/f", "c", "c/d", "h", "h/g")}  # fmt: skip
    assert owners == {"a": (1, 1), "a/b": (1, 1), "a/b/f": (1, 1), "c": (1234, 5678), "c/d": (1234, 5678),
                      "h": (1, 1), "h/g": (0, 0)}  # fmt: skip
    (tmp_path / "root-file").write_text("x")
    (tmp_path / "a/link").symlink_to(tmp_path / "root-file")
    await agent.write_file(f"{tmp_path}/a/link", b"y", user="daemon")
    assert (tmp_path / "root-file").stat().st_uid == 0  # a link gives nothing away
    assert await code_of(agent.write_file(f"{tmp_path}/z", b"", user="nobody-here")) == GuestErrorCode.NO_USER


async def test_ranges(agent: LinkAgent, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "f").write_bytes(data)
    assert await read(agent, tmp_path / "f", 100_000) == data[100_000:]
    assert await read(agent, tmp_path / "f", 65_530, 70_000) == data[65_530:135_530]
    assert await read(agent, tmp_path / "f", 299_999, 50) == data[299_999:]
    assert await read(agent, tmp_path / "f", 10, 0) == b""
    assert await read(agent, tmp_path / "f", 400_000) == b""


async def test_pseudo_files_and_devices(agent: LinkAgent) -> None:
    assert b"sandyard-agent" in await read(agent, "/proc/self/status")
    assert await read(agent, "/proc/version") == Path("/proc/version").read_bytes()
    assert await read(agent, "/dev/null") == b""
    assert await read(agent, "/dev/zero", 0, 100_000) == bytes(100_000)
    assert await code_of(read(agent, "/dev/zero")) == GuestErrorCode.INVALID
    assert await code_of(agent.write_file("/dev/full", b"x")) == GuestErrorCode.NO_SPACE


async def test_what_cannot_be_read_or_written_says_so(agent: LinkAgent, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "f").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "sock"))
    server.close()
    codes = {
        "missing": await code_of(read(agent, tmp_path / "missing")),
        "directory": await code_of(read(agent, tmp_path)),
        "fifo": await code_of(read(agent, tmp_path / "fifo")),
        "socket": await code_of(read(agent, tmp_path / "sock")),
        "loop": await code_of(read(agent, tmp_path / "loop")),
        "through a file": await code_of(read(agent, tmp_path / "f/x")),
        "relative": await code_of(read(agent, "etc/passwd")),
        "null byte": await code_of(read(agent, "/etc/\0passwd")),
        "long": await code_of(read(agent, "/" + "x/" * 4000)),
        "write directory": await code_of(agent.write_file(str(tmp_path), b"")),
        "write slash": await code_of(agent.write_file(f"{tmp_path}/new/", b"")),
        "write fifo": await code_of(agent.write_file(f"{tmp_path}/fifo", b"x")),
        "write below a file": await code_of(agent.write_file(f"{tmp_path}/f/x", b"x")),
        "write long name": await code_of(agent.write_file(f"{tmp_path}/{'x' * 256}", b"x")),
    }
    code = GuestErrorCode
    assert codes == {
        "missing": code.NOT_FOUND,
        "directory": code.IS_DIRECTORY,
        "fifo": code.INVALID,
        "socket": code.INVALID,
        "loop": code.INVALID,
        "through a file": code.NOT_DIRECTORY,
        "relative": code.INVALID,
        "null byte": code.INVALID,
        "long": code.TOO_BIG,
        "write directory": code.IS_DIRECTORY,
        "write slash": code.IS_DIRECTORY,
        "write fifo": code.INVALID,
        "write below a file": code.NOT_DIRECTORY,
        "write long name": code.TOO_BIG,
    }


async def test_a_failing_large_write_stops_early(agent: LinkAgent) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65_536

    assert await code_of(agent.write_file("/dev/full", endless())) == GuestErrorCode.NO_SPACE
    assert await code_of(agent.write_file("/no\0such", endless())) == GuestErrorCode.INVALID


async def test_stat(agent: LinkAgent, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "f").chmod(0o640)
    (tmp_path / "link").symlink_to("f")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "dir-link").symlink_to(".")
    info = await agent.stat(f"{tmp_path}/f")
    assert (info.name, info.path, info.type, info.size, info.mode) == ("f", f"{tmp_path}/f", FileType.FILE, 5, 0o640)
    assert info.mtime_ns == (tmp_path / "f").stat().st_mtime_ns
    assert (info.uid, info.owner) == (os.getuid(), (tmp_path / "f").owner())
    link = await agent.stat(f"{tmp_path}/link")
    assert (link.type, link.symlink_target, link.target_type, link.target_mode) == (
        FileType.SYMLINK, "f", FileType.FILE, 0o640)  # fmt: skip
    dangling = await agent.stat(f"{tmp_path}/dangling")
    assert (dangling.symlink_target, dangling.target_type, dangling.target_mode) == ("nowhere", None, None)
    assert (await agent.stat(f"{tmp_path}/dir-link")).target_type == FileType.DIRECTORY
    assert (await agent.stat("/")).name == "/"
    assert (await agent.stat("/dev/null")).type == FileType.OTHER
    assert (await agent.stat(f"{tmp_path}//")).path == str(tmp_path)
    assert await code_of(agent.stat(f"{tmp_path}/none")) == GuestErrorCode.NOT_FOUND


@needs_root
async def test_owner_without_a_name_is_a_number(agent: LinkAgent, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    os.chown(tmp_path / "f", 54321, 54322)
    os.utime(tmp_path / "f", ns=(0, -5))
    info = await agent.stat(f"{tmp_path}/f")
    assert (info.owner, info.group, info.mtime_ns) == ("54321", "54322", -5)


async def test_list_order_depth_and_links(agent: LinkAgent, tmp_path: Path) -> None:
    for name in ("b/y", "b/x/deep/er", "a", "c"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "B").touch()
    (tmp_path / "b/loop").symlink_to(tmp_path)
    below = [entry.path.removeprefix(f"{tmp_path}/") for entry in await agent.list_dir(str(tmp_path), depth=2)]
    assert below == ["B", "a", "b", "b/loop", "b/x", "b/y", "c"]
    assert [entry.name for entry in await agent.list_dir(f"{tmp_path}/")] == ["B", "a", "b", "c"]
    assert len(await agent.list_dir(str(tmp_path), depth=1000)) == 9
    assert await code_of(agent.list_dir(f"{tmp_path}/B")) == GuestErrorCode.NOT_DIRECTORY
    assert await code_of(agent.list_dir(f"{tmp_path}/none")) == GuestErrorCode.NOT_FOUND
    assert await code_of(agent.list_dir(str(tmp_path), depth=0)) == GuestErrorCode.INVALID
    assert {entry.name for entry in await agent.list_dir("/")} == set(os.listdir("/"))


async def test_odd_names_everywhere(agent: LinkAgent, tmp_path: Path) -> None:
    for name in ODD_NAMES:
        await agent.write_file(f"{tmp_path}/{name}", os.fsencode(name))
    assert sorted(os.listdir(tmp_path)) == sorted(ODD_NAMES)
    listed = [entry.name for entry in await agent.list_dir(str(tmp_path))]
    assert listed == sorted(ODD_NAMES, key=os.fsencode)
    for name in ODD_NAMES:
        assert await read(agent, f"{tmp_path}/{name}") == os.fsencode(name)
        assert (await agent.stat(f"{tmp_path}/{name}")).name == name
        await agent.move(f"{tmp_path}/{name}", f"{tmp_path}/moved/{name}")
        await agent.remove(f"{tmp_path}/moved/{name}")
    assert os.listdir(tmp_path / "moved") == []


async def test_a_directory_of_many(agent: LinkAgent, tmp_path: Path) -> None:
    for i in range(10_000):
        os.close(os.open(f"{tmp_path}/{i:06}", os.O_CREAT | os.O_WRONLY))
    assert [entry.name for entry in await agent.list_dir(str(tmp_path))] == [f"{i:06}" for i in range(10_000)]
    await agent.remove(str(tmp_path))
    assert not tmp_path.exists()
    tmp_path.mkdir()


async def test_list_refuses_over_a_hundred_thousand(agent: LinkAgent, tmp_path: Path) -> None:
    for part in ("d", "e"):  # one file may not have as many links
        (tmp_path / part).mkdir()
        (tmp_path / part / "0").touch()
        for i in range(1, 50_001):
            os.link(f"{tmp_path}/{part}/0", f"{tmp_path}/{part}/{i}")
    assert len(await agent.list_dir(f"{tmp_path}/d")) == 50_001
    assert await code_of(agent.list_dir(str(tmp_path), depth=2)) == GuestErrorCode.TOO_BIG


async def test_files_that_vanish_during_a_list(agent: LinkAgent, tmp_path: Path) -> None:
    script = (
        f"i=0; while [ $i -lt 200 ]; do : > {tmp_path}/$((i % 50)); rm -f {tmp_path}/$((i * 7 % 50)); i=$((i+1)); done"
    )
    churn = subprocess.Popen(["sh", "-c", script])
    try:
        while churn.poll() is None:
            await agent.list_dir(str(tmp_path), depth=3)
    finally:
        churn.kill()
        churn.wait()


async def test_make_dir(agent: LinkAgent, tmp_path: Path) -> None:
    await agent.make_dir(f"{tmp_path}/a/b/c")
    assert (tmp_path / "a/b/c").is_dir()
    (tmp_path / "f").touch()
    (tmp_path / "to-a").symlink_to("a")
    await agent.make_dir(f"{tmp_path}/to-a/d/")
    assert (tmp_path / "a/d").is_dir()
    assert await code_of(agent.make_dir(f"{tmp_path}/a/b")) == GuestErrorCode.EXISTS
    assert await code_of(agent.make_dir("/")) == GuestErrorCode.EXISTS
    assert await code_of(agent.make_dir(f"{tmp_path}/f")) == GuestErrorCode.EXISTS
    assert await code_of(agent.make_dir(f"{tmp_path}/f/g")) == GuestErrorCode.NOT_DIRECTORY


async def test_move(agent: LinkAgent, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    (tmp_path / "link").symlink_to("f")
    await agent.move(f"{tmp_path}/f", f"{tmp_path}/a/b/g")
    assert (tmp_path / "a/b/g").read_text() == "x"
    await agent.move(f"{tmp_path}/link", f"{tmp_path}/link2")
    assert os.readlink(tmp_path / "link2") == "f"
    assert await code_of(agent.move(f"{tmp_path}/none", f"{tmp_path}/new/x")) == GuestErrorCode.NOT_FOUND
    assert not (tmp_path / "new").exists()
    assert await code_of(agent.move(f"{tmp_path}/a", f"{tmp_path}/a/b/c")) == GuestErrorCode.INVALID


def keeps_attributes(folder: Path) -> bool:
    try:
        os.setxattr(folder, "user.test", b"x")
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return False
    return True


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a second file system")
async def test_move_across_file_systems(agent: LinkAgent, tmp_path: Path) -> None:
    other = Path(f"/dev/shm/sandyard-test-{os.getpid()}")
    if os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is on the same file system")
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/f").write_bytes(b"x" * 100_000)
    (tree / "sub/f").chmod(0o4700)
    os.utime(tree / "sub/f", ns=(10**18, 10**18))
    os.setxattr(tree / "sub/f", "user.e2b.author", b"mish")
    (tree / "link").symlink_to("/etc/passwd")
    os.mkfifo(tree / "fifo")
    try:
        await agent.move(str(tree), str(other / "new"))
        assert not tree.exists()
        moved = (other / "new/sub/f").stat()
        assert (moved.st_size, stat.S_IMODE(moved.st_mode), moved.st_mtime_ns) == (100_000, 0o4700, 10**18)
        if keeps_attributes(other):
            assert (await agent.stat(f"{other}/new/sub/f")).metadata == {"author": "mish"}
        assert os.readlink(other / "new/link") == "/etc/passwd"
        assert stat.S_ISFIFO((other / "new/fifo").stat().st_mode)
        (tmp_path / "full").mkdir()
        (tmp_path / "full/x").touch()
        assert await code_of(agent.move(str(other / "new"), str(tmp_path / "full"))) == GuestErrorCode.EXISTS
        assert (other / "new/sub/f").exists()
        assert os.listdir(tmp_path) == ["full"]
    finally:
        subprocess.run(["rm", "-rf", other], check=True)


async def test_remove_follows_no_link(agent: LinkAgent, tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep/f").touch()
    (tmp_path / "d").mkdir()
    (tmp_path / "d/link").symlink_to(tmp_path / "keep")
    (tmp_path / "link").symlink_to(tmp_path / "keep")
    for name in ("d", "link", "none", "none/deeper"):
        await agent.remove(f"{tmp_path}/{name}")
    assert [path.name for path in tmp_path.rglob("*")] == ["keep", "f"]
    for bad in ("/", f"{tmp_path}/keep/..", f"{tmp_path}/keep/."):
        assert await code_of(agent.remove(bad)) in (GuestErrorCode.INVALID, GuestErrorCode.EXISTS)
    assert (tmp_path / "keep/f").exists()


async def test_remove_of_a_tree_deeper_than_any_path(agent: LinkAgent, tmp_path: Path) -> None:
    script = (
        f"import os; os.chdir({str(tmp_path)!r}); os.mkdir('top'); os.chdir('top')\n"
        "for i in range(600): os.mkdir('d' * 20); open('f', 'w').close(); os.chdir('d' * 20)"
    )
    subprocess.run(["python3", "-c", script], check=True)
    entries = await agent.list_dir(f"{tmp_path}/top", depth=10_000)
    assert 100 < len(entries) < 1200
    begin = time.monotonic()
    await agent.remove(f"{tmp_path}/top")
    assert os.listdir(tmp_path) == []
    assert time.monotonic() - begin < 10


async def test_long_work_stalls_nobody(agent: LinkAgent, running: RunningAgent, tmp_path: Path) -> None:
    for i in range(5000):
        (tmp_path / f"{i}").touch()
    reading = agent.read_file("/dev/zero", 0, 1 << 40)
    await anext(reading)
    listing = agent.list_dir(str(tmp_path))
    begin = time.monotonic()
    await agent.hello()
    assert time.monotonic() - begin < 0.5
    assert len(await listing) == 5000
    await reading.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: running.descriptors() < 40)
    assert (await agent.hello())["streams"] == "0"


META = {"author": "mish", "purpose": "up load", "empty": ""}


async def test_metadata_are_attributes_of_the_file(agent: LinkAgent, tmp_path: Path) -> None:
    path = tmp_path / "a/f"
    await agent.write_file(str(path), b"x", metadata=META)
    assert {name: os.getxattr(path, name) for name in os.listxattr(path)} == {
        f"user.e2b.{name}": value.encode() for name, value in META.items()
    }
    os.setxattr(path, "user.other", b"kept")
    os.setxattr(path, "user.e2b.", b"no name")
    os.setxattr(path, "user.e2b.raw", b"\xff\0\n")
    (tmp_path / "link").symlink_to(path)
    seen = META | {"raw": "\udcff\0\n"}
    assert (await agent.stat(str(path))).metadata == seen
    assert [info.metadata for info in await agent.list_dir(str(tmp_path), 2)] == [{}, seen, seen]
    await agent.write_file(str(path), b"y", metadata={"author": "other"})
    assert (await agent.stat(str(path))).metadata == {"author": "other"}
    await agent.move(str(path), f"{tmp_path}/g")
    assert (await agent.stat(f"{tmp_path}/g")).metadata == {"author": "other"}
    await agent.write_file(f"{tmp_path}/g", b"z")
    assert (await agent.stat(f"{tmp_path}/g")).metadata == {}
    assert os.getxattr(tmp_path / "g", "user.other") == b"kept"


async def test_metadata_too_large_leave_no_file(agent: LinkAgent, tmp_path: Path) -> None:
    fits = {"k" * 246: "v" * (4096 - 255 - 200), "b": "v" * 190}
    assert sum(9 + len(name) + len(value) for name, value in fits.items()) == 4096
    for metadata, code in (
        ({"k" * 247: ""}, GuestErrorCode.TOO_BIG),
        (fits | {"": "x"}, GuestErrorCode.INVALID),
        (fits | {"c": ""}, GuestErrorCode.TOO_BIG),
    ):
        assert await code_of(agent.write_file(f"{tmp_path}/f", b"x", metadata=metadata)) == code
    assert not (tmp_path / "f").exists()


async def test_where_no_metadata_can_be_kept(agent: LinkAgent, tmp_path: Path) -> None:
    assert await agent.write_file("/proc/self/comm", b"renamed") == 7
    assert await code_of(agent.write_file("/proc/self/comm", b"x", metadata={"a": "b"})) == GuestErrorCode.INVALID
    assert (await agent.stat("/proc/self/comm")).metadata == {}


async def test_an_entry_tells_a_bounded_amount(agent: LinkAgent, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    set_count = 0
    try:
        for i in range(40):
            os.setxattr(tmp_path / "f", f"user.e2b.{i:02}", b"v" * 300)
            set_count += 1
    except OSError:
        assert set_count > 5  # a file system's own limit
    told = (await agent.stat(f"{tmp_path}/f")).metadata
    assert 5 < len(told) <= set_count
    assert set(told.values()) == {"v" * 300}
