"""What clients attach to files: `X-Metadata-NAME` on upload, `metadata` of an entry."""

from __future__ import annotations

from collections.abc import Mapping

from sandyard.errors import BadRequest
from sandyard.server.web import Headers

_HEADER = b"x-metadata-"
_PREFIX_SIZE = len("user.e2b.")  # as the file system counts it
NAME_LIMIT = 255 - _PREFIX_SIZE
TOTAL_LIMIT = 4096


def metadata_of(headers: Headers) -> dict[str, str]:
    """Names are lower case, as HTTP has it; one without a name is left out. Raises `BadRequest`."""
    found = {name[len(_HEADER) :]: value for name, value in headers.items() if name.startswith(_HEADER)}
    found.pop(b"", None)
    for name, value in found.items():
        _check(name, value)
    total = sum(_PREFIX_SIZE + len(name) + len(value) for name, value in found.items())
    if total > TOTAL_LIMIT:
        raise BadRequest(f"total metadata size {total} exceeds {TOTAL_LIMIT} bytes")
    return {name.decode("ascii"): value.decode("ascii") for name, value in found.items()}


def showable(metadata: Mapping[str, str]) -> dict[str, str]:
    """Without what is no text: a program inside may have attached any bytes."""
    return {name: value for name, value in metadata.items() if _is_text(name) and _is_text(value)}


def _check(name: bytes, value: bytes) -> None:
    shown = name.decode("latin-1")
    if len(name) > NAME_LIMIT:
        raise BadRequest(f"metadata key '{shown[:40]}...' exceeds {NAME_LIMIT} bytes")
    for what, text in ((f"key '{shown}'", name), (f"value for key '{shown}'", value)):
        if any(not 0x20 <= byte <= 0x7E for byte in text):
            raise BadRequest(f"metadata {what} has bytes that are not printable ASCII")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair stands for a byte that is no UTF-8
        return False
    return True
