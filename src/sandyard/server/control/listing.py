"""Filters and pages of the sandbox list."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, unquote_plus

from sandyard.errors import BadRequest
from sandyard.sandboxes import Sandbox

STATES = frozenset({"running", "paused"})
PAGE_LIMIT = 100


@dataclass(frozen=True, slots=True)
class ListQuery:
    metadata: Mapping[str, str]
    states: frozenset[str]
    descending: bool
    started_after: float | None
    template: str | None
    limit: int
    after: tuple[float, str] | None


def parse_metadata(value: str | None) -> dict[str, str]:
    """E2B encodes metadata twice: as a query string whose keys and values are percent-encoded once more."""
    if not value:
        return {}
    pairs = parse_qsl(value, keep_blank_values=True)
    if not pairs:
        raise BadRequest(f"metadata: '{value}' is not a query string", field="metadata")
    return {unquote_plus(key): unquote_plus(val) for key, val in pairs}


def parse_query(
    metadata: str | None,
    state: Sequence[str] | None,
    order: str | None,
    started_after: str | None,
    template: str | None,
    limit: int | None,
    next_token: str | None,
) -> ListQuery:
    """Raises `BadRequest` naming the parameter."""
    states = {name for part in state or [] for name in part.split(",") if name} or set(STATES)
    if wrong := states - STATES:
        raise BadRequest(f"state: '{sorted(wrong)[0]}' is not one of running, paused", field="state")
    if order not in (None, "asc", "desc"):
        raise BadRequest(f"order: '{order}' is not one of asc, desc", field="order")
    limit = PAGE_LIMIT if limit is None else limit
    if not 1 <= limit <= PAGE_LIMIT:
        raise BadRequest(f"limit: {limit} is not within 1..{PAGE_LIMIT}", field="limit")
    return ListQuery(
        metadata=parse_metadata(metadata),
        states=frozenset(states),
        descending=order != "asc",
        started_after=_time(started_after) if started_after else None,
        template=template or None,
        limit=limit,
        after=_token(next_token) if next_token else None,
    )


def page(sandboxes: Sequence[Sandbox], query: ListQuery) -> tuple[list[Sandbox], str | None]:
    """The wanted page and the token of the next one. Keyset on (startedAt, id): a sandbox that dies
    between two pages shifts nothing."""
    found = [s for s in sandboxes if _fits(s, query)]
    found.sort(key=_key, reverse=query.descending)
    if query.after is not None:
        mark = query.after
        found = [s for s in found if (_key(s) < mark if query.descending else _key(s) > mark)]
    if len(found) <= query.limit:
        return found, None
    kept = found[: query.limit]
    started_at, sandbox_id = _key(kept[-1])
    return kept, base64.urlsafe_b64encode(f"{started_at!r}|{sandbox_id}".encode()).decode()


def _key(sandbox: Sandbox) -> tuple[float, str]:
    return sandbox.started_at, sandbox.id


def _fits(sandbox: Sandbox, query: ListQuery) -> bool:
    if ("paused" if sandbox.is_paused else "running") not in query.states:
        return False
    # Callers saw the start in whole microseconds.
    if query.started_after is not None and round(sandbox.started_at, 6) < query.started_after:
        return False
    if query.template is not None and query.template not in (sandbox.template, sandbox.template_id):
        return False
    return query.metadata.items() <= dict(sandbox.metadata).items()


def _time(value: str) -> float:
    try:
        moment = datetime.fromisoformat(value.replace(" ", "+"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"startedAfter: '{value}' is not an ISO 8601 time", field="startedAfter") from error


def _token(value: str) -> tuple[float, str]:
    try:
        started_at, _, sandbox_id = base64.urlsafe_b64decode(value).decode().partition("|")
        return float(started_at), sandbox_id
    except (binascii.Error, ValueError) as error:
        raise BadRequest("nextToken is not one that this server gave", field="nextToken") from error
