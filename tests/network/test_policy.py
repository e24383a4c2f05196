"""Policies as values: what a `network` object means."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandyard.config import NetworkSettings
from sandyard.network.policy import CLOSED, NEVER, OPEN, Policy, canonical_domain, canonical_rule, never_allowed


def allows(policy: Policy, address: str) -> bool:
    return policy.allows_address(IPv4Address(address))


def test_nothing_said_is_open_and_no_access_is_closed() -> None:
    assert Policy.of({}) == OPEN
    assert Policy.of({"allowInternetAccess": True}) == OPEN
    assert Policy.of({"allowInternetAccess": False}) == CLOSED
    assert CLOSED.closed
    assert not OPEN.closed


def test_two_halves_of_everything_are_everything() -> None:
    assert Policy.of({"denyOut": ["0.0.0.0/1", "128.0.0.0/1"]}).closed


def test_allowed_goes_before_denied_whichever_is_narrower() -> None:
    policy = Policy.of({"allowOut": ["8.8.0.0/16"], "denyOut": ["8.8.8.8", "9.0.0.0/8"]})
    assert allows(policy, "8.8.8.8")
    assert not allows(policy, "9.1.1.1")
    assert allows(policy, "1.1.1.1")


def test_host_bits_and_ipv6_do_no_harm() -> None:
    policy = Policy.of({"allowOut": ["8.8.8.8/24", "2001:db8::/32"], "denyOut": ["::/0", "0.0.0.0/0"]})
    assert allows(policy, "8.8.8.1")
    assert not allows(policy, "8.8.9.1")


@pytest.mark.parametrize(
    ("rule", "name", "allowed"),
    [
        ("example.com", "example.com", True),
        ("example.com", "EXAMPLE.com.", True),
        ("example.com", "www.example.com", False),
        ("example.com", "notexample.com", False),
        ("*.example.com", "www.example.com", True),
        ("*.example.com", "a.b.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "example.com.evil.test", False),
        ("*", "anything.test", True),
        ("Bücher.example", "xn--bcher-kva.example", True),
    ],
)
def test_domain_rules(rule: str, name: str, *, allowed: bool) -> None:
    policy = Policy.of({"allowOut": [rule], "denyOut": ["0.0.0.0/0"]})
    assert policy.allows_domain(name) is allowed
    assert policy.may_resolve(name) is allowed


def test_an_open_sandbox_may_ask_for_any_name_and_needs_no_domain_rule() -> None:
    assert OPEN.may_resolve("example.com")
    assert not OPEN.allows_domain("example.com")


@pytest.mark.parametrize(
    "text", ["", ".", "-a.test", "a..b", "a b", "*.", "a.*.b", "*.*.test", "x" * 64 + ".test", "a/b"]
)
def test_what_is_no_domain_rule(text: str) -> None:
    assert canonical_rule(text) is None


@given(st.text(max_size=80))
@settings(deadline=None)
def test_a_canonical_name_is_its_own(text: str) -> None:
    name = canonical_domain(text)
    assert name is None or canonical_domain(name) == name


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.31.255.255", "192.168.1.1", "0.0.0.0", "224.0.0.1"],
)
def test_special_ranges_are_never_allowed(address: str) -> None:
    assert any(IPv4Address(address) in block for block in never_allowed(NetworkSettings()))


@given(st.ip_addresses(v=4))
@settings(deadline=None)
def test_the_operator_adds_and_spares(address: IPv4Address) -> None:
    spared, added = IPv4Network("10.1.2.0/24"), IPv4Network("11.0.0.0/8")
    blocks = never_allowed(NetworkSettings(reachable=[spared], denied=[added, IPv4Network("10.1.2.7/32")]))
    special = any(address in block for block in NEVER) and address not in spared
    expected = special or address in added or address == IPv4Address("10.1.2.7")
    assert any(address in block for block in blocks) is expected
    assert not any(a.overlaps(b) for at, a in enumerate(blocks) for b in blocks[at + 1 :])


def test_a_spared_range_may_be_wider_than_a_special_one() -> None:
    blocks = never_allowed(NetworkSettings(reachable=[IPv4Network("192.168.0.0/15")]))
    assert not any(IPv4Address("192.168.3.4") in block for block in blocks)
    assert any(IPv4Address("10.0.0.1") in block for block in blocks)


def test_settings_from_text() -> None:
    settings = NetworkSettings.model_validate({"denied": "11.0.0.0/8, 12.0.0.0/8", "resolvers": "1.1.1.1"})
    assert settings.denied == [IPv4Network("11.0.0.0/8"), IPv4Network("12.0.0.0/8")]
    assert settings.resolvers == [IPv4Address("1.1.1.1")]
