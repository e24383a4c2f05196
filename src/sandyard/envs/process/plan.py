"""What the root of sessions holds: the interpreter, its standard library, and the packages that were asked for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sandyard.envs.process.inside.root import Plan
from sandyard.errors import ConfigError, HostError

PACKAGES = "/opt/packages"  # where the packages of the allow-list lie in the root
_OPTIONAL = ("/usr/share/zoneinfo", "/etc/ld.so.cache")
_PROBE = """
import importlib, json, os, sys, sysconfig
for name in ("ctypes", "ssl", "sqlite3", "lzma", "bz2", "zlib", "decimal", "readline", "uuid", "dbm"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if " /" in line}
print(json.dumps({
    "stdlib": sysconfig.get_path("stdlib"), "platstdlib": sysconfig.get_path("platstdlib"),
    "path": [entry for entry in sys.path if entry], "ctypes": "ctypes" in sys.modules,
    "maps": sorted(path for path in maps if os.path.isfile(path)),
}))
"""
_FILES = {
    "/etc/passwd": "root:x:0:0:root:/:/bin/false\nuser:x:1000:1000:user:/tmp:/bin/false\n",
    "/etc/group": "root:x:0:\nuser:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost session\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A CPython of this machine: its program, directories of modules, and shared libraries it has loaded."""

    program: str
    stdlib: str
    path: tuple[str, ...]
    libraries: tuple[str, ...]


@cache
def find_interpreter() -> Interpreter:
    """The interpreter below this one's virtual environment. Blocking. Raises `HostError`."""
    program = os.path.realpath(sys.executable)
    try:
        answer = subprocess.run([program, "-I", "-S", "-c", _PROBE], capture_output=True, text=True, timeout=60)
        found = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise HostError(f"back end process: {program} does not say what it is made of: {error}") from error
    if not found["ctypes"]:
        raise HostError(f"back end process: {program} has no ctypes", remedy="install libffi and build Python with it")
    stdlib = os.path.realpath(found["stdlib"])
    libraries = [path for path in found["maps"] if not path.startswith(stdlib + "/") and path != program]
    return Interpreter(program, found["stdlib"], tuple(found["path"]), tuple(libraries))


def make_plan(scratch: str, packages: Sequence[str]) -> tuple[Plan, list[str]]:
    """The root, and `sys.path` in it. Raises `ConfigError` for a package that is not installed here."""
    interpreter = find_interpreter()
    binds = {interpreter.stdlib: interpreter.stdlib, interpreter.program: interpreter.program}
    for directory in sorted({os.path.dirname(path) for path in interpreter.libraries}):
        inside = [path for path in interpreter.libraries if os.path.dirname(path) == directory]
        whole = not (interpreter.stdlib + "/").startswith(directory + "/") and _holds_libraries_only(directory)
        binds.update({path: path for path in ([directory] if whole else inside)})
    binds.update({path: path for path in _OPTIONAL if os.path.exists(path)})
    for name in packages:
        binds.update(_package(name))
    hidden = [
        path for name in ("site-packages", "dist-packages") if os.path.isdir(path := f"{interpreter.stdlib}/{name}")
    ]
    plan = Plan(
        scratch=scratch,
        binds=_outermost(binds),
        hidden=hidden,
        links=_top_links(binds.values()),
        files=_FILES,
        rootless=os.geteuid() != 0,
    )
    return plan, [*interpreter.path, *([PACKAGES] if packages else [])]


def _outermost(binds: Mapping[str, str]) -> list[tuple[str, str]]:
    """Without those that lie in another already."""
    kept: list[tuple[str, str]] = []
    for source, target in sorted(binds.items()):
        if not any(target.startswith(other + "/") for _, other in kept):
            kept.append((source, target))
    return kept


def _holds_libraries_only(directory: str) -> bool:
    """Whether it is a directory of the system's shared libraries, such as /usr/lib64 or /usr/lib/x86_64-linux-gnu."""
    return directory in ("/usr/lib64", "/lib64") or os.path.basename(directory).endswith("-linux-gnu")


def _top_links(paths: object) -> dict[str, str]:
    """/lib -> usr/lib and the like: the loader is looked for there."""
    links = {}
    for name in ("lib", "lib64"):
        if os.path.islink(f"/{name}"):
            links[f"/{name}"] = os.readlink(f"/{name}")
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    if loader.is_symlink() and os.path.islink("/lib64"):
        links[str(loader.parent.resolve() / loader.name)] = os.path.realpath(loader)
    return links


def _package(name: str) -> dict[str, str]:
    """Binds of an installed package or module, with the shared libraries that wheels keep beside it."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin in (None, "built-in", "frozen"):
        raise ConfigError(f"back end process: packages: {name!r} is no package installed here")
    assert spec.origin
    source = Path(spec.submodule_search_locations[0]) if spec.submodule_search_locations else Path(spec.origin)
    found = {str(source.resolve()): f"{PACKAGES}/{source.name}"}
    libraries = source.parent / f"{name}.libs"
    if libraries.is_dir():
        found[str(libraries.resolve())] = f"{PACKAGES}/{libraries.name}"
    return found
