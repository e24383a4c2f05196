"""Checks of layers made of what a sandbox changed: what they hold, and that the sandbox goes on."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from sandyard.errors import SandboxError
from sandyard.runtimes.base import Instance, Resources, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit, expect
from sandyard.runtimes.conformance.runner import check

SMALL = Resources(memory_mb=128, disk_mb=64)
_MAKE = """
import os
os.umask(0)
os.makedirs("/data/deep/er")
for name, mode, owner in (("plain", 0o640, 0), ("setuid", 0o4755, 1000), ("sticky", 0o1777, 1000)):
    with open(f"/data/{name}", "w") as file:
        file.write(name * 1000)
    os.chown(f"/data/{name}", owner, owner)
    os.chmod(f"/data/{name}", mode)
os.setxattr("/data/plain", "user.note", b"one")
os.link("/data/plain", "/data/deep/linked")
os.symlink("../plain", "/data/deep/symlink")
os.symlink("/nowhere", "/data/dangling")
os.mkfifo("/data/fifo", 0o600)
os.utime("/data/plain", ns=(10**18, 10**18 + 5))
with open("/data/sparse", "wb") as file:
    file.seek(20 << 20)
    file.write(b"end")
os.chmod("/data/deep", 0o700)
"""
_SHOW = """
import os
for where, names, files in sorted(os.walk("/data")):
    for name in sorted(names + files):
        path = os.path.join(where, name)
        st = os.lstat(path)
        link = os.readlink(path) if os.path.islink(path) else ""
        note = os.getxattr(path, "user.note") if name in ("plain", "linked") else b""
        size = st.st_size if not os.path.isdir(path) else 0
        print(path, oct(st.st_mode), st.st_uid, st.st_gid, size, link, note,
              st.st_mtime_ns if name == "plain" else "", st.st_nlink if not os.path.isdir(path) else "",
              st.st_blocks * 512 < 1 << 20)
"""


@asynccontextmanager
async def layer_home() -> AsyncIterator[Path]:
    """Where a check may put layers."""
    with tempfile.TemporaryDirectory(prefix="sandyard-layers-") as home:
        yield Path(home)


async def _on(kit: Kit, *layers: Path, below: Sequence[Path] | None = None) -> Instance:
    """A sandbox that starts from these layers above the root file system, or above others."""
    sandbox_id = f"check{secrets.token_hex(6)}"
    kit.made.append(sandbox_id)
    rootfs = replace(kit.rootfs, layers=[*layers, *(kit.rootfs.layers if below is None else below)])
    return await kit.runtime.create(SandboxSpec(sandbox_id, rootfs, SMALL, sandbox_id))


async def end(kit: Kit, *sandboxes: Instance) -> None:
    for sandbox in sandboxes:
        await kit.runtime.destroy(sandbox.spec.sandbox_id)


@check("a commit keeps content, modes, owners, times, links, attributes and holes", own=True, needs="file_snapshot")
async def _keeps(kit: Kit) -> None:
    await kit.python(_MAKE)
    wanted = await kit.python(_SHOW)
    async with layer_home() as home:
        size = await kit.sandbox.commit(home / "one")
        expect(0 < size < 10 << 20, f"it takes {size} bytes")
        copy = await _on(kit, home / "one")
        got = await kit.python(_SHOW, agent=copy.agent)
        expect(got == wanted, f"it was\n{wanted}\nand is\n{got}")
        expect(await kit.output("cat /data/setuid", agent=copy.agent) == "setuid" * 1000, "other content")
        expect(await kit.output("sudo -n id -u", user="user", agent=copy.agent) == "0", "sudo does not work")
        await end(kit, copy)


@check("a commit keeps what was deleted, replaced and emptied", own=True, needs="file_snapshot")
async def _whiteouts(kit: Kit) -> None:
    await kit.output(
        "rm /etc/os-release && rm -rf /usr/share && mkdir /usr/share && echo mine > /usr/share/mine"
        " && rm -rf /opt && ln -s /data /opt && rm /etc/shells && mkdir /etc/shells && mv /etc/skel /etc/moved"
    )
    show = "ls -A /usr/share; readlink /opt; stat -c %F /etc/shells; ls -A /etc/moved; ls -d /etc/skel /etc/os-release"
    wanted = (await kit.run(show)).text
    async with layer_home() as home:
        await kit.sandbox.commit(home / "one")
        copy = await _on(kit, home / "one")
        got = (await kit.run(show, agent=copy.agent)).text
        expect(got == wanted, f"it was {wanted!r} and is {got!r}")
        await end(kit, copy)


@check("a committed sandbox goes on, and its copies are apart", own=True, needs="file_snapshot")
async def _goes_on(kit: Kit) -> None:
    process = await kit.start("echo before > /file; read line; echo $line >> /file; cat /file", stdin=True)
    await kit.output("until test -s /file; do sleep 0.01; done")
    async with layer_home() as home:
        await kit.sandbox.commit(home / "one")
        first, second = await asyncio.gather(_on(kit, home / "one"), _on(kit, home / "one"))
        await process.write_stdin(b"after\n")
        expect([data async for _, data in process.output()] == [b"before\nafter\n"], "the source did not go on")
        await kit.output("echo other > /file; rm -rf /usr/share", agent=first.agent)
        expect(await kit.output("cat /file; ls -d /usr/share", agent=second.agent) == "before\n/usr/share", "shared")
        await end(kit, first, second)


@check("a commit is of one instant", own=True, needs="file_snapshot")
async def _one_instant(kit: Kit) -> None:
    await kit.start("i=0; while :; do i=$((i+1)); echo $i > /first; echo $i > /second; done")
    await kit.output("until test -s /second; do sleep 0.01; done")
    async with layer_home() as home:
        for name in ("one", "two", "three"):
            await kit.sandbox.commit(home / name)
            copy = await _on(kit, home / name)
            said = (await kit.output("cat /first; echo; cat /second", agent=copy.agent)).split()
            numbers = [int(word) for word in said]
            # The writer may have just emptied one of the two, or not have written the second yet.
            expect(len(numbers) < 2 or numbers[0] - numbers[1] in (0, 1), f"the files say {numbers}")
            await end(kit, copy)


@check("a paused sandbox can be committed and stays paused", own=True, needs="file_snapshot")
async def _paused(kit: Kit) -> None:
    if not kit.runtime.capabilities.pause_keeps_memory:
        return
    await kit.output("echo kept > /kept")
    await kit.sandbox.pause()
    async with layer_home() as home:
        await kit.sandbox.commit(home / "one")
        expect(kit.sandbox.paused, "it runs")
        copy = await _on(kit, home / "one")
        expect(await kit.output("cat /kept", agent=copy.agent) == "kept", "the file is missing")
        await end(kit, copy)
    await kit.sandbox.resume()
    await kit.agent.hello()


@check("layers stand on layers", own=True, needs="file_snapshot")
async def _chain(kit: Kit) -> None:
    async with layer_home() as home:
        await kit.output("echo 1 > /one; echo 1 > /all; mkdir /gone; echo 1 > /gone/file")
        await kit.sandbox.commit(home / "one")
        second = await _on(kit, home / "one")
        await kit.output("echo 2 > /two; echo 2 > /all; rm -r /gone", agent=second.agent)
        await second.commit(home / "two")
        third = await _on(kit, home / "two", below=second.spec.rootfs.layers)
        await kit.output("echo 3 > /three; echo 3 > /all; mkdir /gone", agent=third.agent)
        await third.commit(home / "three")
        last = await _on(kit, home / "three", below=third.spec.rootfs.layers)
        said = await kit.output("cat /one /two /three /all; ls /gone; ls -d /usr/share", agent=last.agent)
        expect(said.split() == ["1", "2", "3", "3", "/usr/share"], f"it says {said!r}")
        await end(kit, second, third, last)


@check("a commit that fails leaves nothing, and the sandbox running", own=True, needs="file_snapshot")
async def _fails(kit: Kit) -> None:
    async with layer_home() as home:
        await kit.sandbox.commit(home / "one")
        for target in (home / "one", home / "missing" / "two"):
            try:
                await kit.sandbox.commit(target)
            except SandboxError:
                await kit.agent.hello()
            else:
                raise AssertionError(f"{target} was written")
        left = [path.name for path in home.iterdir()]
        expect(left == ["one"], f"left: {left}")


@check("a sandbox that was booted again can be committed", own=True, needs="file_snapshot")
async def _booted(kit: Kit) -> None:
    """A sandbox that was halted and booted stands on the same disk: its commit has all of it."""
    if not kit.runtime.capabilities.halt:
        return
    await kit.output("echo old > /old")
    await kit.runtime.halt(kit.sandbox.spec.sandbox_id)
    booted = await kit.runtime.boot(kit.sandbox.spec)
    await kit.output("echo new > /new", agent=booted.agent)
    async with layer_home() as home:
        await booted.commit(home / "one")
        copy = await _on(kit, home / "one")
        expect(await kit.output("cat /old /new", agent=copy.agent) == "old\nnew", "files are missing")
        await end(kit, copy)


async def _successive(kit: Kit, home: Path, count: int) -> tuple[list[Path], list[int]]:
    """Commits of one sandbox that each stand on the one before, and their bytes: a block more in each."""
    layers: list[Path] = []
    sizes: list[int] = []
    for number in range(count):
        await kit.output(f"head -c 65536 /dev/urandom > /data/{number}; echo {number} > /data/last; rm -f /data/gone")
        await kit.output(f"echo {number} > /data/only{number}; rm -f /data/only{number - 1}")
        sizes.append(await kit.sandbox.commit(home / f"c{number}", parent=layers[-1] if layers else None))
        layers.append(home / f"c{number}")
    return layers, sizes


@check("a commit above an earlier one costs what changed, and is whole", own=True, needs="small_commits")
async def _increments(kit: Kit) -> None:
    await kit.output("mkdir /data; head -c 16777216 /dev/urandom > /data/big; echo x > /data/gone")
    async with layer_home() as home:
        layers, sizes = await _successive(kit, home, 2)
        expect(kit.runtime.name == "memory" or sizes[1] < sizes[0] / 8, f"they take {sizes} bytes")
        show = "cd /data; ls; cat last; md5sum *"
        wanted = await kit.output(show)
        copy = await _on(kit, layers[1])
        expect(await kit.output(show, agent=copy.agent) == wanted, "another state")
        before = await _on(kit, layers[0])
        expect(await kit.output("cat /data/last", agent=before.agent) == "0", "the first commit is another one now")
        await end(kit, copy, before)


@check(
    "many commits above each other each give their state, with no more than they need", own=True, needs="file_snapshot"
)
async def _deep(kit: Kit) -> None:
    await kit.output("mkdir /data; head -c 4194304 /dev/urandom > /data/big")
    async with layer_home() as home:
        layers, _ = await _successive(kit, home, 12)
        for number in (11, 8, 3):
            expect(_ancestors(kit, layers[number]) <= set(layers[:number]), f"{number} needs others")
            copy = await _on(kit, layers[number])
            got = await kit.output("cat /data/last; ls /data | wc -l", agent=copy.agent)
            expect(got == f"{number}\n{number + 4}", f"commit {number} has {got!r}")
            await end(kit, copy)
        for layer in layers[:-1]:  # what is in the way of nobody may go
            if layer not in _ancestors(kit, layers[-1]):
                for path in home.glob(f"{layer.name}*"):
                    if path.name.partition(".")[0] == layer.name:
                        path.unlink()
        copy = await _on(kit, layers[-1])
        expect(await kit.output("cat /data/last", agent=copy.agent) == "11", "it needed more than it said")
        await end(kit, copy)


def _ancestors(kit: Kit, layer: Path) -> set[Path]:
    found: set[Path] = set()
    below = kit.runtime.needs(layer)
    while below is not None:
        found.add(below)
        below = kit.runtime.needs(below)
    return found
