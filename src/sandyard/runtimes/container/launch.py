"""Start one container: the launcher, which becomes the engine."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandyard.errors import CreateFailed, HostError, SandboxError
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.disk import DiskKind

START_TIMEOUT = 30.0
_LAUNCHER_FAILED = 125
_MARK = "SANDYARD_MAKING"  # in the environment of launcher and engine: the run directory of the sandbox
_STAGES = {"disk", "rootfs", "engine"}


@dataclass(frozen=True, slots=True)
class Engine:
    """An OCI engine that was found on this host."""

    name: str
    path: str
    version: str


def launcher_binary() -> Path:
    """The host-side launcher that the package build compiles. Raises `HostError`."""
    import sandyard.guest

    path = Path(sandyard.guest.__file__).parent / "bin" / "sandyard-launch"
    if not path.exists():
        raise HostError(f"{path} is missing", remedy="build it: python hatch_build.py (make setup does)")
    return path


@dataclass(frozen=True, slots=True)
class Start:
    """Everything one start needs. `mounts` has `disk` and `rootfs` below it, see `layout`."""

    engine: Engine
    engine_root: Path
    unmount: Sequence[Path]
    mounts: Path
    home: Path  # the bundle, and where log and pid go
    disk_home: Path
    disk: DiskKind
    clone: Sequence[str]  # the launcher's arguments that make the disk's image
    used: bool  # the disk is one that a sandbox has had before
    spec: SandboxSpec
    uid_base: int

    def command(self, descriptor: int) -> list[str]:
        rootfs = self.mounts / "rootfs"
        disk = self.disk_home if self.disk == "none" else self.mounts / "disk"
        steps = ["--parent", str(os.getpid())]
        for path in self.unmount:
            steps += ["--unmount", str(path)]
        steps += self.clone
        if self.disk == "loop":
            steps += ["--loop", str(self.disk_home / "disk.img"), str(disk)]
        if self.used:
            steps += ["--renew", str(disk / "work")]
        else:
            for name, text in etc_files(self.spec).items():
                steps += ["--write", str(disk / "upper" / "etc" / name), str(self.uid_base), text]
        for layer in self.spec.rootfs.layers:
            steps += ["--lower", str(layer)] if layer.is_dir() else ["--layer", str(layer), str(self.mounts / "layer")]
        steps += ["--overlay", str(disk / "upper"), str(disk / "work"), str(rootfs), "--fd", str(descriptor)]
        return [str(launcher_binary()), *steps, "--", *self._engine_command()]

    def _engine_command(self) -> list[str]:
        log = ["--log", str(self.home / "engine.log"), "--log-format", "json"]
        run = ["run", "--detach", "--preserve-fds", "1", "--pid-file", str(self.home / "pid")]
        return [
            *(self.engine.path, "--root", str(self.engine_root)),
            *(*log, *run, "--bundle", str(self.home), self.spec.sandbox_id),
        ]


def start(plan: Start, address: Path) -> None:
    """Listen at `address` and start the container that answers there. Blocking.

    Raises `CreateFailed` naming the stage: agent (the socket), disk, rootfs or engine.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(address))
            listener.listen(16)
        except OSError as error:
            raise CreateFailed("agent", f"{address}: {error}") from error
        _run(plan, plan.command(listener.fileno()), listener.fileno())


def _run(plan: Start, command: list[str], descriptor: int) -> None:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[descriptor],
        start_new_session=True,  # the terminal's Ctrl-C is for the server, which then cleans up
        cwd="/",
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", _MARK: str(plan.home)},
    )
    with process:
        if not _ended(process.pid, START_TIMEOUT):
            process.kill()
            raise CreateFailed("engine", f"{plan.engine.name} did not return in {START_TIMEOUT:.0f} s")
        errors = process.stderr.read() if process.stderr else b""
    if process.returncode == 0:
        return
    message = errors.decode(errors="replace").strip()
    if process.returncode == _LAUNCHER_FAILED and message:
        stage, _, detail = message.partition(": ")
        raise CreateFailed(stage if stage in _STAGES else "engine", detail)
    raise CreateFailed("engine", f"{plan.engine.name}: {_last_error(plan.home / 'engine.log', process.returncode)}")


def _ended(pid: int, timeout: float) -> bool:
    """Wait for a child to end. `Popen.wait` with a timeout looks only every 50 ms."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(pidfd)


def stop_making(home: Path, deadline: float) -> None:
    """Kill whoever still makes the sandbox of `home`, and wait until it is gone. Blocking.

    The launcher dies with its server, but an engine that detaches has forked by then. All of them
    carry the mark in their environment, the sandbox itself does not. Raises `SandboxError`.
    """
    quiet = 0
    while quiet < 2:  # twice: a process in the middle of exec shows no environment
        pids = _making(home)
        quiet = 0 if pids else quiet + 1
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise SandboxError(f"processes {pids} that make sandbox {home.name} do not die")
        time.sleep(0.003)


def _making(home: Path) -> list[int]:
    mark = f"{_MARK}={home}".encode()
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as environ:
                if mark in environ.read().split(b"\0"):
                    found.append(int(name))
    return found


def _last_error(log: Path, code: int) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except FileNotFoundError:
        lines = []
    if not lines:
        return f"ended with {code} and said nothing"
    try:
        return str(json.loads(lines[-1])["msg"]).strip()
    except (ValueError, KeyError, TypeError):
        return lines[-1].strip()


def etc_files(spec: SandboxSpec) -> dict[str, str]:
    """Files every sandbox needs for itself: sudo asks hosts, resolvers stop at once without a server."""
    hosts = f"127.0.0.1\tlocalhost {spec.hostname}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    resolver = spec.network.with_name("resolv.conf").read_text() if spec.network else "# no network\n"
    return {"hosts": hosts, "hostname": f"{spec.hostname}\n", "resolv.conf": resolver}
