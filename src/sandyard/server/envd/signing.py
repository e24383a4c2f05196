"""Signed URLs for `/files`: the right to read or write one path, without the token itself."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Literal

from sandyard.server.web import decimal

Operation = Literal["read", "write"]


class BadSignature(Exception):
    """Says why, in the words E2B uses."""


def sign(path: str, operation: Operation, user: str, token: str, expiration: int | None = None) -> str:
    """`v1_` + unpadded base64 of sha256 over path, operation, user, token and expiration (E2B's scheme)."""
    plain = f"{path}:{operation}:{user}:{token}" + (f":{expiration}" if expiration is not None else "")
    return "v1_" + base64.b64encode(hashlib.sha256(plain.encode()).digest()).decode().rstrip("=")


def verify(query: Mapping[str, str], operation: Operation, token: str) -> None:
    """Raises `BadSignature` unless the query's signature fits its path, user and expiration."""
    signature = query.get("signature")
    if not signature:
        raise BadSignature("missing signature query parameter")
    expiration = query.get("signature_expiration")
    until = decimal(expiration.encode()) if expiration is not None else None
    if expiration is not None and until is None:
        raise BadSignature("invalid signature")
    right = sign(query.get("path", ""), operation, query.get("username", ""), token, until)
    if not hmac.compare_digest(right.encode(), signature.encode()):
        raise BadSignature("invalid signature")
    if until is not None and until < time.time():
        raise BadSignature("signature is already expired")
