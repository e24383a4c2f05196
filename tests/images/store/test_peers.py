"""Beside umoci: the same files; from a registry behind a link that breaks: the same image."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandyard.errors import HostError
from sandyard.images.oci.layers import LayerStore
from sandyard.images.oci.pull import pull
from tests.images import oci
from tests.images.oci import Entry, folder, image, layer, running_registry, write_layout
from tests.images.store.conftest import MIB, MakeSettings, random_layer

pytestmark = pytest.mark.root
needs_umoci = pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed")
needs_registry = pytest.mark.skipif(not oci.have_registry(), reason="docker-registry is not installed")

LAYERS = [
    layer(
        folder("etc"),
        folder("opt", mode=0o1777),
        Entry("etc/name", b"lower", uid=7, gid=8),
        Entry("etc/gone", b"x"),
        Entry("opt/tool", b"tool", mode=0o4755),
        Entry("opt/group", b"g", mode=0o2755, gid=50),
        Entry("opt/same", kind=tarfile.LNKTYPE, link="opt/tool"),
        Entry("opt/link", kind=tarfile.SYMTYPE, link="../etc/name"),
        Entry("opt/dangling", kind=tarfile.SYMTYPE, link="/nowhere"),
        Entry("opt/pipe", kind=tarfile.FIFOTYPE, mode=0o600),
        folder("var"),
        Entry("var/a", b"a"),
        Entry("var/b", b"b"),
        folder("cache"),
        Entry("cache/old", b"o"),
        Entry("é" * 60 + "/" + "n" * 120, b"long"),
    ),
    layer(
        Entry("etc/.wh.gone"),
        Entry("etc/name", b"upper", mode=0o600, uid=65534),
        folder("var"),
        Entry("var/.wh..wh..opq"),
        Entry("var/c", b"c", attributes={"user.note": b"n\xff"}),
        Entry(".wh.cache"),
    ),
    layer(folder("cache"), Entry("cache/new", b"n"), Entry("opt/tool", b"newer"), Entry("var/empty")),
]


async def done(*words: object) -> None:
    """Run a command to its end."""
    await asyncio.to_thread(subprocess.run, [str(word) for word in words], check=True, capture_output=True)


@contextmanager
def merged(trees: list[Path], home: Path) -> Iterator[Path]:
    """What a sandbox sees of layers, the topmost first."""
    empty, mount = home / "empty", home / "merged"
    empty.mkdir()
    mount.mkdir()
    below = ":".join(map(str, [*trees, empty]))
    environ = {**os.environ, "LIBMOUNT_FORCE_MOUNT2": "always"}  # else mount(8) takes short options only
    command = ["mount", "-t", "overlay", "overlay", "-o", f"ro,lowerdir={below}", str(mount)]
    subprocess.run(command, check=True, env=environ)
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


def listing(root: Path, base: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        entry = path.lstat()
        content: Any = None
        if stat.S_ISREG(entry.st_mode):
            attributes = [(n, os.getxattr(path, n)) for n in os.listxattr(path) if n.startswith("user.")]
            content = (hashlib.sha256(path.read_bytes()).hexdigest(), attributes)
        elif stat.S_ISLNK(entry.st_mode):
            content = os.readlink(path)
        when = None if stat.S_ISDIR(entry.st_mode) else int(entry.st_mtime)  # merged ones have that of any layer
        owner = (entry.st_uid - base, entry.st_gid - base)
        found[str(path.relative_to(root))] = (oct(entry.st_mode), *owner, when, content)
    return found


@needs_umoci
async def test_the_files_are_those_that_umoci_unpacks(make: MakeSettings, tmp_path: Path) -> None:
    settings = make()
    home = write_layout(tmp_path / "image", image(LAYERS))
    pulled = await pull(settings, f"oci:{home}")
    await done("umoci", "raw", "unpack", "--image", f"{home}:latest", tmp_path / "umoci")
    with merged(list(pulled.trees), tmp_path) as mount:
        ours, theirs = listing(mount, settings.container.uid_base), listing(tmp_path / "umoci", 0)
        assert ours == theirs
        assert (mount / "opt/same").read_bytes() == b"tool"
    assert "etc/gone" not in ours
    assert {name for name in ours if name.startswith(("var/", "cache/"))} == {"var/c", "var/empty", "cache/new"}


@asynccontextmanager
async def breaking_link(address: str, after: int, times: int) -> AsyncIterator[str]:
    """An address that leads to another one, and cuts `times` of the answers after so many bytes."""
    host, port = address.split(":")
    left = times

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        there_reader, there_writer = await asyncio.open_connection(host, int(port))

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, *, cuts: bool) -> None:
            nonlocal left
            passed = 0
            while data := await source.read(65536):
                passed += len(data)
                if cuts and passed > after and left > 0:
                    left -= 1
                    return
                target.write(data)
                await target.drain()

        ways = [
            asyncio.ensure_future(pump(reader, there_writer, cuts=False)),
            asyncio.ensure_future(pump(there_reader, writer, cuts=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, there_writer):
                end.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@needs_registry
@pytest.mark.parametrize(("times", "works"), [(2, True), (100, False)])
async def test_a_link_that_breaks(times: int, works: bool, make: MakeSettings, tmp_path: Path) -> None:
    settings = make()
    made = image([random_layer("a", 4 * MIB)])
    with running_registry(tmp_path / "registry") as registry:
        registry.push("big", made)
        async with breaking_link(registry.address, MIB, times) as address:
            if works:
                pulled = await pull(settings, f"{address}/big")
                assert pulled.digest == made.manifest
            else:
                with pytest.raises(HostError, match=r"could not be pulled: .*/big: blob sha256:"):
                    await pull(settings, f"{address}/big")
        if not works:
            assert LayerStore(settings).all() == []
            assert (await pull(settings, f"{registry.address}/big@{made.manifest}")).digest == made.manifest
    assert list((settings.paths.state / "downloads").iterdir()) == []


@needs_umoci
@needs_registry
@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
async def test_what_umoci_makes_and_skopeo_pushes(make: MakeSettings, tmp_path: Path) -> None:
    home, bundle = tmp_path / "made", tmp_path / "bundle"

    await done("umoci", "init", "--layout", home)
    await done("umoci", "new", "--image", f"{home}:one")
    await done("umoci", "unpack", "--image", f"{home}:one", bundle)
    (bundle / "rootfs/data").mkdir()
    (bundle / "rootfs/data/file").write_bytes(b"from umoci")
    await done("umoci", "repack", "--image", f"{home}:one", bundle)
    await done("umoci", "config", "--image", f"{home}:one", "--config.env", "A=b", "--config.workingdir", "/data")
    with running_registry(tmp_path / "registry") as registry:
        target = f"docker://{registry.address}/team/made:one"
        for kind in ("oci", "v2s2"):
            await done("skopeo", "copy", "--dest-tls-verify=false", "--format", kind, f"oci:{home}:one", target)
            pulled = await pull(make(), f"{registry.address}/team/made:one")
            assert (pulled.trees[0] / "data/file").read_bytes() == b"from umoci"
            assert (pulled.config.env.get("A"), pulled.config.workdir) == ("b", "/data")
    for kind in ("oci-archive", "docker-archive"):
        file = tmp_path / f"{kind}.tar"
        await done("skopeo", "copy", f"oci:{home}:one", f"{kind}:{file}:x:one")
        assert (await pull(make(), f"{kind}:{file}:one")).layers == pulled.layers
