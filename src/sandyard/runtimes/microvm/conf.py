"""What a guest's first process is told, as the content of a small disk (see `guest/PROTOCOL.md`)."""

from __future__ import annotations

from sandyard.runtimes.base import SandboxSpec

_MAX = (1 << 20) - 4096
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
PROBE = b"P\0\0".ljust(4096, b"\0")
"""Boot, answer, mount nothing."""


def configuration(spec: SandboxSpec, layers: int, *, used: bool) -> bytes:
    """`layers`: how many lie above the base. `used`: on the disk it had, whose files are left alone.

    Raises `ValueError` for an environment that is too big."""
    records = [f"l{layers}", f"p{spec.resources.pids}", f"m{spec.resources.memory_mb << 20}", f"h{spec.hostname}"]
    records += [f"e{name}={value}" for name, value in {**_ENV, **spec.rootfs.env}.items()]
    if not used:
        records += ["d/etc", *(part for name, text in _files(spec).items() for part in (f"f/etc/{name}", f"t{text}"))]
    content = b"".join(record.encode() + b"\0" for record in records) + b"\0"
    if len(content) > _MAX:
        raise ValueError(f"its environment takes {len(content)} bytes, where {_MAX} are the most")
    return content.ljust(-(-len(content) // 4096) * 4096, b"\0")


def _files(spec: SandboxSpec) -> dict[str, str]:
    hosts = f"127.0.0.1\tlocalhost {spec.hostname}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    return {"hosts": hosts, "hostname": f"{spec.hostname}\n", "resolv.conf": "# no network\n"}
