"""What finds a microVM again: of one that runs, and of one that is halted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandyard.errors import SandboxError
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.layout import boot_id, decode_spec, encode_spec, read_json, write_json
from sandyard.runtimes.durable import sync


@dataclass(frozen=True, slots=True)
class Running:
    spec: SandboxSpec
    pid: int


def save_running(home: Path, spec: SandboxSpec, pid: int) -> None:
    write_json(home / "state.json", {**encode_spec(spec), "pid": pid})


def load_running(home: Path) -> Running | None:
    """None where there is none, or half of one, or one of an earlier boot of the host."""
    record = read_json(home / "state.json")
    if record is None or record["boot_id"] != boot_id():
        return None
    return Running(decode_spec(record), record["pid"])


def save_below(home: Path, memory: str) -> None:
    """`memory`: which of the sandbox's images its guest is started from; empty: it boots. All or nothing: half a name
    would be that of a guest that booted. Raises `OSError`."""
    scratch = home / ".memory"
    scratch.write_text(memory)
    scratch.rename(home / "memory")


def load_below(home: Path) -> str:
    """Raises `SandboxError` where it cannot be known."""
    try:
        return (home / "memory").read_text()
    except OSError as error:
        raise SandboxError(f"it is not known what sandbox {home.name} was started from") from error


def save_region(home: Path, start: int) -> None:
    """`start`: the address that a VMM has its guest's memory at, once that was mapped over."""
    (home / "region").write_text(f"{start:x}")


def load_region(home: Path) -> int:
    """Raises `SandboxError` where it cannot be known."""
    try:
        return int((home / "region").read_text(), 16)
    except (OSError, ValueError) as error:
        raise SandboxError(f"it is not known where the VMM of {home.name} has its memory") from error


def save_halted(disk: Path, spec: SandboxSpec) -> None:
    path = _halted(disk)
    write_json(path, encode_spec(spec))
    sync(path)
    sync(path.parent)


def load_halted(disk: Path) -> SandboxSpec | None:
    record: dict[str, Any] | None = read_json(_halted(disk))
    return None if record is None else decode_spec(record)


def forget_halted(disk: Path) -> None:
    _halted(disk).unlink(missing_ok=True)


def _halted(disk: Path) -> Path:
    """Beside the disk: what lies in it, its VMM may have written."""
    return disk.with_name(f".{disk.name}.halted.json")
