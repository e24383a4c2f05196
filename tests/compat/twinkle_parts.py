"""twinkle's `Env`, `EnvTool`, `ToolManager` and advantages, of the released package, over our envs."""

from __future__ import annotations

from pathlib import Path

from tests.compat.outcomes import of_lines
from tests.compat.report import Row
from tests.compat.workshop import ROOT, PartFailed, Workshop

PART = "twinkle"
PACKAGE = "twinkle-kit==0.5.1"


def run(shop: Workshop) -> list[Row]:
    # Its pins are older than what our own environment holds; of ours, the modules of envs need jsonschema. The
    # torch is our own: the newest may be a build of some gigabytes.
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    python = shop.venv("twinkle", [PACKAGE, "jsonschema>=4.23", torch])
    script = Path(__file__).parent / "twinkle_env.py"
    where = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    shop.run("twinkle", [python, script], env=where, limit=300.0, may_fail=True)
    passed, failed = of_lines(shop.logs / "twinkle.log")
    if not passed and not failed:
        raise PartFailed(f"twinkle: it said nothing; see {shop.logs / 'twinkle.log'}")
    total = len(passed) + len(failed)
    return [Row(PART, f"{PACKAGE} over our envs", len(passed), total, total, left=failed)]
