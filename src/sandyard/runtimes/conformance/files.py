"""Checks of files: content, names, owners, links, odd kinds, and that the host is never touched."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace

from sandyard.errors import GuestErrorCode
from sandyard.guest.base import FileType
from sandyard.runtimes.base import Resources
from sandyard.runtimes.conformance.kit import Kit, expect, refused
from sandyard.runtimes.conformance.runner import check

MIB = 1 << 20


async def _read(kit: Kit, path: str, offset: int = 0, length: int | None = None) -> bytes:
    return b"".join([chunk async for chunk in kit.agent.read_file(path, offset, length)])


async def _chunks(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@check("binary files go in and out intact")
async def _binary(kit: Kit) -> None:
    data = os.urandom(3 * MIB + 17)
    for source in (data, _chunks(data)):
        written = await kit.agent.write_file("/tmp/binary", source)
        expect(written == len(data), f"{written} of {len(data)} bytes written")
        expect(await _read(kit, "/tmp/binary") == data, "other bytes came back")


@check("part of a file can be read")
async def _range(kit: Kit) -> None:
    await kit.agent.write_file("/tmp/range", bytes(range(256)))
    expect(await _read(kit, "/tmp/range", 10, 5) == bytes(range(10, 15)), "wrong middle")
    expect(await _read(kit, "/tmp/range", 250) == bytes(range(250, 256)), "wrong end")
    expect(await _read(kit, "/tmp/range", 300) == b"", "something behind the end")


@check("a file is truncated when written again")
async def _truncate(kit: Kit) -> None:
    for content in (b"long content", b"short", b""):
        await kit.agent.write_file("/tmp/again", content)
        expect(await _read(kit, "/tmp/again") == content, f"{content!r} did not come back")


@check("metadata stay with their file until it is written again")
async def _metadata(kit: Kit) -> None:
    await kit.agent.write_file("/tmp/meta", b"x", user="user", metadata={"author": "a b", "none": ""})
    await kit.agent.move("/tmp/meta", "/tmp/meta2")
    kept = (await kit.agent.stat("/tmp/meta2")).metadata
    expect(kept == {"author": "a b", "none": ""}, f"after a move: {kept}")
    await kit.agent.write_file("/tmp/meta2", b"y")
    kept = (await kit.agent.stat("/tmp/meta2")).metadata
    expect(not kept, f"after it was written again: {kept}")


@check("odd file names work")
async def _odd_names(kit: Kit) -> None:
    names = ["a b", "new\nline", "-rf", "*", "'\"$(id)\\", "é😀", "\udcff\udcfe", "n" * 255, "tab\t", "..."]
    for name in names:
        await kit.agent.write_file(f"/tmp/odd/{name}", name.encode("utf-8", "surrogateescape"))
    listed = [info.name for info in await kit.agent.list_dir("/tmp/odd")]
    expect(sorted(listed) == sorted(names), f"listed {listed}")
    for name in names:
        content = (await _read(kit, f"/tmp/odd/{name}")).decode("utf-8", "surrogateescape")
        expect(content == name, f"{name!r} holds {content!r}")
    await kit.agent.remove("/tmp/odd")
    await refused(kit.agent.stat("/tmp/odd"), GuestErrorCode.NOT_FOUND)


@check("a name that is too long is refused")
async def _long_name(kit: Kit) -> None:
    await refused(kit.agent.write_file(f"/tmp/{'n' * 256}", b""), GuestErrorCode.TOO_BIG, GuestErrorCode.INVALID)


@check("files of procfs can be read")
async def _procfs(kit: Kit) -> None:
    expect(b"\nPid:" in await _read(kit, "/proc/self/status"), "no content")


@check("a missing file and a directory in its place are told apart")
async def _not_files(kit: Kit) -> None:
    await refused(_read(kit, "/tmp/nowhere"), GuestErrorCode.NOT_FOUND)
    await refused(_read(kit, "/etc"), GuestErrorCode.IS_DIRECTORY)
    await refused(kit.agent.write_file("/etc", b""), GuestErrorCode.IS_DIRECTORY)
    await refused(kit.agent.list_dir("/etc/passwd"), GuestErrorCode.NOT_DIRECTORY)
    await refused(kit.agent.stat("/etc/passwd/x"), GuestErrorCode.NOT_DIRECTORY, GuestErrorCode.NOT_FOUND)


@check("written files and their parents belong to the user asked for")
async def _owner(kit: Kit) -> None:
    await kit.agent.write_file("/home/user/a/b/file", b"x", user="user", mode=0o640)
    for path in ("/home/user/a", "/home/user/a/b", "/home/user/a/b/file"):
        info = await kit.agent.stat(path)
        expect((info.uid, info.owner) == (1000, "user"), f"{path} belongs to {info.owner}")
    expect((await kit.agent.stat("/home/user/a/b/file")).mode == 0o640, "wrong mode")
    expect(await kit.output("cat ~/a/b/file && rm -r ~/a", user="user") == "x", "the user cannot use it")


@check("making a directory twice says so")
async def _make_dir(kit: Kit) -> None:
    await kit.agent.make_dir("/tmp/made/deep/er", user="user", mode=0o700)
    info = await kit.agent.stat("/tmp/made/deep/er")
    expect(info.type is FileType.DIRECTORY and info.owner == "user", f"made {info}")
    await refused(kit.agent.make_dir("/tmp/made/deep/er"), GuestErrorCode.EXISTS)
    await kit.agent.write_file("/tmp/made/file", b"")
    codes = (GuestErrorCode.NOT_DIRECTORY, GuestErrorCode.EXISTS)
    await refused(kit.agent.make_dir("/tmp/made/file/below"), *codes)


@check("a symlink is described as itself and as its target")
async def _symlink(kit: Kit) -> None:
    await kit.output("ln -sfn /etc/passwd /tmp/link; ln -sfn /nowhere /tmp/dangling; ln -sfn loop /tmp/loop")
    info = await kit.agent.stat("/tmp/link")
    expect(info.type is FileType.SYMLINK and info.symlink_target == "/etc/passwd", f"got {info}")
    expect(info.target_type is FileType.FILE and info.target_mode == 0o644, f"got {info}")
    for name in ("dangling", "loop"):
        info = await kit.agent.stat(f"/tmp/{name}")
        expect(info.type is FileType.SYMLINK and info.target_type is None, f"got {info}")


@check("removing never follows a symlink")
async def _remove_symlink(kit: Kit) -> None:
    await kit.output("mkdir -p /tmp/keep /tmp/tree && touch /tmp/keep/file && ln -sfn /tmp/keep /tmp/tree/link")
    await kit.agent.remove("/tmp/tree")
    await kit.agent.stat("/tmp/keep/file")
    await refused(kit.agent.stat("/tmp/tree"), GuestErrorCode.NOT_FOUND)
    await kit.agent.remove("/tmp/tree")


@check("a hostile symlink never makes the host act")
async def _hostile_symlink(kit: Kit) -> None:
    with tempfile.NamedTemporaryFile(prefix="sandyard-bait-") as bait:
        bait.write(b"host")
        bait.flush()
        for target in (bait.name, f"/proc/1/root{bait.name}", f"../../../../../../../..{bait.name}"):
            await kit.output(["ln", "-sfn", target, "/tmp/bait"])
            await refused(_read(kit, "/tmp/bait"), GuestErrorCode.NOT_FOUND, GuestErrorCode.PERMISSION)
        await kit.output(["ln", "-sfn", bait.name, "/tmp/bait"])
        await kit.agent.write_file("/tmp/bait", b"sandbox")
        await kit.agent.remove("/tmp/bait")
        bait.seek(0)
        expect(bait.read() == b"host", "a file of the host was written")
    await kit.agent.remove(bait.name)


@check("moving works within and across file systems")
async def _move(kit: Kit) -> None:
    await kit.agent.write_file("/tmp/from/file", b"content", user="user")
    await kit.agent.move("/tmp/from", "/dev/shm/to")
    await kit.agent.move("/dev/shm/to/file", "/tmp/new/parent/file")
    expect(await _read(kit, "/tmp/new/parent/file") == b"content", "the content is lost")
    expect((await kit.agent.stat("/tmp/new/parent/file")).owner == "user", "the owner is lost")
    await refused(kit.agent.stat("/tmp/from"), GuestErrorCode.NOT_FOUND)
    await refused(kit.agent.move("/tmp/nowhere", "/tmp/x"), GuestErrorCode.NOT_FOUND)


@check("a FIFO or device does not hang a read")
async def _fifo(kit: Kit) -> None:
    await kit.output("rm -f /tmp/fifo; mkfifo /tmp/fifo")
    await refused(_read(kit, "/tmp/fifo"), *GuestErrorCode)
    expect(await _read(kit, "/dev/zero", 0, 1000) == bytes(1000), "a bounded read of /dev/zero")


@check("a big directory is listed in order")
async def _big_directory(kit: Kit) -> None:
    await kit.python("import os\nos.makedirs('/tmp/big')\nfor n in range(5000): open(f'/tmp/big/{n:05}','w').close()")
    names = [info.name for info in await kit.agent.list_dir("/tmp/big")]
    expect(names == [f"{n:05}" for n in range(5000)], f"{len(names)} names, or out of order")
    await kit.agent.remove("/tmp/big")


@check("a deep tree is listed to the depth asked and removed")
async def _deep(kit: Kit) -> None:
    await kit.python(
        "import os\nos.mkdir('/tmp/deep'); os.chdir('/tmp/deep')\nfor n in range(1500): os.mkdir('d'); os.chdir('d')"
    )
    found = [info.path for info in await kit.agent.list_dir("/tmp/deep", 3)]
    expect(found == ["/tmp/deep/d", "/tmp/deep/d/d", "/tmp/deep/d/d/d"], f"listed {found[:5]}")
    await kit.agent.remove("/tmp/deep")
    await refused(kit.agent.stat("/tmp/deep"), GuestErrorCode.NOT_FOUND)


@check("files change under a listing without harm")
async def _vanishing(kit: Kit) -> None:
    await kit.agent.make_dir("/tmp/churn")
    process = await kit.start("cd /tmp/churn; for n in $(seq 400); do touch f$n; rm -f f$((n-5)); done")
    for _ in range(10):
        await kit.agent.list_dir("/tmp/churn")
    await process.wait()


@check("/tmp and /dev/shm are shared scratch")
async def _scratch(kit: Kit) -> None:
    for path in ("/tmp", "/dev/shm"):
        mode = (await kit.agent.stat(path)).mode
        expect(mode == 0o1777, f"{path} has mode {mode:o}")
        await kit.output(f"echo x > {path}/of-user && rm {path}/of-user", user="user")
    size = int(await kit.output("df --output=size -B1 /dev/shm | tail -1"))
    expect(MIB <= size <= 1024 * MIB, f"/dev/shm has {size} bytes")


@check("devices are there and no disk is")
async def _devices(kit: Kit) -> None:
    await kit.output("echo x > /dev/null && head -c 8 /dev/urandom | wc -c && test -c /dev/tty && test -e /dev/ptmx")
    await kit.output("test -e /dev/fd/0 && test -L /dev/stdin", user="user")
    blocks = await kit.output("find /dev -type b | wc -l")
    expect(blocks == "0", f"{blocks} block devices")
    ran = await kit.run("mknod /tmp/disk b 7 0 && head -c 1 /tmp/disk")
    expect(ran.status.code != 0, "a block device was made and read")


@check("a full disk is ENOSPC, and room can be made again", own=True, needs="hard_disk_limit")
async def _full(kit: Kit) -> None:
    small = await kit.make(_resources(kit, 32))
    ran = await kit.run("head -c 100M /dev/zero > /tmp/fill", agent=small.agent)
    expect(ran.status.code != 0 and b"No space left" in ran.stderr, f"gave {ran.status}, {ran.stderr!r}")
    await refused(small.agent.write_file("/tmp/more", bytes(4 * MIB)), GuestErrorCode.NO_SPACE)
    await small.agent.remove("/tmp/fill")
    await small.agent.remove("/tmp/more")
    written = await small.agent.write_file("/tmp/less", bytes(8 * MIB))
    expect(written == 8 * MIB, f"{written} bytes after making room")
    used = (await small.usage()).disk_bytes
    expect(8 * MIB <= used <= 40 * MIB, f"use is {used} bytes")


def _resources(kit: Kit, disk_mb: int) -> Resources:
    return replace(kit.sandbox.spec.resources, disk_mb=disk_mb)


@check("set-id bits and modes of the template survive")
async def _modes(kit: Kit) -> None:
    info = await kit.agent.stat(await kit.output("readlink -f $(command -v sudo)"))
    expect(info.mode & stat.S_ISUID and info.uid == 0, f"sudo is {info.mode:o} of {info.owner}")
