"""The JavaScript SDK's own suite: without a server, by URL, and by host name with TLS."""

from __future__ import annotations

from pathlib import Path

from tests.compat.outcomes import Outcomes, count, failing, of_vitest, passing
from tests.compat.report import Row
from tests.compat.servers import Target, by_host_name, by_url
from tests.compat.ubuntu import ubuntu_registry
from tests.compat.workshop import LONE, WORKERS, Workshop

PART = "js"
BAR = 170  # of the 202 live ones, by URL and without a way to the internet
_PROJECTS = ("unit", "template", "connectionConfig")


def run(shop: Workshop) -> list[Row]:
    checkout = shop.copy_of_checkout()
    node = shop.node()
    install = ["pnpm", "install", "--frozen-lockfile", "--filter", "e2b", "--ignore-scripts"]
    shop.run("js-install", install, cwd=checkout, env=node)
    offline = _offline(shop, checkout, node)
    with ubuntu_registry(shop) as images:
        with by_url(images, internet=shop.internet) as target:
            live = _vitest(shop, checkout, node, target, "by-url")
        with by_host_name(images) as target:
            named = _vitest(shop, checkout, node, target, "by-host-name")
    return _rows(offline, live, named)


def _words(report: Path) -> list[str]:
    projects = [word for name in _PROJECTS for word in ("--project", name)]
    reporters = ["--reporter=default", "--reporter=json", f"--outputFile.json={report}"]
    return ["npx", "vitest", "run", *projects, "--maxWorkers", str(WORKERS), *reporters]


def _offline(shop: Workshop, checkout: Path, node: dict[str, str]) -> Outcomes:
    report = shop.cache / f"{checkout.name}-js-offline.json"
    if not report.is_file():
        part = shop.logs / "js-offline.json"
        env = node | {"E2B_API_KEY": "e2b_00"}
        shop.suite("js-offline", [*LONE, *_words(part)], part, cwd=_suite(checkout), env=env).rename(report)
    return of_vitest(report, checkout)


def _vitest(shop: Workshop, checkout: Path, node: dict[str, str], target: Target, name: str) -> Outcomes:
    report = shop.logs / f"js-{name}.json"
    env = node | dict(target.env)
    shop.suite(f"js-{name}", target.command(_words(report)), report, cwd=_suite(checkout), env=env)
    return of_vitest(report, checkout)


def _suite(checkout: Path) -> Path:
    return checkout / "packages/js-sdk"


def _rows(offline: Outcomes, by_url: Outcomes, by_name: Outcomes) -> list[Row]:
    live = failing(offline)
    here, named = passing(by_url) & live, passing(by_name) & live
    skipped = f"{count(offline, 'skipped')} skipped by the suite"
    left = [f"{name}: {by_url[name].headline}" for name in sorted(live - here - named)]
    return [
        Row(PART, "own suite, no server", count(offline, "passed"), len(offline) - len(live), note=skipped),
        Row(PART, "own suite, by URL", len(here), len(live), BAR),
        Row(PART, "own suite, by host name", len(named), len(live)),
        Row(PART, "own suite, by either", len(here | named), len(live), left=left),
    ]
