"""The Python SDK's own suite, with the SDK of the same tree.

A test counts as live when it fails without a server: the suite is run once in an empty network namespace
to learn which those are. What remains passes with no server and says nothing about one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.compat.outcomes import Outcomes, count, failing, of_pytest, passing
from tests.compat.report import Row
from tests.compat.servers import Target, by_host_name, by_url, of_guests
from tests.compat.ubuntu import ubuntu_registry
from tests.compat.workshop import LONE, WORKERS, Workshop

PART = "python"
LIVE = ("tests/sync", "tests/async", "tests/shared")
NEEDS_HOST_NAMES = (
    "test_host or auto_resume_wakes or test_secured or (test_network and (public_traffic or mask_request_host))"
)
NEEDS_INTERNET = (
    "internet_access_ or firewall_transform or (test_network and "
    "(specific_ip or deny_all or takes_precedence or update_network))"
)
OF_SANDBOXES = ("tests/sync/api_sync", "tests/sync/sandbox_sync")
_FIRST = "from e2b import Sandbox; Sandbox.create(timeout=300, request_timeout=300).kill()"
LEFT_OUT_MOST = 374 - 321  # live tests that may be left over by URL and without a way to the internet
BY_HOST_NAME = 16
_PLUGINS = ("pytest>=9,<10", "pytest-xdist>=3.3", "pytest-dotenv", "pytest-asyncio>=1.3,<2", "pytest-timeout>=2.4,<3")


def run(shop: Workshop) -> list[Row]:
    suite = shop.copy_of_checkout() / "packages/python-sdk"
    python = shop.venv("python-suite", [str(suite), *_PLUGINS])
    offline = _offline(shop, suite, python)
    with ubuntu_registry(shop) as images, by_url(images, internet=shop.internet) as target:
        left_out = [NEEDS_HOST_NAMES] + ([] if shop.internet else [NEEDS_INTERNET])
        live = _pytest(shop, suite, python, target, "by-url", f"not ({' or '.join(left_out)})")
    with by_host_name() as target:
        named = _pytest(shop, suite, python, target, "by-host-name", NEEDS_HOST_NAMES)
    return [*_offline_rows(offline), *_live_rows(failing(offline), live, named)]


def run_over_guests(shop: Workshop) -> list[Row]:
    """What concerns a sandbox, over microVMs, one at a time: without KVM they run in software."""
    suite = shop.copy_of_checkout() / "packages/python-sdk"
    python = shop.venv("python-suite", [str(suite), *_PLUGINS])
    live = failing(_offline(shop, suite, python))
    with of_guests() as target:
        # One sandbox first: the template's guest boots once, and all others are copies of it.
        shop.run("microvm-first", [python, "-c", _FIRST], cwd=suite, env=target.env)
        left_out = f"not ({NEEDS_HOST_NAMES} or {NEEDS_INTERNET})"
        words = (*OF_SANDBOXES, "--timeout", "300")
        outcomes = _pytest(shop, suite, python, target, "over-microvm", left_out, words, workers=1)
    tried = live & set(outcomes)
    left = [f"{name}: {outcomes[name].headline}" for name in sorted(failing(outcomes))]
    return [Row("microvm", "own suite, of sandboxes", len(passing(outcomes) & live), len(tried), len(tried), left=left)]


def _offline(shop: Workshop, suite: Path, python: Path) -> Outcomes:
    report = shop.cache / f"{suite.parents[1].name}-python-offline.xml"
    if not report.is_file():
        part = shop.logs / "python-offline.xml"
        words: list[str | Path] = [*LONE, python, "-m", "pytest", "-q", "-n", "8", "tests", *_reported(part)]
        shop.suite("python-offline", words, part, cwd=suite, env={"E2B_API_KEY": "e2b_00"}).rename(report)
    return of_pytest(report)


def _pytest(
    shop: Workshop,
    suite: Path,
    python: Path,
    target: Target,
    name: str,
    chosen: str,
    tests: Sequence[str] = LIVE,
    workers: int = WORKERS,
) -> Outcomes:
    report = shop.logs / f"python-{name}.xml"
    words: list[str | Path] = [python, "-m", "pytest", "-q", "-n", str(workers), *tests, "-k", chosen]
    command = target.command([*words, *_reported(report)])
    return of_pytest(shop.suite(f"python-{name}", command, report, cwd=suite, env=target.env))


def _reported(report: Path) -> list[str]:
    return ["-p", "no:cacheprovider", f"--junitxml={report}"]


def _offline_rows(offline: Outcomes) -> list[Row]:
    note = f"{count(offline, 'skipped')} skipped by the suite; {len(failing(offline))} more need a server"
    total = len(offline) - len(failing(offline))
    return [Row(PART, "own suite, no server", count(offline, "passed"), total, note=note)]


def _live_rows(live: set[str], outcomes: Outcomes, named: Outcomes) -> list[Row]:
    here, there = passing(outcomes) & live, passing(named) & live
    registry = {name for name in failing(outcomes) & live if "registry" in outcomes[name].why}
    note = f"{len(registry)} need an image registry" if registry else ""
    # Some tests that need no server expect E2B_SANDBOX_URL to be unset: they say nothing about ours.
    left = [f"{name}: {outcomes[name].headline}" for name in sorted(failing(outcomes) & live - there)]
    left_named = [f"{name}: {named[name].headline}" for name in sorted(failing(named))]
    bar = len(live) - LEFT_OUT_MOST
    return [
        Row(PART, "own suite, by URL", len(here), len(live), bar, note, left),
        Row(PART, "own suite, by host name", len(there), len(set(named) & live), BY_HOST_NAME, left=left_named),
        Row(
            PART, "own suite, by either", len(here | there), len(live), note=_not_run(live - set(outcomes) - set(named))
        ),
    ]


def _not_run(names: set[str]) -> str:
    return f"{len(names)} reach public addresses and were not run (--internet)" if names else ""
