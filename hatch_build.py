"""Compiles the C programs that the package carries: the guest agent and, where it exists, the launcher.

Runs as hatchling's build hook and by itself (`python hatch_build.py`), which builds in place. A
program is only compiled again when its sources, its flags or this file changed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    BuildHookInterface = object
else:
    try:
        from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    except ImportError:  # run directly, where hatchling need not be
        BuildHookInterface = object

FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-static", "-s", "-Wall", "-Wextra")
COMPILERS = ("cc", "gcc", "clang", "musl-gcc")
OUTPUT = Path("src/sandyard/guest/bin")


class Program(NamedTuple):  # not a dataclass: hatchling does not register this module, which those need
    name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]

    def digest(self) -> str:
        state = hashlib.sha256(repr((FLAGS, os.environ.get("CC"), platform.machine())).encode())
        for path in (*self.sources, *self.headers, Path(__file__)):
            state.update(path.name.encode() + b"\0" + path.read_bytes())
        return state.hexdigest()


def programs(root: Path) -> list[Program]:
    """What there is to compile below `root`."""
    found = []
    for name, folder in (("sandyard-agent", root / "guest"), ("sandyard-launch", root / "guest" / "launcher")):
        sources = tuple(sorted(folder.glob("*.c")))
        if sources:
            found.append(Program(name, sources, tuple(sorted(folder.glob("*.h")))))
    return found


def compilers() -> list[list[str]]:
    """Commands to try, best first."""
    commands = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else []
    commands += [[path] for name in COMPILERS if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        commands.append([sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-musl"])
    return commands


def compile_program(program: Program, target: Path) -> None:
    """Compile with the first compiler that manages; `SystemExit` with what each said if none does."""
    failures = []
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    environ = os.environ | {"ZIG_GLOBAL_CACHE_DIR": os.environ.get("ZIG_GLOBAL_CACHE_DIR", str(target.parent / ".zig"))}
    try:
        for command in compilers():
            full = [*command, *FLAGS, "-o", str(scratch), *map(str, program.sources)]
            try:
                result = subprocess.run(full, capture_output=True, text=True, env=environ, check=False)
            except OSError as error:
                failures.append(f"{shlex.join(command)}: {error}")
                continue
            if result.returncode == 0:
                scratch.replace(target)
                return
            failures.append(f"{shlex.join(command)}: {result.stderr.strip()[-2000:]}")
    finally:
        scratch.unlink(missing_ok=True)
        shutil.rmtree(target.parent / ".zig", ignore_errors=True)
    tried = "\n".join(failures) or "no compiler was found"
    raise SystemExit(f"cannot compile {program.name}; install gcc, or `pip install ziglang`, or set CC\n{tried}")


def build(root: Path) -> list[Path]:
    """Compile what is out of date below `root`; returns the programs that were compiled."""
    output = root / OUTPUT
    output.mkdir(parents=True, exist_ok=True)
    built = []
    for program in programs(root):
        target, stamp = output / program.name, output / f".{program.name}.sha256"
        digest = program.digest()
        if target.is_file() and stamp.is_file() and stamp.read_text() == digest:
            continue
        compile_program(program, target)
        target.chmod(0o755)
        stamp.write_text(digest)
        built.append(target)
    return built


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc,unused-ignore]
    """Hatchling's entry. The wheel carries machine code but nothing that depends on Python's version."""

    root: str
    target_name: str

    def dependencies(self) -> list[str]:
        return [] if compilers() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        build(Path(self.root))
        build_data["pure_python"] = False
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"


if __name__ == "__main__":
    for path in build(Path(__file__).resolve().parent):
        print(f"compiled {path}")
