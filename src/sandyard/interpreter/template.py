"""The template `code-interpreter-v1`: `base`, Python's usual libraries, kernels, and the server for them.

A sandbox has no network, so the wheels are fetched on the host; they are seen inside through a layer that
the template does not keep. What the sandbox then changed is the template's own layer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import HostError, NotFound
from sandyard.guest.base import Agent, ProcessSpec
from sandyard.images.owners import shift_tree
from sandyard.images.progress import Progress, silent
from sandyard.images.templates import Origin, Template, TemplateStore
from sandyard.interpreter.wheels import PROBE, Target, fetch
from sandyard.runtimes import open_runtime
from sandyard.runtimes.base import Instance, Resources, Rootfs, SandboxSpec

NAME = "code-interpreter-v1"
ALIASES = ("code-interpreter",)
MEMORY_MB = 1024
PORT = 49999
LANGUAGES = ("python", "bash", "javascript", "typescript")
# matplotlib 3.11 no longer takes arguments that much code still gives (`boxplot(labels=…)`).
PACKAGES = (
    *("pip", "ipykernel>=6.29", "jupyter_client>=8.6", "tornado>=6.4", "bash_kernel>=0.10", "deno>=2.5,<3"),
    *("numpy>=2,<3", "pandas>=2.2,<4", "matplotlib>=3.9,<3.11", "scipy>=1.14,<2", "pillow>=11", "e2b_charts>=1,<2"),
    *("requests>=2.32,<3", "beautifulsoup4>=4.12,<5", "openpyxl>=3.1,<4", "pytest>=8"),
)
HOME = "/opt/sandyard/interpreter"
START = f"{HOME}/start"
# Looks often: a sandbox should not wait for whoever asks now and then.
READY = f"until curl --silent --fail --output /dev/null http://127.0.0.1:{PORT}/health; do sleep 0.05; done"

_FORMAT = 1  # change when the making changes
_WHEELS = "/opt/sandyard/wheels"
_BUILD = Resources(cpu=4.0, memory_mb=2048, disk_mb=2048, pids=512)
_PROGRAM = Path(__file__).parent / "program"
# Kernels run as root, as those of the hosted code interpreter do; the server is started again when it ends.
_START = f"""#!/bin/sh
[ "$(id -u)" = 0 ] || exec sudo -nE HOME=/root "$0"
cd {HOME}
while :; do
  python3 -m program
  sleep 0.5
done
"""
# Debian's Python refuses to install beside its own packages; here, what is installed is the template's.
_PIP = "[global]\nbreak-system-packages = true\ndisable-pip-version-check = true\nroot-user-action = ignore\n"
_INSTALL = f"""set -eu
pip=$(echo {_WHEELS}/pip-*.whl)
python3 "$pip/pip" install --no-index --find-links {_WHEELS} --no-compile --progress-bar off "$@"
site=$(python3 -c 'import os, numpy; print(os.path.dirname(os.path.dirname(numpy.__file__)))')
for package in numpy pandas scipy matplotlib; do
  find "$site/$package" -type d -name tests -prune -exec rm -r {{}} +
done
# 35 MB for completion of names in an editor, which IPython does without where it is not there.
python3 "$pip/pip" uninstall -y jedi parso
"""


def digest(base: Template) -> str:
    """The hash of all that the template depends on."""
    state = hashlib.sha256(json.dumps([_FORMAT, PACKAGES, READY, _START, _PIP, _INSTALL, base.template_id]).encode())
    for name, content in _program().items():
        state.update(name.encode() + b"\0" + content)
    return state.hexdigest()


async def build_interpreter(settings: Settings, progress: Progress = silent, *, force: bool = False) -> Template:
    """Return the template, made first if there is none of this recipe (or `force`). `base` must be there.

    Raises `HostError` and `SandboxError` saying what failed; nothing half made is left.
    """
    store = TemplateStore(settings)
    base = store.find("base")
    if base is None:
        raise NotFound("template 'base' does not exist", remedy="run: sandyard setup")
    recipe = digest(base)
    if not force and (kept := store.find(NAME)) is not None and kept.recipe == recipe:
        progress("interpreter", 1.0, f"template {NAME} is there")
        return kept
    if os.geteuid() != 0:
        raise HostError(f"building {NAME} needs root", remedy="run as root (sudo sandyard setup code-interpreter)")
    progress("interpreter", 0.0, f"building template {NAME}")
    entered = store.building()
    scratch, _ = await asyncio.to_thread(entered.__enter__)
    try:
        if not force and (kept := store.find(NAME)) is not None and kept.recipe == recipe:
            return kept  # another process built it while we waited for the lock
        size = await _make(settings, base, scratch, progress)
        origin = _origin(base, recipe, size)
        template = await asyncio.to_thread(store.install, NAME, scratch / "rootfs", origin)
    finally:
        await asyncio.to_thread(entered.__exit__, None, None, None)
    progress("interpreter", 1.0, f"template {NAME} is ready: {size >> 20} MiB above base")
    return template


def _origin(base: Template, recipe: str, size: int) -> Origin:
    return Origin(
        source=f"base {base.template_id} and packages of PyPI",
        recipe=recipe,
        size_bytes=size + base.size_bytes,
        env=base.rootfs.env,
        workdir=base.rootfs.workdir,
        user=base.rootfs.user,
        below=base.rootfs.layers,
        aliases=ALIASES,
        start_cmd=START,
        ready_cmd=READY,
        memory_mb=MEMORY_MB,
    )


async def _make(settings: Settings, base: Template, scratch: Path, progress: Progress) -> int:
    """Write the template's layer to `scratch/rootfs`; its bytes on disk."""
    extra = scratch / "extra"
    wheels = extra / _WHEELS.lstrip("/")
    await asyncio.to_thread(wheels.mkdir, parents=True)
    async with _sandbox(settings, base.rootfs) as probe:
        target = Target.parse((await _output(probe.agent, ["python3", "-c", PROBE])).strip())
    await fetch(PACKAGES, target, wheels, progress)
    await asyncio.to_thread(shift_tree, extra, settings.container.uid_base)
    rootfs = Rootfs([extra, *base.rootfs.layers], base.rootfs.env, base.rootfs.workdir, base.rootfs.user)
    async with _sandbox(settings, rootfs) as instance:
        await _install(instance.agent, progress)
        progress("commit", 0.95, "keeping what was installed")
        return await instance.commit(scratch / "rootfs")


async def _install(agent: Agent, progress: Progress) -> None:
    progress("install", 0.45, "installing packages")
    await agent.write_file("/etc/pip.conf", _PIP.encode())
    await _output(agent, ["sh", "-c", _INSTALL, "sh", *PACKAGES])
    progress("install", 0.8, "trying every kernel")
    for name, content in _program().items():
        await agent.write_file(f"{HOME}/program/{name}", content)
    await agent.write_file(START, _START.encode(), mode=0o755)
    await _output(agent, ["python3", "-m", "compileall", "-q", HOME])
    # Bytecode is kept of what this imports, not of everything: that would be 60 MB more.
    await _output(agent, ["python3", "-m", "program.check", "/home", *LANGUAGES], cwd=HOME)
    await agent.remove("/root/.bash_history")


def _program() -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(_PROGRAM.glob("*.py"))}


@asynccontextmanager
async def _sandbox(settings: Settings, rootfs: Rootfs) -> AsyncIterator[Instance]:
    """A sandbox on a node of its own, so that no server of this host takes it for a stray. Call with the
    store's lock held: what an earlier build left is removed."""
    paths = settings.paths.model_copy(
        update={"state": settings.paths.state.absolute() / "build", "run": settings.paths.run.absolute() / "build"}
    )
    runtime = open_runtime(settings.model_copy(update={"paths": paths}))
    sandbox_id = f"build{os.urandom(6).hex()}"
    try:
        for stray in await runtime.list():
            await runtime.destroy(stray)
        try:
            yield await runtime.create(SandboxSpec(sandbox_id, rootfs, _BUILD))
        finally:
            await asyncio.shield(runtime.destroy(sandbox_id))
    finally:
        await runtime.close()
        await asyncio.to_thread(shutil.rmtree, paths.state, True)


async def _output(agent: Agent, argv: list[str], cwd: str = "/") -> str:
    """What a command in the sandbox says, as root. Raises `HostError` with its last lines if it fails."""
    process = await agent.spawn(ProcessSpec(argv, {"HOME": "/root"}, cwd))
    said = bytearray()
    async for _, data in process.output():
        said += data
        del said[: -(1 << 16)]
    status = await process.wait()
    text = said.decode(errors="replace")
    if status.code != 0:
        last = " | ".join(text.strip().splitlines()[-6:])
        raise HostError(f"building {NAME}: {' '.join(argv)[:60]!r} failed in the sandbox: {last}")
    return text
