"""What we are set against: the bare engines of this host, started with the same rootfs and command."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def bwrap(rootfs: Path) -> Callable[[], object] | None:
    """Start `true` in new namespaces over `rootfs` with bubblewrap; None where it is missing."""
    if shutil.which("bwrap") is None:
        return None
    command = ["bwrap", "--unshare-all", "--ro-bind", str(rootfs), "/", "--proc", "/proc", "--dev", "/dev", "true"]
    return lambda: subprocess.run(command, check=True, capture_output=True)


@contextmanager
def bundle(engine: str, rootfs: Path, command: list[str]) -> Iterator[Path]:
    """An OCI bundle with the engine's own default config, running `command` over `rootfs`, no terminal."""
    with tempfile.TemporaryDirectory(prefix="bench-bundle-") as name:
        folder = Path(name)
        subprocess.run([engine, "spec"], cwd=folder, check=True)
        config = json.loads((folder / "config.json").read_text())
        config["process"] |= {"terminal": False, "args": command}
        config["root"] = {"path": str(rootfs), "readonly": True}
        (folder / "config.json").write_text(json.dumps(config))
        yield folder


def engine_run(engine: str, folder: Path) -> Callable[[], object]:
    """Run the bundle to its end."""

    def run() -> object:
        command = with_clean_cgroups([engine, "run", "--bundle", str(folder), f"bench-{uuid.uuid4().hex[:12]}"])
        return subprocess.run(command, check=True, capture_output=True)

    return run


@contextmanager
def engine_container(engine: str, folder: Path) -> Iterator[str]:
    """A detached container of the bundle, deleted at the end. Yields its id."""
    container = f"bench-{uuid.uuid4().hex[:12]}"
    detached = with_clean_cgroups([engine, "run", "--detach", "--bundle", str(folder), container])
    subprocess.run(detached, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield container
    finally:
        subprocess.run(with_clean_cgroups([engine, "delete", "--force", container]), check=True, capture_output=True)


def with_clean_cgroups(command: list[str]) -> list[str]:
    """Old crun refuses an empty v2 tree beside v1 controllers: hide it in a mount namespace of its own."""
    if not (Path("/sys/fs/cgroup/unified").is_dir() and Path("/sys/fs/cgroup/memory").is_dir()):
        return command
    script = 'umount /sys/fs/cgroup/unified && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *command]


def works(run: Callable[[], object] | None) -> str | None:
    """None if the peer runs here, else why not."""
    if run is None:
        return "not installed"
    try:
        run()
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
        return f"does not run here: {said or error}"
    return None


def run_quietly(command: list[str]) -> object:
    """Run to the end; raises `CalledProcessError` with what it said."""
    return subprocess.run(command, check=True, capture_output=True)


def bwrap_write(rootfs: Path, data: bytes) -> None:
    """Pipe `data` into a file on a fresh tmpfs-free scratch folder through a bare sandbox."""
    with tempfile.TemporaryDirectory(prefix="bench-write-") as scratch:
        command = ["bwrap", "--unshare-all", "--ro-bind", str(rootfs), "/", "--bind", scratch, "/tmp"]
        subprocess.run([*command, "sh", "-c", "cat > /tmp/large.bin"], input=data, check=True)


def pss_of(pids: Iterable[int]) -> int:
    """Proportional set size, in bytes, of these processes."""
    return sum(_pss(Path("/proc") / str(pid)) for pid in pids)


def pids_in_groups(names: Iterable[str]) -> list[int]:
    """Every process in a control group of one of these names: what lives in a sandbox or container."""
    wanted = set(names)
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and wanted & set(_read(folder / "cgroup").replace("\n", "/").split("/"))
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # ended meanwhile, or a kernel thread


def _pss(folder: Path) -> int:
    lines = _read(folder / "smaps_rollup").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def pss_of_containers(engine: str, folder: Path, count: int) -> float:
    """MiB that each of `count` idle containers of `engine` keeps on the host."""
    with ExitStack() as stack:
        names = [stack.enter_context(engine_container(engine, folder)) for _ in range(count)]
        return pss_of(pids_in_groups(names)) / count / (1 << 20)
