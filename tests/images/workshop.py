"""A workshop over any runtime, for tests of the step engine: it counts what it opened and what it closed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sandyard.guest.base import Agent
from sandyard.images.build import Cached, Level
from sandyard.runtimes.base import Instance, Resources, Rootfs, Runtime, SandboxSpec


class Words:
    """A log: (step, level, message) in order."""

    def __init__(self) -> None:
        self.said: list[tuple[str | None, Level, str]] = []

    def __call__(self, message: str, *, level: Level = Level.INFO, step: str | None = None) -> None:
        self.said.append((step, level, message))

    def of(self, step: str) -> list[str]:
        """What people see of a step."""
        return [message for at, level, message in self.said if at == step and level is not Level.DEBUG]


class PlainCache:
    def __init__(self) -> None:
        self.entries: dict[str, Cached] = {}

    def get(self, key: str) -> Cached | None:
        return self.entries.get(key)

    def put(self, key: str, value: Cached) -> None:
        self.entries[key] = value


class Uploads:
    def __init__(self, files: Mapping[str, Path] | None = None) -> None:
        self.files = dict(files or {})

    def path(self, files_hash: str) -> Path | None:
        return self.files.get(files_hash)


class TestBench:
    __test__ = False

    def __init__(self, workshop: TestWorkshop, instance: Instance) -> None:
        self._workshop = workshop
        self.instance = instance

    @property
    def agent(self) -> Agent:
        return self.instance.agent

    async def why_dead(self) -> str | None:
        return self._workshop.death

    async def commit(self) -> tuple[Path, int]:
        self._workshop.commits += 1
        path = self._workshop.home / f"layer{self._workshop.commits}"
        return path, await self.instance.commit(path)

    async def close(self) -> None:
        self._workshop.open_ids.discard(self.instance.spec.sandbox_id)
        await self._workshop.runtime.destroy(self.instance.spec.sandbox_id)


class TestWorkshop:
    """`opened` in all; `open_ids` are those not closed yet. `death`: what a bench says it died of."""

    __test__ = False
    has_network = False

    def __init__(self, runtime: Runtime, home: Path) -> None:
        self.runtime = runtime
        self.home = home
        self.opened = 0
        self.commits = 0
        self.open_ids: set[str] = set()
        self.death: str | None = None

    async def open(self, rootfs: Rootfs) -> TestBench:
        self.opened += 1
        sandbox_id = f"b{self.opened}{os.urandom(4).hex()}"
        instance = await self.runtime.create(SandboxSpec(sandbox_id, rootfs, Resources(memory_mb=256, disk_mb=256)))
        self.open_ids.add(sandbox_id)
        return TestBench(self, instance)
