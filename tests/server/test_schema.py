"""The served OpenAPI against the server: whatever fits it or does not, no answer is a 500, and each is as described."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from sandyard.server.app import control_plane
from sandyard.server.control.context import Context
from tests.server.conftest import LiveServer, memory_settings, running

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
QUICK = settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
LONG = settings(QUICK, max_examples=150, derandomize=False)

Case = schemathesis.Case[Any]
DESCRIPTION = control_plane(cast(Context, None)).openapi()
schema = schemathesis.openapi.from_dict(DESCRIPTION)


class Target:
    """One server for every case; its sandbox is made anew when a case ended it."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.http = server.client()
        self._sandbox = ""

    def sandbox(self) -> str:
        if not self._sandbox or self.http.get(f"/sandboxes/{self._sandbox}").status_code != 200:
            reply = self.http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 3600})
            self._sandbox = reply.json()["sandboxID"]
        return self._sandbox


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    home: Path = tmp_path_factory.mktemp("schema")
    with running(memory_settings(home, max_count=10_000)) as server:
        made = Target(server)
        yield made
        made.http.close()


def check(case: Case, target: Target) -> None:
    names: dict[str, Callable[[], str]] = {
        "sandbox_id": target.sandbox,
        "team_id": lambda: "default",
        "template_id": lambda: "base",
    }
    for name, value in case.path_parameters.items():
        if name in names and real(value):
            case.path_parameters[name] = names[name]()
    if isinstance(case.body, dict):
        for field in ("templateID", "image"):
            if field in case.body and real(case.body[field]):
                case.body[field] = "base"
    headers = {"X-API-Key": target.server.key}
    case.call_and_validate(base_url=target.server.url, headers=headers, checks=CHECKS, timeout=20)


def real(value: object) -> bool:
    """Whether this name is to be a real one, as half of them are: else no case would get past the first look-up."""
    return crc32(repr(value).encode()) % 2 == 1


@schema.parametrize()
@QUICK
def test_every_endpoint_answers_as_it_says(case: Case, target: Target) -> None:
    check(case, target)


@pytest.mark.full
@pytest.mark.timeout(1800)
@schema.parametrize()
@LONG
def test_every_endpoint_answers_as_it_says_at_length(case: Case, target: Target) -> None:
    check(case, target)
