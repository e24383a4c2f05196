"""The house has one direction: what may import what."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "sandyard"

# Each folder, and the folders of ours that it may import. Everything may import errors, config and connection.
ALLOWED = {
    "guest": set(),
    "runtimes": {"guest"},
    "images": {"runtimes", "guest"},
    "interpreter": {"images", "runtimes", "guest"},
    "store": {"runtimes"},
    "network": {"guest", "runtimes"},
    "sandboxes": {"store", "runtimes", "guest", "network", "images"},
    "server": {"sandboxes", "store", "runtimes", "guest", "network", "images"},
    "tasks": set(),
    "verify": {"tasks", "envs"},
    "envs": {"tasks"},
    "train": {"envs", "tasks", "verify"},
}
SHARED = {"errors", "config", "connection"}


def imports_of(path: Path) -> set[str]:
    """Top folders of ours that a module imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "sandyard":
                names = [f"sandyard.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("sandyard.")}
    return found


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_point_one_way(folder: str) -> None:
    modules = sorted((ROOT / folder).rglob("*.py"))
    assert modules, folder
    for module in modules:
        wrong = imports_of(module) - ALLOWED[folder] - SHARED - {folder}
        assert not wrong, f"{module.relative_to(ROOT)} imports {sorted(wrong)}"


def test_no_module_grows_past_600_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) >= 600
    }
    assert not long
