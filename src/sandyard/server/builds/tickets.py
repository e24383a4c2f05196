"""Links for uploads: signed, for one archive of one tenant, good for one upload and for an hour."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sandyard.errors import Unauthorized
from sandyard.server.tokens import SandboxTokens

LASTS = 3600.0
USED = "this upload link was used or is too old"


@dataclass(frozen=True, slots=True)
class Ticket:
    tenant: str
    files_hash: str
    expires_at: float
    nonce: str


class Tickets:
    """Used ones are remembered until they would have expired; a restart forgets that, and no more than that."""

    def __init__(self, tokens: SandboxTokens) -> None:
        self._tokens = tokens
        self._used: dict[str, float] = {}

    def issue(self, tenant: str, files_hash: str) -> str:
        fields = [tenant, files_hash, time.time() + LASTS, secrets.token_hex(8)]
        payload = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")
        return f"{payload}.{self._tokens.of(_signed(payload))}"

    def read(self, text: str) -> Ticket:
        """Raises `Unauthorized` for one that is not ours, too old, or used."""
        payload, _, signature = text.partition(".")
        if not self._tokens.fits(_signed(payload), signature.encode()):
            raise Unauthorized("this upload link is not valid")
        try:
            fields = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        except (binascii.Error, ValueError) as error:
            raise Unauthorized("this upload link is not valid") from error
        ticket = Ticket(*fields)
        if ticket.expires_at < time.time() or ticket.nonce in self._used:
            raise Unauthorized(USED, remedy="ask for another")
        return ticket

    @contextlib.contextmanager
    def used(self, ticket: Ticket) -> Iterator[None]:
        """From its first byte on the link is good for no other upload; but for another try, if this one fails.
        Raises `Unauthorized` where it is used."""
        now = time.time()
        self._used = {nonce: until for nonce, until in self._used.items() if until > now}
        if ticket.nonce in self._used:
            raise Unauthorized(USED, remedy="ask for another")
        self._used[ticket.nonce] = ticket.expires_at
        try:
            yield
        except BaseException:
            self._used.pop(ticket.nonce, None)
            raise


def _signed(payload: str) -> str:
    return f"upload:{payload}"  # no sandbox id has a colon
