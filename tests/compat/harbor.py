"""Harbor's own `e2b` environment plays a task of ours: its oracle must get 1, its idle agent 0.

Harbor needs Python 3.12. Where the host has none, it runs in a Debian root made for it, in a mount
namespace of its own, with the host's network.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.compat.report import Row
from tests.compat.servers import by_url
from tests.compat.workshop import PartFailed, Workshop

PART = "harbor"
HARBOR = "harbor[e2b]==0.26.0"
TASK = Path(__file__).parent / "harbor_task"
SUITE = "trixie"
_PYTHONS = ("python3.14", "python3.13", "python3.12")
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_ENTER = """
root=$1; shift
mount --rbind /dev "$root/dev"; mount -t proc proc "$root/proc"; mount --rbind /tmp "$root/tmp"
for file in /etc/resolv.conf /etc/hosts CERTIFICATES; do
  [ ! -e "$file" ] || { touch "$root$file"; mount --bind "$file" "$root$file"; }
done
exec chroot "$root" "$@"
""".replace("CERTIFICATES", _CERTIFICATES)


def run(shop: Workshop) -> list[Row]:
    harbor = _harbor(shop)
    rows: list[Row] = []
    # Beside /tmp, which the Debian root shares, nothing of the host is seen there.
    with tempfile.TemporaryDirectory(prefix="sandyard-harbor-", dir="/tmp") as name, by_url() as target:
        folder = Path(name)
        shutil.copytree(TASK, folder / "task")
        env = dict(target.env) | {"HOME": name}
        for agent, wanted in (("oracle", 1.0), ("nop", 0.0)):
            words: list[str | Path] = [
                "run",
                "--path",
                folder / "task",
                "--agent",
                agent,
                "--env",
                "e2b",
                "--n-concurrent",
                "1",
            ]
            words += ["--jobs-dir", folder / "jobs", "--job-name", agent, "--quiet", "--yes"]
            shop.run(f"harbor-{agent}", [*harbor, *words], env=env, limit=900.0)
            reward = _reward(folder / "jobs" / agent)
            rows.append(Row(PART, f"{agent}: reward {reward:g}", int(reward == wanted), 1, 1, f"wanted {wanted:g}"))
    return rows


def _reward(job: Path) -> float:
    """The reward of the one trial of `job`. Raises `PartFailed` with what Harbor kept of its failure."""
    trials = [json.loads(path.read_text()) for path in job.glob("*/result.json")]
    if len(trials) != 1:
        raise PartFailed(f"{job.name}: {len(trials)} trials instead of one")
    trial = trials[0]
    verdict = trial.get("verifier_result")
    if not verdict or not verdict.get("rewards"):
        error = trial.get("exception_info") or {}
        raise PartFailed(f"{job.name}: {error.get('exception_type')}: {str(error.get('exception_message'))[:500]}")
    reward: float = verdict["rewards"]["reward"]
    return reward


def _harbor(shop: Workshop) -> list[str | Path]:
    """The words that start Harbor."""
    python = next((name for name in _PYTHONS if _works(name)), None)
    if python is not None:
        return [shop.venv("harbor", [HARBOR], python=python).parent / "harbor"]
    root = _root(shop)
    inside = Path("/opt/harbor")
    if not (root / "opt/harbor/.done").exists():
        shop.run("harbor-venv", _in_root(root, ["python3", "-m", "venv", "--clear", inside]))
        pip: list[str | Path] = [inside / "bin/pip", "install", "--quiet", "--disable-pip-version-check", HARBOR]
        shop.run("harbor-pip", _in_root(root, pip), env={"PIP_CERT": _CERTIFICATES})
        (root / "opt/harbor/.done").touch()
    return _in_root(root, [inside / "bin/harbor"])


def _works(python: str) -> bool:
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0


def _root(shop: Workshop) -> Path:
    root = shop.cache / SUITE
    if not root.is_dir():
        if shutil.which("mmdebstrap") is None:
            raise PartFailed("Harbor needs Python 3.12: install it, or mmdebstrap (apt-get install mmdebstrap)")
        part = shop.cache / f"{SUITE}.part"
        shutil.rmtree(part, ignore_errors=True)
        packages = "--include=python3,python3-venv,ca-certificates"
        shop.run("harbor-root", ["mmdebstrap", "--variant=minbase", packages, SUITE, part])
        part.rename(root)
    return root


def _in_root(root: Path, command: Sequence[str | Path]) -> list[str | Path]:
    return ["unshare", "--mount", "--propagation", "private", "sh", "-euc", _ENTER, "sh", root, *command]
