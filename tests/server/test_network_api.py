"""The `network` object through the API: checked, stored, shown, replaced; refused where it cannot be kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandyard.config import NetworkSettings
from sandyard.errors import BadRequest, ClientError, Unsupported
from sandyard.network.policy import Policy
from sandyard.server.control.network import checked_network, internet_access, replaced_network, shown_network
from tests.server.conftest import LiveServer, memory_settings, running

ON, OFF = NetworkSettings(egress="on"), NetworkSettings()
ALL = "0.0.0.0/0"


def checked(network: dict[str, Any] | None = None, access: bool | None = None, **options: Any) -> dict[str, Any]:
    return checked_network(network, access, **{"secured": True, "settings": ON, **options})


def test_what_was_set_is_stored_and_the_rest_is_not() -> None:
    network = {
        "allowPublicTraffic": False,
        "allowOut": ["1.1.1.1", "*.example.com"],
        "denyOut": [ALL],
        "dnsServers": ["8.8.8.8"],
        "httpsPorts": [8443],
        "maskRequestHost": "example.com:${PORT}",
    }
    assert checked(network) == network
    assert checked(network | {"somethingNew": 1, "egressProxy": None, "rules": {}}) == network
    assert checked() == {}
    assert checked({}, True) == {}
    assert checked({}, False) == {"allowInternetAccess": False}


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"denyOut": ["not-a-cidr"]}, "invalid denied CIDR not-a-cidr"),
        ({"denyOut": ["example.com"]}, "invalid denied CIDR example.com"),
        (
            {"allowOut": ["example.com"]},
            "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all "
            "other traffic.",
        ),
        ({"allowOut": ["example.com"], "denyOut": ["10.0.0.0/8"]}, "When specifying allowed domains"),
        ({"allowOut": ["exa mple.com"], "denyOut": [ALL]}, "invalid allowed domain: exa mple.com"),
        ({"allowOut": ["300.1.1.1/8"], "denyOut": [ALL]}, "invalid allowed domain: 300.1.1.1/8"),
        ({"allowOut": "1.1.1.1"}, "network.allowOut: Input should be a valid list"),
        ({"denyOut": [1]}, "network.denyOut: not a list of at most 1000 strings"),
        ({"dnsServers": ["dns.test"]}, "invalid DNS server dns.test: not an IPv4 address"),
        ({"dnsServers": ["10.0.0.53"]}, "invalid DNS server 10.0.0.53: never reachable"),
        ({"httpsPorts": [0]}, "invalid httpsPorts port 0: must be between 1 and 65535"),
        ({"httpsPorts": [True]}, "invalid httpsPorts port True"),
        ({"maskRequestHost": "a b"}, "mask request host is not valid: a b"),
        ({"maskRequestHost": "bücher.test"}, "Please use 'xn--bcher-kva.test' instead."),
        ({"maskRequestHost": "example.com:99999"}, "mask request host is not valid"),
        ({"allowPublicTraffic": "no"}, "network.allowPublicTraffic: Input should be a valid bool"),
        ({"rules": {f"a{at}.test": [] for at in range(11)}}, "network.rules: 11 domains, the most is 10"),
        ({"rules": {"a.test": [{}, {}]}}, "network.rules.a.test: 2 transforms, the most is 1"),
        (
            {"rules": {"a.test": [{"transform": {"headers": {f"H{at}": "v" for at in range(21)}}}]}},
            "21 headers, the most is 20",
        ),
        ({"rules": {"a.test": [{"transform": {"headers": {"X" * 65: "v"}}}]}}, "maximum length"),
        ({"rules": {"a.test": [{"transform": {"headers": {"X": "v\r\nY: z"}}}]}}, "is no text"),
        ({"egressProxy": {"address": 1}}, "an object with a string 'address' is needed"),
        ({"egressProxy": {"address": "proxy.test"}}, "'proxy.test' is not host:port"),
        ({"egressProxy": {"address": "proxy.test:0"}}, "'proxy.test:0' is not host:port"),
        ({"egressProxy": {"address": "a:1", "username": "x" * 256}}, "username: not a text of at most 255 bytes"),
        ({"egressProxy": {"address": "a:1", "password": "x"}}, "there is no username"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(network: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        checked(network)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("network", "field"),
    [
        ({"rules": {"a.test": [{"transform": {"headers": {"X": "v"}}}]}}, "network.rules"),
        ({"egressProxy": {"address": "proxy.test:1080", "tls": {"enabled": True}}}, "network.egressProxy.tls"),
    ],
)
def test_what_this_node_cannot_do_is_refused_by_name(network: dict[str, Any], field: str) -> None:
    with pytest.raises(Unsupported, match=field):
        checked(network)


def test_private_ports_need_a_secured_sandbox() -> None:
    with pytest.raises(BadRequest, match="without setting secure: true"):
        checked({"allowPublicTraffic": False}, secured=False)


def test_without_egress_access_is_refused_where_it_was_asked_for_by_hand() -> None:
    assert checked({"denyOut": ["8.8.8.8"]}, True, settings=OFF) == {"denyOut": ["8.8.8.8"]}
    for network in ({"allowOut": ["1.1.1.1"]}, {"dnsServers": ["8.8.8.8"]}, {"egressProxy": {"address": "a:1"}}):
        with pytest.raises(Unsupported, match=r"network\.(allowOut|dnsServers|egressProxy).*network\.egress = on"):
            checked(network, settings=OFF)


def test_info_says_what_is_so() -> None:
    assert not internet_access({}, OFF)
    assert internet_access({}, ON)
    assert not internet_access({"allowInternetAccess": False}, ON)
    assert shown_network({"allowInternetAccess": False, "denyOut": [ALL]}) == {
        "allowPublicTraffic": True,
        "denyOut": [ALL],
    }


def test_the_password_of_a_proxy_is_kept_and_not_shown() -> None:
    proxy = {"address": "proxy.test:1080", "username": "me", "password": "secret"}
    stored = checked({"egressProxy": proxy | {"tls": None}})
    assert stored == {"egressProxy": proxy}
    assert shown_network(stored)["egressProxy"] == {"address": "proxy.test:1080", "username": "me"}


def test_an_update_clears_what_it_leaves_out_and_keeps_what_is_of_ports() -> None:
    stored = {"allowOut": ["1.1.1.1"], "denyOut": [ALL], "httpsPorts": [443], "allowInternetAccess": False}
    assert replaced_network(stored, {}, ON) == {"httpsPorts": [443]}
    assert replaced_network(stored, {"denyOut": ["ALL_TRAFFIC"]}, ON) == {"httpsPorts": [443], "denyOut": [ALL]}
    assert replaced_network({}, {"allow_internet_access": False}, ON) == {"allowInternetAccess": False}
    with pytest.raises(BadRequest, match="allowed domains"):
        replaced_network(stored, {"allowOut": ["a.test"]}, ON)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.sampled_from([ALL, "1.1.1.1", "a.test"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    "allowPublicTraffic",
    "allowOut",
    "denyOut",
    "dnsServers",
    "httpsPorts",
    "egressProxy",
    "maskRequestHost",
    "rules",
]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_object_is_checked_or_refused_and_what_is_stored_is_a_policy(network: dict[str, Any]) -> None:
    try:
        stored = checked(network)
    except ClientError:
        return
    Policy.of(stored)
    assert checked(stored) == stored


def test_create_shows_and_update_replaces(server: LiveServer, api: httpx.Client) -> None:
    body = {"templateID": "base", "network": {"denyOut": ["8.8.8.8"]}, "allow_internet_access": True, "secure": True}
    created = api.post("/sandboxes", json=body)
    assert created.status_code == 201
    path = f"/sandboxes/{created.json()['sandboxID']}"
    info = api.get(path).json()
    assert info["network"] == {"allowPublicTraffic": True, "denyOut": ["8.8.8.8"]}
    assert info["allowInternetAccess"] is False
    assert api.put(f"{path}/network", json={"denyOut": ["9.9.9.9/32"], "unknown": 1}).status_code == 204
    assert api.get(path).json()["network"]["denyOut"] == ["9.9.9.9/32"]
    assert api.put(f"{path}/network", json={}).status_code == 204
    assert "denyOut" not in api.get(path).json()["network"]


def test_refusals_come_before_anything_happens(server: LiveServer, api: httpx.Client) -> None:
    for network in ({"allowOut": ["1.1.1.1"]}, {"egressProxy": {"address": "a:1"}}, {"denyOut": ["x"]}):
        answer = api.post("/v2/sandboxes", json={"templateID": "base", "network": network})
        assert (answer.status_code, answer.json()["code"]) == (400, 400)
    assert server.app.manager.all() == []


def test_an_update_is_refused_by_name_and_changes_nothing(server: LiveServer, api: httpx.Client) -> None:
    body = {"templateID": "base", "network": {"denyOut": ["8.8.8.8"]}}
    path = f"/sandboxes/{api.post('/v2/sandboxes', json=body).json()['sandboxID']}"
    answer = api.put(f"{path}/network", json={"denyOut": ["nonsense"]})
    assert (answer.status_code, answer.json()["message"]) == (400, "invalid denied CIDR nonsense")
    assert api.put(f"{path}/network", json={"denyOut": 5}).status_code == 400
    assert api.get(path).json()["network"]["denyOut"] == ["8.8.8.8"]
    assert api.put("/sandboxes/nobody/network", json={}).status_code == 404
    assert api.post(f"{path}/pause").status_code == 204
    paused = api.put(f"{path}/network", json={})
    assert (paused.status_code, "paused" in paused.json()["message"]) == (409, True)


def test_the_network_is_recorded(tmp_path: Path) -> None:
    where = memory_settings(tmp_path)
    with running(where) as server, server.client() as api:
        body = {"templateID": "base", "network": {"denyOut": ["8.8.8.8"]}}
        sandbox = api.post("/v2/sandboxes", json=body).json()["sandboxID"]
        api.put(f"/sandboxes/{sandbox}/network", json={"denyOut": ["9.9.9.9"]})
        [record] = server.call(server.app.manager.store.living())
        assert record.network == {"denyOut": ["9.9.9.9"]}
