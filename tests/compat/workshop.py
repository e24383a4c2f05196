"""What the parts stand on: a cache, commands with a log, virtual environments, a Node, a copy of a checkout."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.compat.report import say

ROOT = Path(__file__).resolve().parents[2]
_POINTERS = ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DOMAIN", "E2B_API_KEY", "E2B_ACCESS_TOKEN", "E2B_DEBUG")
# In front of a command: it sees no network but a loopback of its own.
LONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
WORKERS = 2  # the suites' own parallelism: it wants no more cores than a small host has


class PartFailed(Exception):
    """A part could not run; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """`cache` keeps what was downloaded, `logs` what this run's commands printed."""

    cache: Path
    checkout: Path | None
    checks: Path | None
    internet: bool

    @property
    def logs(self) -> Path:
        return self.cache / "logs"

    def run(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        limit: float = 1800.0,
        may_fail: bool = False,
    ) -> int:
        """Run `command` with its output in `logs/<name>.log`; says how long it took.

        `env` is added to this process's own, of which no pointer to a server is passed on.
        Raises `PartFailed` with the last line where it fails, unless `may_fail`.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        clean = {key: value for key, value in os.environ.items() if key not in _POINTERS}
        started = time.monotonic()
        say(f"{name} … (its output: {log.relative_to(ROOT) if log.is_relative_to(ROOT) else log})")
        with log.open("wb") as out:
            try:
                code = subprocess.run(
                    [str(word) for word in command],
                    cwd=cwd,
                    env=clean | dict(env or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired as error:
                raise PartFailed(f"{name}: not done after {limit:g} s; see {log}") from error
            except FileNotFoundError as error:
                raise PartFailed(f"{name}: {command[0]} is not installed here") from error
        say(f"{name}: exit code {code} after {time.monotonic() - started:.0f} s")
        if code and not may_fail:
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise PartFailed(f"{name}: exit code {code}: {last[:200]} (all of it: {log})")
        return code

    def suite(
        self, name: str, command: Sequence[str | Path], report: Path, *, cwd: Path, env: Mapping[str, str]
    ) -> Path:
        """Run a test suite that writes `report`, whose tests may fail. Raises `PartFailed` where it writes none."""
        report.unlink(missing_ok=True)
        code = self.run(name, command, cwd=cwd, env=env, may_fail=True)
        if not report.is_file():
            raise PartFailed(f"{name}: exit code {code} and no report; see {self.logs / name}.log")
        return report

    def venv(self, name: str, requirements: Sequence[str], *, python: str = "") -> Path:
        """The interpreter of a virtual environment with `requirements`, made once."""
        folder = self.cache / name
        interpreter = folder / "bin" / "python"
        stamp = folder / ".requirements"
        want = "\n".join(requirements)
        if not stamp.is_file() or stamp.read_text() != want:
            maker = python or str(ROOT / ".venv/bin/python")
            self.run(f"venv-{name}", [maker, "-m", "venv", "--clear", folder])
            pip: list[str | Path] = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            self.run(f"pip-{name}", [*pip, *requirements])
            stamp.write_text(want)
        return interpreter

    def node(self) -> dict[str, str]:
        """The environment in which `node`, `npx` and `pnpm` are those that the suites ask for."""
        folder = self.cache / "node"
        if not (folder / "node_modules/.bin/pnpm").exists():
            folder.mkdir(parents=True, exist_ok=True)
            self.run("npm-node", ["npm", "install", "--no-audit", "--no-fund", "node@22", "pnpm@10"], cwd=folder)
        path = f"{folder / 'node_modules/.bin'}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "npm_config_manage_package_manager_versions": "false", "CI": "1"}

    def node_packages(self, name: str, packages: Sequence[str]) -> Path:
        """A folder whose `node_modules` holds `packages`, made once."""
        folder = self.cache / name
        stamp = folder / ".packages"
        want = "\n".join(packages)
        if not stamp.is_file() or stamp.read_text() != want:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
            self.run(f"npm-{name}", ["npm", "install", "--no-audit", "--no-fund", *packages], cwd=folder)
            stamp.write_text(want)
        return folder

    def copy_of_checkout(self) -> Path:
        """A clone of the checkout: the suites leave build output behind, and the user's folder stays as it is."""
        if self.checkout is None:
            raise PartFailed("name a checkout of the SDK's repository: make compat CHECKOUT=/path/to/E2B")
        if not (self.checkout / "packages/python-sdk").is_dir():
            raise PartFailed(f"{self.checkout} is no checkout of the SDK's repository: it has no packages/python-sdk")
        git = ["git", "-C", str(self.checkout), "rev-parse", "HEAD"]
        head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        if not head:
            raise PartFailed(f"{self.checkout} is not a git checkout")
        digest = hashlib.sha256(f"{self.checkout.resolve()} {head}".encode()).hexdigest()[:12]
        copy = self.cache / f"checkout-{digest}"
        if not (copy / ".git").is_dir():
            self.run("clone", ["git", "clone", "--quiet", self.checkout.resolve(), copy])
        return copy
