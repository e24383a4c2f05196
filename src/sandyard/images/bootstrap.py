"""A root file system from the host's own package mirror: mmdebstrap, else debootstrap."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from sandyard.errors import HostError
from sandyard.images.progress import Progress, run_watched

# What mmdebstrap says on its way, and how far it is then.
_MILESTONES = {
    "running apt-get update": 0.05,
    "downloading packages": 0.15,
    "extracting archives": 0.35,
    "installing essential": 0.45,
    "installing remaining": 0.55,
    "cleaning package lists": 0.9,
}
_EXCESS = ["usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian"]
_LEAN = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
    "force-unsafe-io",
]


def host_suite() -> str:
    """The suite of the host's own distribution. Raises `HostError` where it has none."""
    for line in platform.freedesktop_os_release().items():
        if line[0] == "VERSION_CODENAME":
            return line[1]
    raise HostError("this host has no Debian suite of its own", remedy="set images.suite and images.mirror")


async def host_sources(suite: str) -> list[str]:
    """The host's apt sources of that suite (main, updates, security), as one-line entries.

    Raises `HostError` where apt knows none.
    """
    listing: list[str] = []
    pattern = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    await run_watched(["apt-get", "indextargets", "--format", pattern, "Created-By: Packages"], listing.append)
    wanted = {suite, f"{suite}-updates", f"{suite}-security"}
    found: list[str] = []
    for line in listing:
        words = line.split()
        if len(words) == 3 and words[1] in wanted and words[2] == "main":
            found.append(f"deb {words[0].rstrip('/')} {words[1]} main")
    if not any(line.split()[2] == suite for line in found):
        raise HostError(f"apt has no source for the suite {suite}", remedy="set images.mirror and images.suite")
    return list(dict.fromkeys(found))


async def bootstrap(
    target: Path, suite: str, sources: Sequence[str], packages: Sequence[str], progress: Progress, lock: int
) -> str:
    """Install `packages` of `suite` into the new directory `target`; return what did it.

    Runs in a mount namespace of its own: killed at any step, it leaves no mount. `lock` is a
    descriptor the tool inherits. Raises `HostError`.
    """
    tool = next((name for name in ("mmdebstrap", "debootstrap") if shutil.which(name)), None)
    if tool is None:
        raise HostError("neither mmdebstrap nor debootstrap is installed", remedy="apt-get install mmdebstrap")
    scratch = target.parent
    if tool == "mmdebstrap":
        command = await _mmdebstrap(scratch, target, suite, sources, packages)
    else:
        mirror = next(line.split()[-3] for line in sources if line.split()[-2] == suite)
        included = f"--include={','.join(packages)}"
        command = ["debootstrap", "--variant=minbase", included, suite, str(target), mirror]
    done = 0.02

    def on_line(line: str) -> None:
        nonlocal done
        done = next((part for words, part in _MILESTONES.items() if words in line), done)
        progress("bootstrap", done, line)

    await run_watched(["unshare", "--mount", "--propagation", "private", "--", *command], on_line, pass_fds=[lock])
    await asyncio.to_thread(_trim, target)
    return f"{tool} {suite}"


def _trim(target: Path) -> None:
    """Remove what only the build needed, and what debootstrap does not know to leave out."""
    for name in ("etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap"):
        (target / name).unlink(missing_ok=True)
    for name in ("var/cache/apt/archives", "var/lib/apt/lists", *_EXCESS):
        for entry in (target / name).glob("*"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


async def _mmdebstrap(
    scratch: Path, target: Path, suite: str, sources: Sequence[str], packages: Sequence[str]
) -> list[str]:
    options = scratch / "apt.conf"
    await asyncio.to_thread(options.write_text, 'Apt::Install-Recommends "false";\n' + await _apt_options())
    lean = [f"--dpkgopt={option}" for option in _LEAN]
    chosen = ["--mode=root", "--variant=minbase", "--format=directory", f"--include={','.join(packages)}"]
    return ["mmdebstrap", *chosen, f"--aptopt={options}", *lean, suite, str(target), *sources]


async def _apt_options() -> str:
    """How this host reaches its mirror: proxies, tolerance of old dates, retries."""
    lines: list[str] = []
    await run_watched(["apt-config", "dump", "Acquire"], lines.append, env={"LC_ALL": "C", "PATH": os.defpath})
    wanted = re.compile(r"Acquire::(https?::.*Proxy.*|Check-Valid-Until|Check-Date|Retries) ")
    return "".join(f"{line}\n" for line in lines if wanted.match(line))
