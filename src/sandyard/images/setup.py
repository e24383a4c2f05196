"""`setup`: bring a host to where sandboxes run. Safe to repeat; says what it installs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from sandyard.config import Settings
from sandyard.errors import HostError
from sandyard.images.base import build_base, recipe_of
from sandyard.images.progress import Progress, run_watched, silent
from sandyard.images.templates import Template, TemplateStore
from sandyard.runtimes import open_runtime
from sandyard.runtimes.base import Probe
from sandyard.runtimes.microvm.assets import make_assets

_SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"))


@dataclass(frozen=True, slots=True)
class Ready:
    """What `setup` found or made."""

    installed: Sequence[str]
    runtime: Probe
    template: Template


def needed_packages(settings: Settings) -> list[str]:
    """The distribution packages this host still lacks for `settings`, by their Debian names."""
    if settings.sandbox.runtime == "memory":
        return []
    wanted: list[str] = []
    microvm = settings.sandbox.runtime == "microvm"
    if microvm:
        tools = ((settings.microvm.qemu, "qemu-system-x86"), ("qemu-img", "qemu-utils"))
        wanted += [package for tool, package in tools if not _has(tool)]
    else:
        engine = settings.container.engine
        engines = ("crun", "runc") if engine == "auto" else (engine,)
        if not any(_has(name) for name in engines):
            wanted.append(engines[0])
    if (microvm or settings.container.disk != "none") and not _has("mkfs.ext4"):
        wanted.append("e2fsprogs")
    if not _has("unshare"):
        wanted.append("util-linux")
    if settings.network.egress == "on":
        wanted += [package for tool, package in (("ip", "iproute2"), ("nft", "nftables")) if not _has(tool)]
    recipe = recipe_of(settings)
    kept = TemplateStore(settings).find("base")
    if kept is None or kept.recipe != recipe.digest():
        if not recipe.tarball and not (_has("mmdebstrap") or _has("debootstrap")):
            wanted.append("mmdebstrap")
        if recipe.reference:
            wanted += [name for name in ("skopeo", "umoci") if not _has(name)]
    return wanted


def install_line(packages: Sequence[str]) -> str:
    """The command a person would type."""
    return f"apt-get install -y --no-install-recommends {' '.join(packages)}"


async def setup(settings: Settings, progress: Progress = silent) -> Ready:
    """Install what is missing (where this is root and has apt), try the runtime, build `base`.

    Raises `HostError` whose remedy is the command to run.
    """
    packages = needed_packages(settings)
    if packages:
        await _install(packages, progress)
    if settings.sandbox.runtime == "microvm":
        if os.geteuid() != 0:
            raise HostError("the microVM runtime needs root", remedy="run: sudo sandyard setup microvm")
        progress("kernel", 0.0, "the kernel that guests boot")
        assets = await make_assets(settings)
        progress("kernel", 1.0, f"kernel {assets.version} and its RAM disk are in {assets.kernel.parent}")
    progress("runtime", 0.0, "starting a sandbox to see what works")
    runtime = open_runtime(settings)
    try:
        probe = await runtime.probe()
    finally:
        await runtime.close()
    if not probe.works:
        raise HostError(f"the {settings.sandbox.runtime} runtime does not work: {probe.detail}", remedy=probe.remedy)
    progress("runtime", 1.0, f"{probe.detail}; {probe.remedy}" if probe.remedy else probe.detail)
    template = await build_base(settings, progress)
    return Ready(packages, probe, template)


async def _install(packages: Sequence[str], progress: Progress) -> None:
    line = install_line(packages)
    if not _has("apt-get"):
        raise HostError(f"missing on this host: {', '.join(packages)}", remedy="install them with its package manager")
    if os.geteuid() != 0:
        raise HostError(f"missing on this host: {', '.join(packages)}", remedy=f"run: sudo {line}")
    progress("packages", 0.0, f"installing {', '.join(packages)}")

    def on_line(text: str) -> None:
        progress("packages", None, text)

    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        await run_watched(line.split(), on_line, env=quiet)
    except HostError:
        # Without package lists (a fresh image), or with old ones: fetch them, try once more.
        await run_watched(["apt-get", "update"], on_line, env=quiet)
        try:
            await run_watched(line.split(), on_line, env=quiet)
        except HostError as error:
            raise HostError(error.message, remedy=f"run: {line}") from error
    progress("packages", 1.0, f"installed {', '.join(packages)}")


def _has(command: str) -> bool:
    return shutil.which(command, path=_SYSTEM_PATH) is not None
