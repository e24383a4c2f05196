"""A place where Dockerfiles are built over real containers, with bases that are made here."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from sandyard.guest.base import Channel, ProcessSpec
from sandyard.images.build import Base, Built
from sandyard.images.build.base import BASE_STEP, BuildFailed
from sandyard.images.build.expand import DEFAULT_PATH
from sandyard.images.dockerfile import DockerBuild, Means, Recipe, parse
from sandyard.images.dockerfile.config import ImageSettings
from sandyard.images.dockerfile.context import ignored, pack, scan, select, sources
from sandyard.images.owners import shift_tree
from sandyard.runtimes.base import Rootfs, Runtime
from tests.images.workshop import PlainCache, TestWorkshop, Uploads, Words

LISTER = "/tmp/busybox"
BUSYBOX = Path(shutil.which("busybox") or "/dev/null").read_bytes()


class Site:
    """`bases` by name; `home` takes layers and archives."""

    def __init__(self, runtime: Runtime, home: Path, uid_base: int) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.words = Words()
        self.uploads = Uploads()
        self.cache = PlainCache()
        self.workshop = TestWorkshop(runtime, home)
        self.bases: dict[str, Base] = {}
        self._uid_base = uid_base

    def add_base(self, name: str, root: Path | None) -> None:
        """The tree is copied; None: no files at all."""
        tree = self.home / f"base-{name}"
        if root is None:
            tree.mkdir()
            tree.chmod(0o755)
        else:
            subprocess.run(["cp", "-a", str(root), str(tree)], check=True)
        shift_tree(tree, self._uid_base)
        self.bases[name] = Base(Rootfs([tree]), name, name, oci={"Env": [f"PATH={DEFAULT_PATH}"]})

    async def find(self, name: str) -> Base:
        if name not in self.bases:
            raise BuildFailed(BASE_STEP, f"image '{name}' is not known")
        return self.bases[name]

    def recipe(self, context: Path, args: Mapping[str, str] | None = None, **more: object) -> Recipe:
        """Of a directory with a Dockerfile: only what it needs is packed, as the command line does."""
        file = parse((context / "Dockerfile").read_text())
        tree = scan(context, ignored(context, context / "Dockerfile"))
        target = more.get("target")
        wanted = sources(file, args or {}, str(target) if target is not None else None)
        names = select(tree, wanted) if wanted is not None else sorted(tree.nodes)
        archive = self.home / f"context-{os.urandom(4).hex()}"
        with archive.open("wb") as out:
            digest = pack(context, tree, names, out)
        self.uploads.files[digest] = archive
        return Recipe(file, args or {}, context=digest, **more)  # type: ignore[arg-type] # names of Recipe's own fields

    def packed(self, recipe: Recipe) -> list[str]:
        assert recipe.context is not None
        with tarfile.open(self.uploads.files[recipe.context]) as tar:
            return tar.getnames()

    def builder(self) -> DockerBuild:
        return DockerBuild(Means(self.workshop, self.uploads, self.cache, self.words, 64 << 20), self.find)

    async def build(self, recipe: Recipe) -> Built:
        self.words.said.clear()
        try:
            return await self.builder().run(recipe)
        finally:
            assert not self.workshop.open_ids

    async def stage(self, recipe: Recipe) -> tuple[Rootfs, ImageSettings]:
        self.words.said.clear()
        try:
            layers, settings = await self.builder().stage(recipe)
        finally:
            assert not self.workshop.open_ids
        return Rootfs(list(layers)), settings

    async def files(self, rootfs: Rootfs) -> bytes:
        """A tar of all files, made by a BusyBox that is brought along."""
        bench = await self.workshop.open(rootfs)
        try:
            await bench.agent.write_file(LISTER, BUSYBOX, "0:0", 0o755)
            names = sorted({info.name for info in await bench.agent.list_dir("/")} - {"dev", "proc", "sys", "run"})
            process = await bench.agent.spawn(ProcessSpec([LISTER, "tar", "-c", "-f", "-", *names], cwd="/"))
            data, said = bytearray(), bytearray()
            async for channel, chunk in process.output():
                if channel is Channel.STDOUT:
                    data += chunk
                else:
                    said += chunk
            assert (await process.wait()).code == 0, said
        finally:
            await bench.close()
        return bytes(data)
