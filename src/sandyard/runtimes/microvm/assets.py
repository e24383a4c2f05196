"""What every guest boots from: a distribution kernel, unpacked, and a RAM disk with the agent as PID 1.

They lie below `<state>/microvm`, each named by its content; `manifest.json` says which are in use.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import HostError
from sandyard.guest import agent_binary
from sandyard.runtimes.microvm.cpio import Cpio
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.modules import Modules

MANIFEST = "manifest.json"
KERNEL_PACKAGE = "linux-image-cloud-amd64"
_REMEDY = "run: sandyard setup microvm"
_REFRESH = "run apt-get update and try again, or set microvm.kernel and microvm.modules"
_KEPT = 2
_MAGIC_AT = 0x202  # of the boot protocol, in a bzImage
_VERSION_AT = 0x20E


@dataclass(frozen=True, slots=True)
class Assets:
    """`digest` is of kernel and RAM disk together: what a base was booted with. Memory needs none of the files."""

    kernel: Path
    initrd: Path
    version: str  # of the kernel
    agent: str  # digest of the agent within
    digest: str


def load_assets(settings: Settings) -> Assets:
    """What `make_assets` made. Raises `HostError` where it is not there, or half."""
    layout = Layout.of(settings)
    try:
        record = json.loads((layout.assets / MANIFEST).read_text())
        found = Assets(**{**record, "kernel": Path(record["kernel"]), "initrd": Path(record["initrd"])})
    except FileNotFoundError as error:
        raise HostError("the microVM runtime is not set up", remedy=_REMEDY) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise HostError(f"{layout.assets / MANIFEST} is damaged ({error})", remedy=_REMEDY) from error
    for path in (found.kernel, found.initrd):
        if not path.is_file():
            raise HostError(f"{path} is missing", remedy=_REMEDY)
    return found


def check_assets(found: Assets) -> None:
    """Blocking, some 20 ms. Raises `HostError` where a file is not what was written."""
    for path in (found.kernel, found.initrd):
        try:
            whole = path.name.endswith(f"-{_digest(path.read_bytes())}")
        except OSError as error:
            raise HostError(f"{path}: {error.strerror}", remedy=_REMEDY) from error
        if not whole:
            raise HostError(f"{path} is not what setup wrote", remedy=_REMEDY)


async def ready_assets(settings: Settings) -> Assets:
    """`load_assets`, whole, with the RAM disk written anew where the agent has changed since. Raises `HostError`."""
    found = await asyncio.to_thread(load_assets, settings)
    if found.agent != _digest(agent_binary().read_bytes()):
        return await make_assets(settings)
    await asyncio.to_thread(check_assets, found)
    return found


async def make_assets(settings: Settings) -> Assets:
    """Get the kernel (the distribution's package, or what `microvm.kernel` and `microvm.modules` name) and
    write the RAM disk. Repairs what is half; what is there already is kept. Raises `HostError`."""
    try:
        return await asyncio.to_thread(_make, settings)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free space there, or set paths.state to a bigger disk" if full else "look at it, and try again"
        where = error.filename2 or error.filename or Layout.of(settings).assets
        raise HostError(f"{where}: {error.strerror}", remedy=remedy) from error


def _make(settings: Settings) -> Assets:
    layout = Layout.of(settings)
    layout.prepare()
    if settings.microvm.kernel is not None:
        if settings.microvm.modules is None:
            raise HostError("microvm.kernel is set without microvm.modules", remedy="set both, or neither")
        kernel, modules = settings.microvm.kernel, settings.microvm.modules
    else:
        kernel, modules = packaged_kernel(layout.assets / "kernels")
    content = _read(kernel)
    _check_modules(kernel, content, modules)
    agent = agent_binary().read_bytes()
    initrd = ram_disk(agent, modules)
    record = Assets(
        kernel=_put(layout.assets / f"kernel-{_digest(content)}", content),
        initrd=_put(layout.assets / f"initrd-{_digest(initrd)}", initrd),
        version=modules.name,
        agent=_digest(agent),
        digest=_digest(_digest(content).encode() + _digest(initrd).encode()),
    )
    manifest = {**asdict(record), "kernel": str(record.kernel), "initrd": str(record.initrd)}
    _put(layout.assets / MANIFEST, json.dumps(manifest, indent=2).encode(), again=True)
    for current in (record.kernel, record.initrd):
        _forget_old(current)
    return record


def _forget_old(current: Path) -> None:
    """Remove what came before, but for the last few: a server that runs may be of an earlier version."""
    kind = f"{current.name.partition('-')[0]}-*"
    others = [path for path in current.parent.glob(kind) if path != current]
    for old in sorted(others, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)


def ram_disk(agent: bytes, modules: Path) -> bytes:
    """The first root of a guest: the agent, and the modules it loads (those of `lib/modules/VERSION`)."""
    archive = Cpio()
    archive.directory("dev")
    archive.device("dev/console", 5, 1)
    archive.file("sandyard-agent", agent, 0o755)
    archive.directory("sandyard")
    loaded = Modules(modules).ordered()
    archive.file("sandyard/modules", "".join(f"{name}\n" for name, _ in loaded).encode())
    for name, content in loaded:
        archive.file(f"sandyard/{name}", content)
    return archive.finish()


def packaged_kernel(kernels: Path) -> tuple[Path, Path]:
    """The kernel and `lib/modules/VERSION` of the distribution's package, downloaded and unpacked below `kernels`
    at most once. Blocking. Raises `HostError`."""
    found = sorted(kernels.glob("*/boot/vmlinuz-*"))
    if not found:
        _download(kernels)
        found = sorted(kernels.glob("*/boot/vmlinuz-*"))
    if not found:
        raise HostError(f"no kernel in the packages below {kernels}", remedy="set microvm.kernel and microvm.modules")
    kernel = found[-1]
    version = kernel.name.removeprefix("vmlinuz-")
    for prefix in ("lib", "usr/lib"):
        modules = kernel.parent.parent / prefix / "modules" / version
        if modules.is_dir():
            return kernel, modules
    raise HostError(f"no modules for {kernel}", remedy=f"remove {kernels} and run: sandyard setup microvm")


def _download(kernels: Path) -> None:
    package = _real_package()
    kernels.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=kernels) as scratch:
        os.chmod(scratch, 0o755)
        _run(["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package], cwd=scratch)
        (archive,) = Path(scratch).glob("*.deb")
        _run(["dpkg-deb", "-x", str(archive), f"{scratch}/tree"])
        os.replace(f"{scratch}/tree", kernels / package)


def _real_package() -> str:
    """The package the distribution's name of its cloud kernel stands for."""
    said = _run(["apt-cache", "depends", "--important", KERNEL_PACKAGE])
    for line in said.splitlines():
        name = line.partition("Depends:")[2].strip()
        if name.startswith("linux-image-"):
            return name
    raise HostError(
        f"apt knows no {KERNEL_PACKAGE}", remedy="run apt-get update, or set microvm.kernel and microvm.modules"
    )


def _run(command: list[str], cwd: str | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise HostError(f"no {command[0]} on this host", remedy="set microvm.kernel and microvm.modules")
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        last = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
        raise HostError(f"{' '.join(command[:2])}: {''.join(last)}", remedy=_REFRESH)
    return ended.stdout


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HostError(f"microvm.kernel {path}: {error.strerror}", remedy="set it to a bzImage") from error
    if content[_MAGIC_AT : _MAGIC_AT + 4] != b"HdrS":
        raise HostError(f"microvm.kernel {path} is not a bzImage", remedy="set it to the vmlinuz of a distribution")
    return content


def _check_modules(kernel: Path, content: bytes, modules: Path) -> None:
    """Raises `HostError` where there are none, or those of another kernel."""
    remedy = "set it to the lib/modules/VERSION of microvm.kernel, or neither of both"
    if not modules.is_dir():
        raise HostError(f"microvm.modules {modules} is not a directory", remedy=remedy)
    at = int.from_bytes(content[_VERSION_AT : _VERSION_AT + 2], "little") + 0x200
    version = content[at : at + 128].partition(b"\0")[0].partition(b" ")[0].decode(errors="replace")
    if at > 0x200 and modules.name[:1].isdigit() and version != modules.name:
        raise HostError(f"microvm.modules {modules} is not of {kernel}, which is Linux {version}", remedy=remedy)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _put(path: Path, content: bytes, *, again: bool = False) -> Path:
    """Write a file whole; one named by its content is not written twice, if it is as it was written."""
    if again or not path.is_file() or path.read_bytes() != content:
        scratch = path.with_name(f".{path.name}-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            scratch.write_bytes(content)
            scratch.chmod(0o444)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    return path
