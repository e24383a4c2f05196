"""Names read from what clients really send, whole, in pieces, and broken."""

from __future__ import annotations

import ssl
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandyard.network.hello import Incomplete, requested_host


def client_hello(name: str | None, *, protocols: int = 0) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols([f"protocol-{at:03}" * 10 for at in range(protocols)])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def in_records(hello: bytes, size: int) -> bytes:
    """The same message in records of `size` bytes."""
    message = hello[5:]
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(hello[:3] + len(part).to_bytes(2) + part for part in parts)


def of_extensions(extensions: bytes) -> bytes:
    """A hello of TLS 1.2 with these extensions only, in one record."""
    body = b"\3\3" + bytes(32 + 1 + 2 + 1) + len(extensions).to_bytes(2) + extensions
    message = b"\1" + len(body).to_bytes(3) + body
    return b"\x16\3\1" + len(message).to_bytes(2) + message


HELLO = client_hello("example.com")


def test_sni() -> None:
    assert requested_host(client_hello("Example.COM")) == "example.com"
    assert requested_host(client_hello(None)) is None
    assert requested_host(client_hello("example.com", protocols=100)) == "example.com"


def test_what_follows_the_hello_does_not_matter() -> None:
    assert requested_host(client_hello("example.com") + b"\x17\x03\x03") == "example.com"


@pytest.mark.parametrize("size", [60, 100, 16384])
def test_a_hello_over_many_records(size: int) -> None:
    assert requested_host(in_records(client_hello("example.com", protocols=20), size)) == "example.com"


@given(st.data())
@settings(deadline=None)
def test_less_than_all_is_incomplete(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from([HELLO, b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"]))
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(Incomplete):
        requested_host(part)


@pytest.mark.parametrize(
    ("head", "host"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"),
        (b"GET / HTTP/1.1\r\nhOsT:EXAMPLE.com:8080\r\nA: b\r\n\r\nbody", "example.com"),
        (b"POST / HTTP/1.1\r\nHost: example.com.\r\n\r\n", "example.com"),
        (b"GET / HTTP/1.0\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost: a.test\r\n b.test\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost : a.test\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost: a.test/b\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost: a.test\nHost: b.test\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost: \t a.test \t\r\nA:\r\n\r\n", "a.test"),
        (b"GET / HTTP/1.1\r\nno colon\r\nHost: a.test\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n", None),
        (b"SSH-2.0-client\r\n", None),
        (b"\x00\x01binary", None),
    ],
)
def test_host_header(head: bytes, host: str | None) -> None:
    assert requested_host(head) == host


def test_a_hello_in_too_many_records_or_with_empty_ones_names_nothing() -> None:
    assert requested_host(in_records(HELLO, 1)) is None
    assert requested_host(b"\x16\x03\x01\x00\x00" + HELLO) is None
    assert requested_host(HELLO[:3] + b"\0\1" + HELLO[5:6] + b"\x17\x03\x03\0\1x") is None


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\x00" * 13_000,
        b"\x16\x03\x01\x00\x01\x01" * 10_000,
        b"GET / HTTP/1.1\r\nA:" + b" " * 60_000 + b"\n\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 16_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: " + b"\xff." * 30_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + b"a" * 60_000 + b":1\r\n\r\n",
        of_extensions(b"\0\1\0\0" * 15_000),
    ],
    ids=["empty records", "tiny records", "blanks", "headers", "not ascii", "long", "extensions"],
)
def test_no_hello_takes_long(data: bytes) -> None:
    """All sandboxes share the loop that reads them, and each part that comes is read with all before it."""
    took = []
    for _ in range(3):
        began = time.process_time()
        with suppress(Incomplete):
            assert requested_host(data) is None
        took.append(time.process_time() - began)
    assert min(took) < 0.005


@given(st.binary(min_size=1, max_size=300))
@settings(deadline=None)
def test_nothing_breaks_it(data: bytes) -> None:
    for start in (b"", b"\x16\x03\x01", b"\x16\x03\x01\x00\x40\x01\x00\x00\x3c\x03\x03", b"GET / HTTP/1.1\r\n"):
        try:
            requested_host(start + data)
        except Incomplete:
            continue
