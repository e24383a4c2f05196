"""The `network` object of the API: checked before anything happens, stored, shown, replaced."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from sandyard.config import NetworkSettings
from sandyard.errors import BadRequest, Conflict, Unsupported
from sandyard.network.policy import EVERYWHERE, canonical_domain, canonical_rule, never_allowed, parse_network
from sandyard.network.runtime import connected
from sandyard.sandboxes.model import State
from sandyard.server.control.context import Here, Tenant

DOMAINS_NEED_DENY = (
    "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out "
    "to block all other traffic."
)
ALL_TRAFFIC = "ALL_TRAFFIC"
INTERNET = "allowInternetAccess"  # beside the API's own fields, in what is stored
MAX_ENTRIES = 1000
MAX_PORTS = 128
MAX_RULES = 10
MAX_HEADERS = 20
_EGRESS = ("allowOut", "denyOut", "dnsServers", "egressProxy", "rules")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_MASK = re.compile(r"(?P<host>[^:]+)(:(?P<port>\d{1,5}|\$\{PORT\}))?")


router = APIRouter(tags=["sandboxes"])

_changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()


class NetworkUpdate(BaseModel):
    """What a running sandbox may reach from here on: what is left out is cleared."""

    model_config = ConfigDict(extra="ignore")

    allowOut: list[str] | None = Field(default=None, description="Addresses, CIDR blocks, names, or `*.name`.")
    denyOut: list[str] | None = Field(default=None, description="Addresses and CIDR blocks; allowOut goes before it.")
    dnsServers: list[str] | None = None
    egressProxy: dict[str, Any] | None = None
    rules: dict[str, Any] | None = None
    allow_internet_access: bool | None = Field(default=None, description="false: as if denyOut held 0.0.0.0/0.")


@router.put("/sandboxes/{sandbox_id}/network", status_code=204)
async def update(sandbox_id: str, body: NetworkUpdate, here: Here, tenant: Tenant) -> None:
    """Replace the egress rules of a running sandbox; open connections that they deny are cut."""
    manager = here.manager
    async with _changing.setdefault(sandbox_id, asyncio.Lock()):
        sandbox = manager.get(tenant, sandbox_id)
        settings = manager.settings.network
        wanted = replaced_network(sandbox.network, body.model_dump(exclude_none=True), settings)
        if sandbox.state is not State.RUNNING:
            raise Conflict(f"sandbox '{sandbox_id}' is {sandbox.state}", remedy="connect to it: that resumes it")
        if settings.egress == "on" and not connected(manager.runtime, sandbox_id):
            raise Conflict(f"sandbox '{sandbox_id}' was made without a network", remedy="start another")
        await manager.store.set_network(sandbox_id, wanted)
        sandbox.network = wanted
        await manager.permit(sandbox)


def checked_network(
    network: Mapping[str, Any] | None,
    allow_internet_access: bool | None,
    *,
    secured: bool,
    settings: NetworkSettings,
) -> dict[str, Any]:
    """What to store of a create request: the object's own fields that were set, checked, plus
    `allowInternetAccess: False` where it was forbidden.

    Raises `BadRequest` for what makes no sense, `Unsupported` for what this node cannot enforce.
    `allow_internet_access: true` passes on a node without egress, as clients send it unasked: such
    a sandbox has no network, and its info says so.
    """
    given = _egress(network or {}, allow_internet_access, settings)
    public = _typed(network or {}, "allowPublicTraffic", bool)
    if public is False and not secured:
        message = "You cannot create a sandbox with allowPublicTraffic: false without setting secure: true"
        raise BadRequest(f"{message}.", field="network.allowPublicTraffic")
    mask = _typed(network or {}, "maskRequestHost", str)
    ingress = {"allowPublicTraffic": public, "maskRequestHost": mask and _mask(mask), "httpsPorts": _ports(network)}
    return given | {name: value for name, value in ingress.items() if value is not None}


def replaced_network(stored: Mapping[str, Any], update: Mapping[str, Any], settings: NetworkSettings) -> dict[str, Any]:
    """What to store after PUT: the egress fields of `update` in place of all earlier ones; what
    concerns traffic into the sandbox stays. Raises as `checked_network` does."""
    kept = {name: value for name, value in stored.items() if name not in (*_EGRESS, INTERNET)}
    return kept | _egress(update, _typed(update, "allow_internet_access", bool), settings)


def shown_network(stored: Mapping[str, Any]) -> dict[str, Any]:
    """`network` of the sandbox's info. The password of a proxy stays here."""
    shown = {"allowPublicTraffic": True} | {name: value for name, value in stored.items() if name != INTERNET}
    proxy = shown.get("egressProxy")
    if isinstance(proxy, Mapping):
        shown["egressProxy"] = {name: value for name, value in proxy.items() if name != "password"}
    return shown


def internet_access(stored: Mapping[str, Any], settings: NetworkSettings) -> bool:
    """`allowInternetAccess` of the sandbox's info: what is so, not what was asked for."""
    return settings.egress == "on" and stored.get(INTERNET) is not False


def _egress(network: Mapping[str, Any], access: bool | None, settings: NetworkSettings) -> dict[str, Any]:
    denied = [_deny(text) for text in _strings(network, "denyOut")]
    allowed = _strings(network, "allowOut")
    domains = [text for text in allowed if parse_network(text) is None]
    for domain in domains:
        if canonical_rule(domain) is None:
            raise BadRequest(f"invalid allowed domain: {domain}", field="network.allowOut")
    if domains and str(EVERYWHERE) not in denied:
        raise BadRequest(DOMAINS_NEED_DENY, field="network.denyOut")
    resolvers = [_resolver(text, settings) for text in _strings(network, "dnsServers")]
    _rules(network.get("rules"))
    proxy = _proxy(network.get("egressProxy"))
    fields: dict[str, Any] = {"allowOut": allowed, "dnsServers": resolvers, "egressProxy": proxy}
    field = next((name for name, value in fields.items() if value), None)
    if settings.egress == "off" and field is not None:
        raise Unsupported(f"network.{field}: sandboxes of this node have no network", remedy="set network.egress = on")
    found = {name: value for name, value in (fields | {"denyOut": denied}).items() if value}
    return found | ({INTERNET: False} if access is False else {})


def _typed(network: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = network.get(name)
    if value is not None and not isinstance(value, kind):
        raise BadRequest(f"network.{name}: Input should be a valid {kind.__name__}", field=f"network.{name}")
    return value


def _strings(network: Mapping[str, Any], name: str) -> list[str]:
    values = _typed(network, name, list) or []
    if len(values) > MAX_ENTRIES or not all(isinstance(value, str) and value.isprintable() for value in values):
        raise BadRequest(f"network.{name}: not a list of at most {MAX_ENTRIES} strings", field=f"network.{name}")
    return [value.strip() for value in values]


def _deny(text: str) -> str:
    block = EVERYWHERE if text == ALL_TRAFFIC else parse_network(text)
    if block is None:
        raise BadRequest(f"invalid denied CIDR {text}", field="network.denyOut")
    return str(EVERYWHERE) if block == EVERYWHERE else text


def _resolver(text: str, settings: NetworkSettings) -> str:
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        raise BadRequest(f"invalid DNS server {text}: not an IPv4 address", field="network.dnsServers") from None
    if any(address in block for block in never_allowed(settings)):
        raise BadRequest(f"invalid DNS server {text}: never reachable from a sandbox", field="network.dnsServers")
    return str(address)


def _ports(network: Mapping[str, Any] | None) -> Sequence[int] | None:
    ports = _typed(network or {}, "httpsPorts", list)
    if ports is None:
        return None
    for port in ports:
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise BadRequest(f"invalid httpsPorts port {port}: must be between 1 and 65535", field="network.httpsPorts")
    if len(ports) > MAX_PORTS:
        raise BadRequest(f"httpsPorts: {len(ports)} ports, the most is {MAX_PORTS}", field="network.httpsPorts")
    return list(ports)


def _mask(text: str) -> str:
    match = _MASK.fullmatch(text)
    host = match and canonical_domain(match["host"])
    port = match and match["port"]
    if not match or host is None or (port and port.isdigit() and not 1 <= int(port) <= 65535):
        raise BadRequest(f"mask request host is not valid: {text}", field="network.maskRequestHost")
    if host != match["host"].rstrip(".").lower():
        message = f"mask request host '{text}' is not ASCII. Please use '{host}' instead."
        raise BadRequest(message, field="network.maskRequestHost")
    return text


def _rules(rules: object) -> None:
    """Header transforms need TLS to be opened on the way, which this node does not do."""
    if not rules:
        return
    if not isinstance(rules, dict):
        raise BadRequest("network.rules: Input should be a valid dict", field="network.rules")
    if len(rules) > MAX_RULES:
        raise BadRequest(f"network.rules: {len(rules)} domains, the most is {MAX_RULES}", field="network.rules")
    for domain, transforms in rules.items():
        _rule(domain, transforms)
    raise Unsupported("network.rules: headers of outgoing requests cannot be transformed by this node")


def _rule(domain: str, rules: object) -> None:
    where = f"network.rules.{domain}"
    if canonical_rule(domain) is None or len(domain) > 128:
        raise BadRequest(f"network.rules: invalid domain: {domain}", field="network.rules")
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise BadRequest(f"{where}: Input should be a list of objects", field=where)
    if len(rules) > 1:
        raise BadRequest(f"{where}: {len(rules)} transforms, the most is 1", field=where)
    transform = rules[0].get("transform") if rules else None
    headers = transform.get("headers") if isinstance(transform, dict) else None
    if headers is not None and not isinstance(headers, dict):
        raise BadRequest(f"{where}: headers should be an object", field=where)
    if len(headers or {}) > MAX_HEADERS:
        raise BadRequest(f"{where}: {len(headers or {})} headers, the most is {MAX_HEADERS}", field=where)
    for name, value in (headers or {}).items():
        if not _HEADER_NAME.fullmatch(name):
            raise BadRequest(
                f"{where}: header name '{name[:80]}' is not one, or over its maximum length of 64", field=where
            )
        if not isinstance(value, str) or len(value) > 2048 or not value.isprintable():
            raise BadRequest(
                f"{where}: value of header {name} is no text, or over its maximum length of 2048", field=where
            )


def _proxy(proxy: object) -> dict[str, Any] | None:
    if proxy is None:
        return None
    where = "network.egressProxy"
    if not isinstance(proxy, dict) or not isinstance(proxy.get("address"), str):
        raise BadRequest(f"{where}: an object with a string 'address' is needed", field=where)
    host, _, port = proxy["address"].rpartition(":")
    if canonical_domain(host) is None or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise BadRequest(f"{where}.address: '{proxy['address']}' is not host:port", field=f"{where}.address")
    tls = proxy.get("tls")
    if isinstance(tls, dict) and tls.get("enabled"):
        raise Unsupported(f"{where}.tls: this node speaks to proxies without TLS only")
    login = {name: _credential(proxy.get(name), f"{where}.{name}") for name in ("username", "password")}
    if login["password"] and not login["username"]:
        raise BadRequest(f"{where}.password: there is no username", field=f"{where}.password")
    return {"address": proxy["address"]} | {name: value for name, value in login.items() if value}


def _credential(value: object, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not value.isprintable() or len(value.encode(errors="replace")) > 255:
        raise BadRequest(f"{field}: not a text of at most 255 bytes", field=field)
    return value
