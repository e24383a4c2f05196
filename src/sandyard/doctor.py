"""`diagnose`: what works on this host, proved by doing it, each with a one-line remedy."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import GuestError, GuestErrorCode, SandyardError
from sandyard.images.setup import install_line, needed_packages
from sandyard.images.templates import TemplateStore
from sandyard.network.slots import Slots
from sandyard.runtimes import open_runtime
from sandyard.runtimes.base import Instance, Resources, Rootfs, Runtime, SandboxSpec

_MIB = 1 << 20
_FREE_DISK_MB = 2048
_MEMORY_PER_SANDBOX_MB = {"container": 64, "microvm": 128, "memory": 64}
_ENGINE = {"container": "container engine", "microvm": "microVM"}
_TRY_SECONDS = 20.0
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` is given where `ok` is false, and where something could be better."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None


async def diagnose(settings: Settings) -> AsyncGenerator[Finding]:
    """Try out everything a server with `settings` needs, each told as it is found. Failures are findings, not
    exceptions."""
    for found in (_privileges(), _packages(settings), _disk(settings), _memory(settings), _port(settings), _watches()):
        yield found
    if settings.sandbox.runtime != "memory":
        async with aclosing(_sandbox(settings)) as findings:
            async for found in findings:
                yield found
    if settings.network.egress != "off":
        yield await _network(settings)
    yield _template(settings)


def _privileges() -> Finding:
    if os.geteuid() == 0:
        return Finding("privileges", True, "root")
    return Finding("privileges", False, f"uid {os.geteuid()}", "run as root (sudo sandyard …)")


def _packages(settings: Settings) -> Finding:
    try:
        missing = needed_packages(settings)
    except SandyardError as error:
        return Finding("packages", False, error.message, error.remedy)
    if missing:
        return Finding("packages", False, f"missing: {', '.join(missing)}", f"run: {install_line(missing)}")
    return Finding("packages", True, "all there")


def _disk(settings: Settings) -> Finding:
    where = settings.paths.state
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free >> 20
    detail = f"{free} MiB free at {where}"
    if free < _FREE_DISK_MB:
        return Finding("free disk", False, detail, f"free {_FREE_DISK_MB} MiB or set paths.state to a bigger disk")
    return Finding("free disk", True, detail)


def _memory(settings: Settings) -> Finding:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) >> 10
    each = _MEMORY_PER_SANDBOX_MB[settings.sandbox.runtime]
    detail = f"{available} MiB available, about {available // each} small sandboxes at once"
    if available < settings.sandbox.memory_mb:
        return Finding("memory", False, detail, "add memory or lower sandbox.memory_mb")
    return Finding("memory", True, detail)


def _port(settings: Settings) -> Finding:
    host, port = settings.server.host, settings.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            remedy = "stop what listens there (a server already running is fine) or set server.port"
            return Finding("port", False, f"{host}:{port}: {error.strerror}", remedy)
    return Finding("port", True, f"{host}:{port} is free")


def _watches() -> Finding:
    """File watches of all sandboxes count against the host's root user."""
    limit = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    remedy = None if limit >= 1024 else "sysctl -w fs.inotify.max_user_instances=8192 (many sandboxes that watch files)"
    return Finding("file watches", True, f"{limit} at once on this host", remedy)


def _template(settings: Settings) -> Finding:
    template = TemplateStore(settings).find("base")
    if template is None:
        setup = "sandyard setup microvm" if settings.sandbox.runtime == "microvm" else "sandyard setup"
        return Finding("template base", False, "not built", f"run: {setup}")
    return Finding("template base", True, f"{template.source}, {template.size_bytes >> 20} MiB")


async def _network(settings: Settings) -> Finding:
    slots = Slots(settings)
    try:
        return Finding("network", True, await slots.probe())
    except SandyardError as error:
        return Finding("network", False, error.message, error.remedy)
    finally:
        await slots.stop()


async def _sandbox(settings: Settings) -> AsyncGenerator[Finding]:
    """Start sandboxes and see whether each promise holds in them."""
    runtime = open_runtime(settings)
    try:
        probe = await runtime.probe()
        yield Finding(_ENGINE[runtime.name], probe.works, probe.detail, probe.remedy)
        if probe.works:
            async with aclosing(_promises(runtime, settings)) as findings:
                async for found in findings:
                    yield found
    finally:
        await runtime.close()


async def _promises(runtime: Runtime, settings: Settings) -> AsyncGenerator[Finding]:
    small = Resources(cpu=1.0, memory_mb=48, disk_mb=16, pids=24)
    empty = settings.paths.state.absolute() / "empty"
    template = TemplateStore(settings).find("base")
    empty.mkdir(parents=True, exist_ok=True)
    rootfs = template.rootfs if template else Rootfs([empty])
    spec = SandboxSpec(f"doctor{secrets.token_hex(6)}", rootfs, small)
    began = time.monotonic()
    try:
        sandbox = await runtime.create(spec)
        yield Finding("create a sandbox", True, f"{(time.monotonic() - began) * 1000:.0f} ms")
        tries: Sequence[tuple[str, Callable[[Instance], Awaitable[str]]]] = [
            ("own kernel", _own_kernel) if runtime.capabilities.own_kernel else ("user namespace", _user_namespace),
            ("disk limit", _disk_limit if runtime.capabilities.hard_disk_limit else _no_disk_limit),
            ("memory limit", _memory_limit),
        ]
        for name, body in tries:
            yield await _try(name, body, sandbox, _TRY_SECONDS * runtime.pace)
    except SandyardError as error:
        yield Finding("create a sandbox", False, error.message, error.remedy)
    finally:
        await runtime.destroy(spec.sandbox_id)


async def _try(name: str, body: Callable[[Instance], Awaitable[str]], sandbox: Instance, seconds: float) -> Finding:
    try:
        async with asyncio.timeout(seconds):
            detail = await body(sandbox)
    except (SandyardError, TimeoutError, _BrokenPromise) as error:
        return Finding(name, False, str(error) or f"no answer within {seconds:g} s", "run: sandyard conformance")
    remedy = "use a host with loop devices and ext4 (container.disk = loop)" if detail.startswith("none") else None
    return Finding(name, True, detail, remedy)


class _BrokenPromise(Exception):
    pass


async def _read(sandbox: Instance, path: str) -> str:
    return b"".join([chunk async for chunk in sandbox.agent.read_file(path)]).decode()


async def _user_namespace(sandbox: Instance) -> str:
    host = (await _read(sandbox, "/proc/self/uid_map")).split()[1]
    if host == "0":
        raise _BrokenPromise("root inside is root on the host")
    return f"root inside is uid {host} on the host"


async def _own_kernel(sandbox: Instance) -> str:
    release = (await _read(sandbox, "/proc/sys/kernel/osrelease")).strip()
    if await _read(sandbox, _BOOT_ID) == await asyncio.to_thread(Path(_BOOT_ID).read_text):
        raise _BrokenPromise("it is the host's")
    return f"Linux {release}"


async def _disk_limit(sandbox: Instance) -> str:
    try:
        await sandbox.agent.write_file("/fill", bytes(sandbox.spec.resources.disk_mb * 2 * _MIB))
    except GuestError as error:
        if error.code is GuestErrorCode.NO_SPACE:
            await sandbox.agent.remove("/fill")
            return "a full disk is ENOSPC"
        raise
    raise _BrokenPromise("twice the limit could be written")


async def _no_disk_limit(sandbox: Instance) -> str:
    return "none: sandboxes share the host's free space"


async def _memory_limit(sandbox: Instance) -> str:
    """Files of /dev/shm count as memory: more than fits must end in a refusal or a kill."""
    limit = sandbox.spec.resources.memory_mb
    try:
        await sandbox.agent.write_file("/dev/shm/fill", bytes(limit * _MIB + 8 * _MIB))
    except SandyardError:
        return f"{limit} MiB hold"
    usage = replace(await sandbox.usage())
    if usage.memory_bytes > limit * _MIB:
        raise _BrokenPromise(f"{usage.memory_bytes >> 20} MiB in use with a limit of {limit} MiB")
    return f"{limit} MiB hold ({usage.oom_kills} killed)"
