"""Released clients, unmodified, driven by checks of our own: each prints `ok NAME` or `FAIL NAME WHY` lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sandyard.config import load_settings
from sandyard.images.templates import TemplateStore
from tests.compat.report import Row
from tests.compat.servers import by_url
from tests.compat.workshop import ROOT, PartFailed, Workshop

PART = "clients"
HERE = Path(__file__).parent
PYTHON_SDKS = ("2.63.0", "2.45.1")
JS_SDK = "2.51.0"
PYTHON_INTERPRETER = "2.11.5"
JS_INTERPRETER = "2.8.0"
_LINE = re.compile(r"^(ok|FAIL)\s+([^:\n]+)(.*)$", re.MULTILINE)


def run(shop: Workshop) -> list[Row]:
    rows: list[Row] = []
    for version in PYTHON_SDKS:
        python = shop.venv(f"e2b-{version}", [f"e2b=={version}"])
        rows += _drive(shop, f"e2b {version} (Python)", [python, HERE / "sdk.py"])
        if shop.checks is not None:
            rows += _drive(shop, f"e2b {version} (Python), smoke", [python, shop.checks / "e2b_smoke.py"])
    return rows + _drive(shop, f"e2b {JS_SDK} (JS)", _script(shop, "sdk.mjs"), shop.node())


def run_interpreter(shop: Workshop) -> list[Row]:
    """The released clients of the code interpreter. Its template must have been built on this host."""
    if TemplateStore(load_settings()).find("code-interpreter-v1") is None:
        raise PartFailed("its template is not built; run: sandyard setup code-interpreter")
    python = shop.venv(f"interpreter-{PYTHON_INTERPRETER}", [f"e2b-code-interpreter=={PYTHON_INTERPRETER}"])
    script = HERE / "code_interpreter.py"
    rows = _drive(shop, f"e2b-code-interpreter {PYTHON_INTERPRETER} (Python)", [python, script])
    script_js = _script(shop, "code_interpreter.mjs")
    return rows + _drive(shop, f"@e2b/code-interpreter {JS_INTERPRETER} (JS)", script_js, shop.node())


def _script(shop: Workshop, name: str) -> list[str | Path]:
    """The script beside the packages: Node looks for those from where the script lies."""
    folder = shop.node_packages("e2b-js", [f"e2b@{JS_SDK}", f"@e2b/code-interpreter@{JS_INTERPRETER}"])
    copy = folder / name
    copy.write_bytes((HERE / name).read_bytes())
    return ["node", copy]


def _drive(shop: Workshop, what: str, command: Sequence[str | Path], env: dict[str, str] | None = None) -> list[Row]:
    name = re.sub(r"[^a-z0-9.]+", "-", what.lower()).strip("-")
    with by_url() as target:
        code = shop.run(name, command, env=(env or {}) | dict(target.env), limit=600.0, may_fail=True)
    text = (shop.logs / f"{name}.log").read_text(errors="replace")
    found = _LINE.findall(text)
    if not found:
        last = (text.strip().splitlines() or ["no output"])[-1]
        raise PartFailed(f"{what}: it checked nothing and ended with {code}: {last[:200]}")
    bad = [(check, why.strip()) for verdict, check, why in found if verdict == "FAIL"]
    if code and not bad:
        bad = [("exit", f"code {code}; see {(shop.logs / name).relative_to(ROOT)}.log")]
        found.append(("FAIL", *bad[0]))
    left = [f"{check}{why}" for check, why in bad]
    return [Row(PART, what, len(found) - len(bad), len(found), len(found), left=left)]
