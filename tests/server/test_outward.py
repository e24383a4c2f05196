"""What a build may make the server connect to."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from sandyard.config import ImageSettings, NetworkSettings, Settings
from sandyard.server.builds.outward import PublicOnly, trusted
from tests.server.conftest import LiveServer, memory_settings, running
from tests.server.test_templates import begin, ended, register


@contextmanager
def registry_of_the_host() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Something of the host's own that answers, and what it was asked (path, authorization)."""
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["authorization"]))
            self.send_response(401)
            self.send_header("www-authenticate", "Basic")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def try_image(server: LiveServer, image: str) -> str:
    """Why a build from it failed."""
    with server.client() as api:
        made = register(api, "tried")
        assert begin(api, made, fromTemplate=None, fromImage=image).status_code == 202
        message: str = ended(api, made)["reason"]["message"]
        return message


def test_a_build_asks_nothing_of_the_host_and_its_network(server: LiveServer) -> None:
    with registry_of_the_host() as (address, asked):
        port = address.partition(":")[2]
        for image in (f"{address}/x", f"localhost:{port}/x", "169.254.169.254/latest", f"10.0.0.1:{port}/x"):
            assert "no address that builds may reach" in try_image(server, image)
    assert asked == []


def test_images_that_are_allowed_by_name_are_asked_for_with_the_credentials_of_the_host(tmp_path: Path) -> None:
    with registry_of_the_host() as (address, asked):
        login = base64.b64encode(b"operator:secret").decode()
        (tmp_path / "auth.json").write_text(json.dumps({"auths": {address: {"auth": login}}}))
        images = ImageSettings(allowed=[f"{address}/x"], auth_file=tmp_path / "auth.json")
        settings = memory_settings(tmp_path).model_copy(update={"images": images})
        with running(settings) as server:
            assert "401" in try_image(server, f"{address}/x")
            assert "not of a registry that is allowed" in try_image(server, f"{address}/private")
    assert asked == [("/v2/x/manifests/latest", None), ("/v2/x/manifests/latest", f"Basic {login}")]


@pytest.mark.parametrize("field", ["registries", "plain_http"])
def test_a_registry_of_the_settings_is_asked_as_nobody(field: str, tmp_path: Path) -> None:
    """Who may pull from it need not read what is private in it."""
    with registry_of_the_host() as (address, asked):
        login = base64.b64encode(b"operator:secret").decode()
        (tmp_path / "auth.json").write_text(json.dumps({"auths": {address: {"auth": login}}}))
        images = ImageSettings.model_validate({field: [address], "auth_file": tmp_path / "auth.json"})
        settings = memory_settings(tmp_path).model_copy(update={"images": images})
        with running(settings) as server:
            assert "401: credentials are needed" in try_image(server, f"{address}/private")
    assert asked == [("/v2/private/manifests/latest", None)]


def test_credentials_of_the_host_are_for_no_other_registry(tmp_path: Path) -> None:
    """Here the node may reach loopback, but does not name the registry as one to pull from."""
    with registry_of_the_host() as (address, asked):
        login = base64.b64encode(b"operator:secret").decode()
        (tmp_path / "auth.json").write_text(json.dumps({"auths": {address: {"auth": login}}}))
        images = ImageSettings(auth_file=tmp_path / "auth.json")
        settings = memory_settings(tmp_path).model_copy(update={"images": images})
        with pytest.MonkeyPatch.context() as patch, running(settings) as server:
            patch.setattr(PublicOnly, "_public", lambda _self, _address: True)
            assert "401: credentials are needed" in try_image(server, f"{address}/x")
    assert asked == [("/v2/x/manifests/latest", None)]


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Every name has these addresses."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1"])
async def test_addresses_that_are_not_public(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, address)
    async with httpx.AsyncClient(transport=PublicOnly(Settings())) as client:
        with pytest.raises(httpx.ConnectError, match=r"registry\.test has no address that builds may reach"):
            await client.get("http://registry.test/v2/")


@pytest.mark.parametrize("host", ["[::1]", "[fe80::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "a..b"])
async def test_there_is_no_way_but_ipv4_and_nothing_is_told_of_names(host: str) -> None:
    async with httpx.AsyncClient(transport=PublicOnly(Settings())) as client:
        with pytest.raises(httpx.ConnectError, match="has no address that builds may reach"):
            await client.get(f"http://{host}:1/v2/")


async def test_a_name_that_is_not_known_reads_as_one_that_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    async with httpx.AsyncClient(transport=PublicOnly(Settings())) as client:
        with pytest.raises(httpx.ConnectError, match=r"hub\.test has no address that builds may reach"):
            await client.get("http://hub.test/v2/")


async def test_addresses_are_tried_in_turn_and_a_redirect_is_judged_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Inner(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            tried.append(f"{request.url.host} {request.headers['host']} {request.extensions['sni_hostname']}")
            if request.url.host == "8.8.4.4":
                raise httpx.ConnectError("nobody there")
            return httpx.Response(302, headers={"location": "http://127.0.0.1:1/secret"})

    resolve_to(monkeypatch, "10.0.0.1", "8.8.4.4", "8.8.8.8")
    transport = PublicOnly(Settings())
    transport._inner = Inner()  # type: ignore[assignment]
    async with httpx.AsyncClient(transport=transport, follow_redirects=True) as client:
        with monkeypatch.context() as patch:
            response = await client.get("https://hub.test/v2/", follow_redirects=False)
            patch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(2, 1, 6, "", (host, 0))])
            with pytest.raises(httpx.ConnectError, match=r"127\.0\.0\.1 has no address that builds may reach"):
                await client.send(response.next_request or pytest.fail("no redirect"))
    assert tried == ["8.8.4.4 hub.test hub.test", "8.8.8.8 hub.test hub.test"]


async def test_the_host_itself_is_opened_by_no_setting() -> None:
    with registry_of_the_host() as (address, asked):
        settings = Settings(network=NetworkSettings.model_validate({"reachable": ["127.0.0.0/8"]}))
        async with httpx.AsyncClient(transport=PublicOnly(settings)) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://{address}/")
    assert asked == []


def test_what_is_trusted() -> None:
    images = ImageSettings(
        registries=["one.test/library"],
        mirrors={"docker.io": ["two.test:5000/hub"]},
        plain_http=["three.test:80"],
        allowed=["four.test/team"],
    )
    assert set(trusted(images)) == {"one.test", "two.test:5000", "three.test:80", "four.test"}
