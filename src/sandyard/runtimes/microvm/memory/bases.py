"""Bases: for each kind of guest one that has just booted, which every new sandbox of that kind is a copy of."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from io import FileIO
from pathlib import Path
from weakref import WeakValueDictionary

from sandyard.errors import CreateFailed, SandboxError
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm import conf
from sandyard.runtimes.microvm.bringup import BringUp
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.capture import Capture
from sandyard.runtimes.microvm.memory.fitting import block_of, fit_of
from sandyard.runtimes.microvm.memory.image import Fit, Manifest, Unfit, part
from sandyard.runtimes.microvm.memory.restore import Restorer
from sandyard.runtimes.microvm.memory.sharing import share
from sandyard.runtimes.microvm.memory.warming import warm
from sandyard.runtimes.microvm.starting import CONF

KEPT = 8
"""How many bases without a sandbox stay, those used last."""
_NAME = "base"
_POLL = 0.1


class Bases:
    """Of `host`, below `Layout.bases`: a directory each, named by all it depends on."""

    def __init__(self, host: Host, bring_up: BringUp, restorer: Restorer) -> None:
        self._host = host
        self._bring_up = bring_up
        self._restorer = restorer
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, choice: Choice, spec: SandboxSpec) -> tuple[Path, Manifest]:
        """The base for a sandbox of `spec`, made if it is not there or not whole; whoever comes meanwhile waits.

        Raises `CreateFailed`."""
        fit = await ended(lambda: fit_of(self._host, choice, spec, block_of(self._host, spec)))
        home = self._host.layout.bases / hashlib.sha256(json.dumps(asdict(fit)).encode()).hexdigest()[:24]
        async with self._locks.setdefault(home.name, asyncio.Lock()):
            found = await ended(self._look, home)
            if found is None:
                async with _alone(home):
                    found = await ended(self._look, home) or await self._make(choice, spec, fit, home)
        return home / _NAME, found

    def _look(self, home: Path) -> Manifest | None:
        name = home / _NAME
        try:
            manifest = image.load(name)
            self._restorer.check(name, manifest)
            os.utime(part(name, "memory"))  # used last
        except (Unfit, FileNotFoundError):
            return None
        return manifest

    async def _make(self, choice: Choice, spec: SandboxSpec, fit: Fit, home: Path) -> Manifest:
        sandbox_id = f"base{secrets.token_hex(8)}"
        plain = replace(spec, sandbox_id=sandbox_id, hostname="sandbox", rootfs=replace(spec.rootfs, env={}))
        scratch = home.with_name(f".{home.name}")
        try:
            await ended(_fresh, scratch)
            manifest = await self._capture(choice, replace(plain, network=None), fit, scratch / _NAME)
            await ended(_put, scratch, home)
            await ended(self._prune, home)
            return manifest
        except OSError as error:
            raise CreateFailed("base", str(error)) from error
        finally:
            await finish(self._host.remove(sandbox_id))
            await ended(remove_tree, scratch)

    async def _capture(self, choice: Choice, spec: SandboxSpec, fit: Fit, name: Path) -> Manifest:
        """Boot, stop, write down."""
        instance = await self._bring_up.start(choice, spec, used=False, tap=fit.network)
        capture = Capture(self._host, instance, name, fit)
        try:
            await instance.unless_stalled(warm(instance))
            await instance.stand_still()
            await capture.take()
            conf_bytes = conf.bytes_of(self._host.layout.kept(spec.sandbox_id) / CONF)
            manifest = await ended(lambda: capture.write(spec.hostname, conf_bytes, durable=True))
            await self._host.end(spec.sandbox_id)
            top = await ended(Disks(self._host.layout, spec).top)
            sealed = await share(self._host, spec, top, name, manifest, halted=True, durable=True)
            await ended(self._restorer.trust, name, sealed)
        except SandboxError as error:
            raise CreateFailed("base", error.message) from error
        return sealed

    def _prune(self, newest: Path) -> None:
        """Remove what no sandbox and no snapshot shares memory with, but for those used last."""
        found = []
        for home in self._host.layout.bases.glob("[!.]*"):  # what is being made has a dot before its name
            try:
                idle = part(home / _NAME, "ram").stat().st_nlink == 1
                found.append((part(home / _NAME, "memory").stat().st_mtime, home, idle))
            except (FileNotFoundError, NotADirectoryError):
                continue  # another process removes it
        for _, home, idle in sorted(found, reverse=True)[KEPT:]:
            if idle and home != newest:
                remove_tree(home)


@asynccontextmanager
async def _alone(home: Path) -> AsyncIterator[None]:
    """Of all processes of this host, for one base."""
    with FileIO(home.with_name(f".{home.name}.lock"), "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_POLL)
        yield


def _fresh(scratch: Path) -> None:
    remove_tree(scratch)  # of a process that was killed
    scratch.mkdir(mode=0o700)


def _put(scratch: Path, home: Path) -> None:
    remove_tree(home)  # one that is not whole
    scratch.rename(home)
