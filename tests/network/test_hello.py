"""Names read from what clients really send, whole, in pieces, and broken."""

from __future__ import annotations

import ssl

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


HELLO = client_hello("example.com")


def test_sni() -> None:
    assert requested_host(client_hello("Example.COM")) == "example.com"
    assert requested_host(client_hello(None)) is None
    assert requested_host(client_hello("example.com", protocols=100)) == "example.com"


def test_what_follows_the_hello_does_not_matter() -> None:
    assert requested_host(client_hello("example.com") + b"\x17\x03\x03") == "example.com"


@pytest.mark.parametrize("size", [1, 7, 100, 16384])
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
        (b"GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n", None),
        (b"SSH-2.0-client\r\n", None),
        (b"\x00\x01binary", None),
    ],
)
def test_host_header(head: bytes, host: str | None) -> None:
    assert requested_host(head) == host


@given(st.binary(min_size=1, max_size=300))
@settings(deadline=None)
def test_nothing_breaks_it(data: bytes) -> None:
    for start in (b"", b"\x16\x03\x01", b"\x16\x03\x01\x00\x40\x01\x00\x00\x3c\x03\x03", b"GET / HTTP/1.1\r\n"):
        try:
            requested_host(start + data)
        except Incomplete:
            continue
