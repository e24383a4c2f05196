"""Reading the suites' report files: a test counts by its worst entry."""

from __future__ import annotations

import json
from pathlib import Path

from tests.compat.outcomes import count, failing, of_pytest, of_vitest, passing
from tests.compat.report import Row

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure message="no">why</failure></testcase>
<testcase classname="tests.a" name="left"><skipped message="later"/></testcase>
<testcase classname="tests.a" name="good_but_not_at_its_end"/>
<testcase classname="tests.a" name="good_but_not_at_its_end"><error message="teardown"/></testcase>
</testsuite></testsuites>"""


def test_junit(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(JUNIT)
    outcomes = of_pytest(report)
    assert passing(outcomes) == {"tests.a::good"}
    assert failing(outcomes) == {"tests.a::bad", "tests.a::good_but_not_at_its_end"}
    assert (count(outcomes, "skipped"), outcomes["tests.a::bad"].headline) == (1, "no")


def test_vitest(tmp_path: Path) -> None:
    cases = [
        {"status": "passed", "fullName": "reads"},
        {"status": "failed", "fullName": "writes", "failureMessages": ["  at once", "no", "really"]},
        {"status": "pending", "fullName": "waits"},
    ]
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"testResults": [{"name": f"{tmp_path}/tests/a.test.ts", "assertionResults": cases}]}))
    outcomes = of_vitest(report, tmp_path)
    assert passing(outcomes) == {"tests/a.test.ts::reads"}
    assert outcomes["tests/a.test.ts::writes"].headline == "no"
    assert count(outcomes, "skipped") == 1


def test_a_bar_is_kept_or_missed() -> None:
    assert Row("a", "told", 0, 9).kept
    assert Row("a", "reached", 3, 9, bar=3).kept
    assert not Row("a", "missed", 2, 9, bar=3).kept
