"""Layers of this node that are there before their bytes are (`blobs.lazy`).

Such a layer is a link to a file that a process of its own serves, until it is whole: then it is that file. A process
that is killed is started again; who had the file open through it gets I/O errors from then on, never other bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO

import structlog

from sandyard.config import Settings
from sandyard.errors import HostError
from sandyard.images.garbage.base import Checkup, Finding
from sandyard.runtimes.durable import sync
from sandyard.runtimes.finishing import ended
from sandyard.sandboxes.remote.manifest import LayerManifest
from sandyard.store.blobs.lazy.fuse import detach, mount
from sandyard.store.blobs.lazy.order import BUSY, HELD, PART, READY, Order, Word

log = structlog.get_logger("sandyard.remote")

LEAST_BYTES = 64 << 20  # smaller ones come whole sooner than a process starts
_LOOK_SECONDS = 2.0
_START_SECONDS = 30.0  # without a word
_STOP_SECONDS = 10.0
_STEP_SECONDS = 0.05


class LazyLayers:
    """Used from one event loop, between `start` and `stop`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._home = home_of(settings)
        self._mounts = settings.paths.run.absolute() / "lazy"
        self._children: list[subprocess.Popen[bytes]] = []
        self._told: dict[Path, str] = {}
        self._watching: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Have what an earlier server left served again."""
        await self._look()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """The processes end, unless sandboxes stay, which may need them: none other is there any more."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if not self._settings.server.keep_sandboxes:
            await asyncio.to_thread(self._end)

    async def can(self, digest: str, layers: Mapping[str, LayerManifest]) -> bool:
        """Whether a layer is better started from before it is here: it is large, no other is a difference to it
        (whose image would be made by reading all of it), and this host can."""
        manifest = layers[digest]
        if self._settings.blobs.lazy == "off" or manifest.kind != "file" or manifest.data_bytes < LEAST_BYTES:
            return False
        if any(digest in each.parents for each in layers.values()):
            return False
        return await asyncio.to_thread(lambda: self.works)

    @cached_property
    def works(self) -> bool:
        """Whether a file can be mounted here, by doing it. Blocking."""
        with tempfile.NamedTemporaryFile(prefix="sandyard-lazy-") as probe:
            try:
                os.close(mount(Path(probe.name)))
            except HostError as error:
                log.info("layers are fetched whole", why=str(error))
                return False
            detach(Path(probe.name))
            return True

    async def bring(self, layer: Path, manifest: LayerManifest) -> None:
        """Have a layer served that is not here. Raises `HostError`; nothing is left then."""
        blobs = self._settings.blobs.model_dump()
        order = Order(layer, self._mounts / layer.name, manifest.size, manifest.chunks, blobs)
        async with self._lock:  # nobody looks while there is no link yet
            try:
                await asyncio.to_thread(self._write, order)
                await self._serve(order)
            except BaseException:
                await ended(self._undo, order)
                raise

    async def ensure(self, layer: Path, manifest: LayerManifest) -> bool:
        """Whether a layer that is a link is the one of `manifest`; then it is served. Raises `HostError`."""
        for order in await asyncio.to_thread(lambda: list(orders(self._home))):
            if order.layer == layer and (order.size, list(order.chunks)) == (manifest.size, list(manifest.chunks)):
                async with self._lock:
                    await self._serve(order)
                return True
        return False

    async def forsaken(self, layer: Path) -> bool:
        """Whether a layer was a link to nothing, of which nobody knows what it was to be; it is none any more."""
        async with self._lock:
            return await asyncio.to_thread(self._unlinked, layer)

    def _unlinked(self, layer: Path) -> bool:
        if layer.exists() or not layer.is_symlink() or (self._home / layer.name).exists():
            return False
        log.error("a layer leads nowhere, and is fetched again", layer=layer.name)
        layer.unlink(missing_ok=True)
        layer.with_name(layer.name + PART).unlink(missing_ok=True)
        return True

    async def _serve(self, order: Order) -> None:
        """With the lock held."""
        if Word(order.mount).heard()[0] is not None:
            return
        said = await asyncio.to_thread(self._begin, order)
        if said not in (READY, HELD):
            raise HostError(f"layer {order.layer} is not served: {said}", remedy="set blobs.lazy to off")

    def _begin(self, order: Order) -> str:
        """The first word of the process, or its last."""
        self._mounts.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "sandyard.store.blobs.lazy.serving"]
        told = order.mount.with_name(f"{order.mount.name}.log")
        with open(self._home / order.layer.name, "rb") as said, open(told, "wb") as out:
            child = subprocess.Popen(
                command,
                stdin=said,  # no pipe: one that does not read it would hold whoever writes
                stdout=subprocess.PIPE,
                stderr=out,
                start_new_session=True,  # it outlives this server where sandboxes do
            )
        self._children = [each for each in self._children if each.poll() is None]
        self._children.append(child)
        assert child.stdout is not None
        with child.stdout:
            word = _first_word(child.stdout)
        if word:
            return word
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0 if word is None else _STOP_SECONDS)
        if child.poll() is None:
            self._give_up(child, order)
            return f"it said nothing for {_START_SECONDS:g} s"
        return (told.read_text(errors="replace").strip().splitlines() or ["it ended at once"])[-1][:300]

    def _give_up(self, child: subprocess.Popen[bytes], order: Order) -> None:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel has it: it ends some time
            child.wait(_STOP_SECONDS)
        detach(order.mount)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._look()
            except Exception:  # a full disk passes, and nobody else would look again
                log.exception("layers on their way could not be looked after")

    async def _look(self) -> None:
        """Start again what was killed, tell what cannot be read, forget what is whole or gone."""
        async with self._lock:
            for order in await asyncio.to_thread(lambda: list(orders(self._home))):
                if not order.linked:
                    await asyncio.to_thread(self._forget, order)
                    continue
                _, error = Word(order.mount).heard()
                if error is not None and self._told.get(order.layer) != error:
                    self._told[order.layer] = error
                    log.error("a layer cannot be read", layer=order.layer.name, error=error)
                try:
                    await self._serve(order)
                except HostError as failed:
                    log.error("a layer is not served", layer=order.layer.name, error=str(failed))

    def _write(self, order: Order) -> None:
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._home / order.layer.name
        draft = path.with_name(f"{path.name}.part")
        draft.write_text(order.text())
        sync(draft)  # a link without it leads nowhere for good
        draft.rename(path)
        sync(self._home)

    def _undo(self, order: Order) -> None:
        if order.linked:  # it was given up right then
            order.layer.unlink(missing_ok=True)
        self._forget(order)

    def _forget(self, order: Order) -> None:
        (self._home / order.layer.name).unlink(missing_ok=True)
        self._told.pop(order.layer, None)
        order.mount.with_name(f"{order.mount.name}.log").unlink(missing_ok=True)
        if not order.linked and Word(order.mount).heard()[0] is None:
            order.part.unlink(missing_ok=True)

    def _end(self) -> None:
        words = [Word(order.mount) for order in orders(self._home)]
        for word in words:
            pid, _ = word.heard()
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        for child in self._children:  # also those whose layers are whole, or removed
            with contextlib.suppress(subprocess.TimeoutExpired):
                if child.poll() is None:
                    child.terminate()
                child.wait(_STOP_SECONDS)
        deadline = time.monotonic() + _STOP_SECONDS
        while any(word.heard()[0] is not None for word in words) and time.monotonic() < deadline:
            time.sleep(_STEP_SECONDS)


def _first_word(stream: IO[bytes]) -> str | None:
    """What a process says when it is no longer busy; "" where it ends without a word, None where it keeps silent for
    too long. Blocking."""
    poller, said = select.poll(), b""
    poller.register(stream, select.POLLIN)
    while poller.poll(_START_SECONDS * 1000):
        piece = os.read(stream.fileno(), 4096)
        *words, said = (said + piece).split(b"\n")
        for word in words:
            if word.decode() != BUSY:
                return word.decode()
        if not piece:
            return ""
    return None


class LazyChecks:
    """Layers that are not whole yet: what was fetched is checked by whoever serves it; what it found is told here."""

    kind = "layers on their way"

    def __init__(self, settings: Settings) -> None:
        self._home = home_of(settings)

    def check(self, *, deep: bool) -> Checkup:
        found = Checkup(self.kind)
        for order in orders(self._home):
            if order.linked:
                found.count += 1
                found.size_bytes += order.part.stat().st_blocks * 512 if order.part.is_file() else 0
                if (error := Word(order.mount).heard()[1]) is not None:
                    found.damaged.append(Finding(order.layer.name, error))
        return found


def home_of(settings: Settings) -> Path:
    """Where the orders of a node are."""
    return orders_in(settings.paths.state.absolute())


def orders_in(state: Path) -> Path:
    """Where the orders are of a node whose state is in this directory, each under the name of its layer."""
    return state / "blobs" / "lazy"


def orders(home: Path) -> Iterator[Order]:
    """All of a node; what cannot be read is forgotten. Blocking."""
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            try:
                if path.suffix != ".part":
                    yield Order.parse(path.read_text())
            except (ValueError, KeyError, TypeError):
                path.unlink(missing_ok=True)
