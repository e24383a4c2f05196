"""The OCI runtime configuration of one sandbox (`config.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from sandyard.runtimes.base import Resources, SandboxSpec
from sandyard.runtimes.container.seccomp import profile
from sandyard.runtimes.container.shared import INOTIFY_INSTANCES, INOTIFY_WATCHES

AGENT_PATH = "/dev/.sandyard-agent"  # under /dev, a tmpfs of the sandbox: no trace in its files
AGENT_FD = 3
ID_COUNT = 65536
CPU_PERIOD = 100_000  # microseconds
SHM_MB = 64
TOLD = "/run/sandyard"  # what the host tells a sandbox while it runs: no part of its files, so of no copy of them

# What OCI engines give a container by default: all of it is within the user namespace.
CAPABILITIES = [
    *("CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD"),
    *("CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID"),
    "CAP_SYS_CHROOT",
]
MASKED = [
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats"),
    *("/sys/devices/virtual/powercap", "/sys/firmware"),
]
READONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
DEFAULT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}


def configuration(
    spec: SandboxSpec,
    *,
    rootfs: Path,
    agent: Path,
    launcher: Path,
    boot_id: Path,
    cgroup: str,
    uid_base: int,
    swap_limit: bool,
) -> dict[str, Any]:
    """Build `config.json`.

    `rootfs` is where the launcher mounts the root file system, `agent` the program that becomes
    PID 1, `launcher` the host-side program that is a hook too, `boot_id` a file with what the sandbox
    sees as its boot id, `cgroup` the path below each controller's root, `swap_limit` whether the host
    can limit swap (a kernel without swap accounting refuses the file).
    """
    return {
        "ociVersion": "1.0.2",
        "hostname": spec.hostname,
        "root": {"path": str(rootfs), "readonly": False},
        "process": _process(spec.rootfs.env),
        "mounts": [
            *_mounts(spec.network),
            {
                "destination": AGENT_PATH,
                "source": str(agent),
                "type": "bind",
                "options": ["bind", "ro", "nosuid", "nodev"],
            },
        ],
        "linux": {
            "namespaces": [*_namespaces(), _network(spec.network)],
            "uidMappings": [{"containerID": 0, "hostID": uid_base, "size": ID_COUNT}],
            "gidMappings": [{"containerID": 0, "hostID": uid_base, "size": ID_COUNT}],
            "cgroupsPath": cgroup,
            "resources": limits(spec.resources, swap_limit=swap_limit),
            # A namespace that was made for it has this already, and belongs to the host.
            "sysctl": {} if spec.network else {"net.ipv4.ip_unprivileged_port_start": "0"},
            "seccomp": _profile(),
            "maskedPaths": MASKED,
            "readonlyPaths": READONLY,
        },
        "hooks": {"createRuntime": [_finish(launcher, boot_id, rootfs)]},
    }


def _finish(launcher: Path, boot_id: Path, rootfs: Path) -> dict[str, Any]:
    bounds = (str(INOTIFY_INSTANCES), str(INOTIFY_WATCHES))
    return {"path": str(launcher), "args": [launcher.name, "--finish", *bounds, str(boot_id), str(rootfs)]}


def limits(resources: Resources, *, swap_limit: bool) -> dict[str, Any]:
    """The `linux.resources` object: memory without swap, pids, CPU quota."""
    memory = {"limit": resources.memory_mb << 20}
    if swap_limit:
        memory["swap"] = memory["limit"]
    return {
        "memory": memory,
        "pids": {"limit": resources.pids},
        "cpu": {"quota": max(1000, int(resources.cpu * CPU_PERIOD)), "period": CPU_PERIOD},
    }


def _process(env: Mapping[str, str]) -> dict[str, Any]:
    return {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "args": [AGENT_PATH, "--listen-fd", str(AGENT_FD)],
        "env": [f"{name}={value}" for name, value in {**DEFAULT_ENV, **env}.items()],
        "cwd": "/",
        # Ambient and inheritable stay empty: a command of an unprivileged user gets none of these.
        "capabilities": {name: CAPABILITIES for name in ("bounding", "effective", "permitted")},
        "noNewPrivileges": False,  # sudo must work; what it can win is bounded by the user namespace
    }


@lru_cache(maxsize=1)
def _profile() -> dict[str, Any]:
    return profile()


def _namespaces() -> list[dict[str, Any]]:
    return [{"type": name} for name in ("user", "pid", "mount", "uts", "ipc", "cgroup")]


def _network(path: Path | None) -> dict[str, Any]:
    return {"type": "network"} if path is None else {"type": "network", "path": str(path)}


def _mounts(network: Path | None) -> list[dict[str, Any]]:
    quiet = ["nosuid", "noexec", "nodev"]
    return [
        _mount("/proc", "proc", *quiet),
        _mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=64k"),
        _mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
        _mount("/dev/shm", "tmpfs", *quiet, "mode=1777", f"size={SHM_MB}m", source="shm"),
        _mount("/dev/mqueue", "mqueue", *quiet),
        _mount(TOLD, "tmpfs", *quiet, "mode=755", "size=4m"),
        # Only who owns a network namespace may mount its sysfs; a joined one comes with it mounted.
        _mount("/sys", "sysfs", *quiet, "ro")
        if network is None
        else _mount("/sys", "bind", "bind", *quiet, "ro", source=str(network.with_name("sys"))),
    ]


def _mount(where: str, kind: str, *options: str, source: str | None = None) -> dict[str, Any]:
    return {"destination": where, "type": kind, "source": source or kind, "options": list(options)}
