"""The name server of the host-name parts, asked through the wire format."""

from __future__ import annotations

import struct

import pytest

from tests.compat.names import answer

QUESTION = b"\x03www\x03sbx\x04test\x00"


def _query(name: bytes = QUESTION, kind: int = 1) -> bytes:
    return struct.pack(">6H", 7, 0x0100, 1, 0, 0, 0) + name + struct.pack(">2H", kind, 1)


def test_every_name_below_the_domain_is_this_host() -> None:
    reply = answer(_query(), "sbx.test")
    assert struct.unpack_from(">6H", reply) == (7, 0x8580, 1, 1, 0, 0)
    assert reply.startswith(QUESTION, 12)
    assert reply.endswith(b"\x00\x04\x7f\x00\x00\x01")


def test_it_has_no_other_kind_of_address_and_no_other_name() -> None:
    assert struct.unpack_from(">6H", answer(_query(kind=28), "sbx.test")) == (7, 0x8580, 1, 0, 0, 0)
    assert struct.unpack_from(">6H", answer(_query(), "other.test")) == (7, 0x8583, 1, 0, 0, 0)
    assert struct.unpack_from(">6H", answer(_query(), "x.test")) == (7, 0x8583, 1, 0, 0, 0)


@pytest.mark.parametrize("query", [b"", _query()[:11], _query()[:-3], struct.pack(">6H", 7, 0, 2, 0, 0, 0)])
def test_what_is_no_query_is_refused(query: bytes) -> None:
    with pytest.raises(ValueError, match=r"header|questions|cut off"):
        answer(query, "sbx.test")
