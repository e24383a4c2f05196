"""Which engine and which kind of disk work on this host: found out by starting a sandbox."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandyard.config import ContainerSettings
from sandyard.errors import CreateFailed, HostError
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.container.disk import DiskKind
from sandyard.runtimes.container.launch import Engine
from sandyard.runtimes.container.layout import boot_id, read_json, write_json

if TYPE_CHECKING:
    from sandyard.runtimes.container.runtime import ContainerRuntime

_SEARCH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"))
_SMALL = Resources(cpu=1.0, memory_mb=64, disk_mb=16, pids=32)


@dataclass(frozen=True, slots=True)
class Choice:
    engine: Engine
    disk: DiskKind


class Chooser:
    """Chooses for one runtime; the answer is kept until the host boots or an engine changes."""

    def __init__(self, runtime: ContainerRuntime) -> None:
        self._runtime = runtime
        self._cache = runtime.layout.state / "engine.json"

    async def choose(self, *, again: bool = False) -> Choice:
        """Return the first engine and disk with which a sandbox starts; remembered unless `again`.

        Raises `HostError` listing why each did not.
        """
        settings = self._runtime.settings.container
        key = await self._runtime.in_thread(_key, settings)
        if not again and (kept := _load(self._cache, key)) is not None:
            return kept
        failures: list[str] = []
        for engine in await self._runtime.in_thread(find_engines, settings):
            for disk in _disks(settings):
                choice = Choice(engine, disk)
                try:
                    await self.try_out(choice)
                except CreateFailed as error:
                    failures.append(f"{engine.name} with disk {disk}: {error.message}")
                    if error.stage != "disk":
                        break  # another kind of disk will not mend it
                else:
                    write_json(self._cache, {"key": key, "engine": asdict(engine), "disk": disk})
                    return choice
        if not failures:
            wanted = "crun" if settings.engine == "auto" else settings.engine
            raise HostError("no OCI engine found (looked for crun, runc)", remedy=f"apt-get install {wanted}")
        raise HostError(f"no OCI engine works: {'; '.join(failures)}", remedy="run sandyard doctor")

    async def try_out(self, choice: Choice) -> None:
        """Start a sandbox of nothing but the agent, hear from it, remove it. Raises `CreateFailed`."""
        empty = self._runtime.layout.state / "empty"
        empty.mkdir(exist_ok=True)
        sandbox_id = f"probe{secrets.token_hex(6)}"
        spec = SandboxSpec(sandbox_id, Rootfs([empty]), _SMALL)
        try:
            instance = await self._runtime.create_with(choice, spec)
            await instance.agent.hello()
        except HostError as error:
            raise CreateFailed("host", error.message, remedy=error.remedy) from error
        finally:
            await self._runtime.destroy(sandbox_id)


def find_engines(settings: ContainerSettings) -> list[Engine]:
    """The engines this host has, the preferred first. Blocking."""
    found: list[Engine] = []
    for name, path in _paths(settings).items():
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue  # present but not runnable: as good as absent
        words = done.stdout.split()
        if done.returncode == 0 and "version" in words[:-1]:
            found.append(Engine(name, path, words[words.index("version") + 1]))
    return found


def _paths(settings: ContainerSettings) -> dict[str, str]:
    names = ("crun", "runc") if settings.engine == "auto" else (settings.engine,)
    return {name: path for name in names if (path := shutil.which(name, path=_SEARCH))}


def _disks(settings: ContainerSettings) -> tuple[DiskKind, ...]:
    return ("loop", "none") if settings.disk == "auto" else (settings.disk,)


def _key(settings: ContainerSettings) -> dict[str, Any]:
    """What the answer depends on."""
    stamps = {name: [path, os.stat(path).st_mtime_ns] for name, path in _paths(settings).items()}
    mkfs = shutil.which("mkfs.ext4", path=_SEARCH)
    return {"boot_id": boot_id(), "engines": stamps, "mkfs": mkfs, **settings.model_dump()}


def _load(path: Path, key: Mapping[str, Any]) -> Choice | None:
    kept = read_json(path)
    if kept is None or kept.get("key") != key:
        return None
    return Choice(Engine(**kept["engine"]), kept["disk"])
