"""The kernel modules a guest needs, found in an unpacked kernel package, in an order that loads."""

from __future__ import annotations

import lzma
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sandyard.errors import HostError

WANTED = ("virtio_pci", "virtio_mmio", "virtio_blk", "virtio_console", "virtio_net", "ext4", "overlay")
USEFUL = ("virtio_balloon",)
"""A guest does without."""
_DEPENDS = re.compile(rb"(?:^|\0)depends=([^\0]*)\0")


@dataclass(slots=True)
class Modules:
    """The modules below `root`, a `lib/modules/VERSION`. What the kernel has built in is left out."""

    root: Path
    _paths: dict[str, Path] = field(default_factory=dict)
    _loaded: dict[str, bytes] = field(default_factory=dict)

    def ordered(self, wanted: tuple[str, ...] = WANTED, useful: tuple[str, ...] = USEFUL) -> list[tuple[str, bytes]]:
        """Names and contents of `wanted`, of those of `useful` that are there, and of all they depend on, each after
        its dependencies.

        Raises `HostError` naming a module that is neither there nor built in."""
        self._paths = {_name(path): path for path in self.root.rglob("*.ko*")}
        builtin = self._builtin()
        self._loaded = {}
        for name in (*wanted, *(name for name in useful if name in self._paths)):
            if name not in builtin:
                self._add(name, ())
        return list(self._loaded.items())

    def _add(self, name: str, above: tuple[str, ...]) -> None:
        if name in self._loaded:
            return
        if name not in self._paths or name in above:
            by = f", which {above[-1]} needs" if above else ""
            remedy = "set microvm.modules to the lib/modules/VERSION of microvm.kernel, or neither"
            raise HostError(f"no kernel module {name} below {self.root}{by}", remedy=remedy)
        content = _unpacked(self._paths[name])
        for needed in _dependencies(content):
            self._add(needed, (*above, name))
        self._loaded[name] = content

    def _builtin(self) -> set[str]:
        try:
            return {_name(Path(line)) for line in (self.root / "modules.builtin").read_text().split()}
        except FileNotFoundError:
            return set()


def _name(path: Path) -> str:
    return path.name.partition(".ko")[0].replace("-", "_")


def _dependencies(content: bytes) -> Iterator[str]:
    found = _DEPENDS.search(content)
    for name in (found[1] if found else b"").decode().split(","):
        if name:
            yield name.replace("-", "_")


def _unpacked(path: Path) -> bytes:
    """The module as the kernel takes it: not every kernel unpacks modules by itself."""
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix in (".zst", ".gz"):
        tool = "zstd" if path.suffix == ".zst" else "gzip"
        try:
            return subprocess.run([tool, "-dcq", str(path)], capture_output=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise HostError(f"{path} cannot be unpacked: {error}", remedy=f"install {tool}") from error
    return path.read_bytes()
