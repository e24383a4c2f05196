"""The pages of the env layer: examples do what they say, and every trap names tests that are there."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.connection import Connection
from sandyard.images.base import build_base
from sandyard.server.embedded import EmbeddedServer

ROOT = Path(__file__).parents[2]
_EXAMPLE = re.compile(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
PAGE = (ROOT / "docs/envs.md").read_text("utf-8")
EXAMPLES = {title: (code, said) for title, code, said in _EXAMPLE.findall(PAGE)}
_IN_A_SANDBOX = ("Shell", "MCP")
_ROW = re.compile(r"^\| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`([\w/.]+)::(\w+)`")


async def _run(code: str, where: Path, **environ: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-c",
        code,
        cwd=where,
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, errors = await asyncio.wait_for(process.communicate(), 200)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return printed.decode()


@pytest.mark.parametrize("title", [title for title in EXAMPLES if title not in _IN_A_SANDBOX])
async def test_an_example_prints_what_the_page_says(title: str, tmp_path: Path) -> None:
    code, said = EXAMPLES[title]
    assert await _run(code, tmp_path) == said


@pytest.mark.root
@pytest.mark.timeout(240)
@pytest.mark.parametrize("title", _IN_A_SANDBOX)
async def test_an_example_in_a_sandbox_prints_what_the_page_says(
    title: str, node: EmbeddedServer, tmp_path: Path
) -> None:
    await build_base(Settings())
    code, said = EXAMPLES[title]
    connection = Connection.to(node)
    environ = {"E2B_API_URL": connection.api_url, "E2B_API_KEY": connection.api_key or ""}
    assert await _run(code, tmp_path, **environ) == said


def test_the_page_is_short_and_no_example_is_left_out() -> None:
    assert len(PAGE.splitlines()) <= 260
    assert PAGE.count("```python") == len(EXAMPLES) == 6


def test_every_trap_has_a_test_that_is_there() -> None:
    rows = [row for row in _ROW.findall((ROOT / "docs/traps.md").read_text("utf-8")) if row[0] not in ("trap", "---")]
    assert len(rows) > 50
    for trap, answer, tests in rows:
        named = _TEST.findall(tests)
        assert named, trap
        assert answer.strip(), trap
        for path, name in named:
            source = (ROOT / "tests" / path).read_text("utf-8")
            assert re.search(rf"^(?:async )?def {name}\(", source, re.MULTILINE), f"{trap}: {path}::{name}"
