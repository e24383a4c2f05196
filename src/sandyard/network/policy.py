"""Where a sandbox may connect to: one immutable value, made from the `network` object of the API.

Precedence, as E2B has it: what this node never allows, then `allowOut`, then `denyOut`, then open.
`allow_internet_access: false` is `denyOut: ["0.0.0.0/0"]`. A domain in `allowOut` is matched against
the name a client asks for (TLS SNI or HTTP Host), never against an address that somebody's DNS gave.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from sandyard.config import NetworkSettings

EVERYWHERE = IPv4Network("0.0.0.0/0")

# RFC 6890's special-purpose ranges, multicast and broadcast; 169.254.169.254 is the metadata address.
NEVER = tuple(
    IPv4Network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
        *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    )
)

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


def parse_network(text: str) -> IPv4Network | ipaddress.IPv6Network | None:
    """An address or a CIDR block, host bits ignored; None for anything else."""
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        return None


def canonical_domain(text: str) -> str | None:
    """A host name in lower-case ASCII without the final dot; None where it is none. `*` and `*.` are no part of it."""
    name = text.strip().rstrip(".").lower()
    if len(name) > 1024:  # before IDNA, which takes long for long names
        return None
    try:
        name = name if name.isascii() else name.encode("idna").decode()
    except UnicodeError:
        return None
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        return None
    return name


def canonical_rule(text: str) -> str | None:
    """A domain rule: a name, `*.name` for every name below it, or `*`; None where it is none."""
    text = text.strip()
    if text in ("*", "*.*"):
        return "*"
    wild = text.startswith("*.")
    name = canonical_domain(text[2:] if wild else text)
    return name and ("*." + name if wild else name)


@dataclass(frozen=True, slots=True)
class Proxy:
    """A SOCKS5 proxy; `username` empty: no login."""

    host: str
    port: int
    username: str = ""
    password: str = ""

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Proxy:
        """From a checked `egressProxy` object."""
        host, _, port = stored["address"].rpartition(":")
        return cls(host, int(port), stored.get("username") or "", stored.get("password") or "")


@dataclass(frozen=True, slots=True)
class Policy:
    """IPv6 has no place here: sandboxes have none."""

    allowed: tuple[IPv4Network, ...] = ()
    denied: tuple[IPv4Network, ...] = ()
    domains: frozenset[str] = frozenset()  # as `canonical_rule` gives them
    resolvers: tuple[IPv4Address, ...] = ()  # (): the node's
    proxy: Proxy | None = None  # what is allowed is connected through it

    @classmethod
    def of(cls, network: Mapping[str, Any]) -> Policy:
        """From a stored, checked `network` object (see `server/control/network.py`)."""
        entries = [(text, parse_network(text)) for text in network.get("allowOut") or ()]
        denied = [parse_network(text) for text in network.get("denyOut") or ()]
        if network.get("allowInternetAccess") is False:
            denied.append(EVERYWHERE)
        proxy = network.get("egressProxy")
        rules = (canonical_rule(text) for text, block in entries if block is None)
        return cls(
            allowed=_v4(block for _, block in entries),
            denied=_v4(denied),
            domains=frozenset(rule for rule in rules if rule),
            resolvers=tuple(IPv4Address(text) for text in network.get("dnsServers") or ()),
            proxy=Proxy.of(proxy) if proxy else None,
        )

    @property
    def closed(self) -> bool:
        """Whether everything that is not allowed by name or address is denied."""
        return EVERYWHERE in self.denied

    def allows_address(self, address: IPv4Address) -> bool:
        """Whether a connection may be made without looking at the name. `NEVER` is not this policy's to judge."""
        return _within(address, self.allowed) or not _within(address, self.denied)

    def allows_datagrams(self, address: IPv4Address) -> bool:
        return _within(address, self.datagrams)

    @property
    def datagrams(self) -> tuple[IPv4Network, ...]:
        """Where datagrams may go: they carry no name and much can be hidden in them, so addresses need to be
        named; and they would go around a proxy."""
        return () if self.proxy else self.allowed

    def allows_domain(self, name: str) -> bool:
        """Whether a rule names this host: exactly, or `*.` above it (which is not the name itself)."""
        if not self.domains:
            return False
        labels = name.rstrip(".").lower().split(".")
        wild = ("*." + ".".join(labels[at:]) for at in range(1, len(labels)))
        return "*" in self.domains or ".".join(labels) in self.domains or any(rule in self.domains for rule in wild)

    def may_resolve(self, name: str) -> bool:
        """A closed sandbox asks for the names of its rules only: a query, too, carries data out."""
        return not self.closed or self.allows_domain(name)


CLOSED = Policy(denied=(EVERYWHERE,))
OPEN = Policy()


def never_allowed(settings: NetworkSettings) -> tuple[IPv4Network, ...]:
    """`NEVER`, less what the node's operator lets through and more what is added; without overlaps."""
    blocks = list(NEVER)
    for spared in settings.reachable:
        blocks = [part for block in blocks for part in _without(block, spared)]
    return tuple(ipaddress.collapse_addresses([*blocks, *settings.denied]))


def _without(block: IPv4Network, spared: IPv4Network) -> Iterable[IPv4Network]:
    if not block.overlaps(spared):
        return [block]
    return block.address_exclude(spared) if spared.subnet_of(block) else []


def _v4(blocks: Iterable[IPv4Network | ipaddress.IPv6Network | None]) -> tuple[IPv4Network, ...]:
    found = {block for block in blocks if isinstance(block, IPv4Network)}
    return tuple(sorted(ipaddress.collapse_addresses(found)))


def _within(address: IPv4Address, blocks: tuple[IPv4Network, ...]) -> bool:
    return any(address in block for block in blocks)
