"""Host-name mode: a certificate of the server's own or a given one, and what its names lead to."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.sync.client import connect as connect_websocket

from sandyard.config import ServerSettings, Settings
from sandyard.errors import ConfigError, HostError
from sandyard.server import tls
from sandyard.server.envd.connect import frame
from sandyard.server.envd.signing import sign
from sandyard.server.listen import check_address, with_public_port
from tests.server.conftest import LiveServer, memory_settings
from tests.server.test_serving import start_child

DOMAIN = "yard.test"


def settings_of(home: Path, **server: object) -> Settings:
    settings = memory_settings(home)
    wanted = {"port": 0, "domain": DOMAIN, "tls_port": 0, **server}
    return settings.model_copy(update={"server": ServerSettings.model_validate(wanted)})


class TlsServer(LiveServer):
    """A server with TLS on its only listener. `client` reaches it under every name of its domain."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        identity = tls.TlsIdentity(settings)
        assert identity.ca is not None
        self.tls, self.ca = identity.context, identity.ca
        self.settings = with_public_port(settings, self._listener)
        self.port = self._listener.getsockname()[1]
        self.http = httpx.Client(transport=Everywhere(verify=ssl.create_default_context(cafile=self.ca)), timeout=20)

    def create(self, **body: object) -> dict[str, Any]:
        headers = {"X-API-Key": self.key}
        url = f"https://api.{DOMAIN}:{self.port}/v2/sandboxes"
        made: dict[str, Any] = self.http.post(url, json={"templateID": "base", **body}, headers=headers).json()
        return made


class Everywhere(httpx.HTTPTransport):
    """All names are this machine; the certificate is still checked against the name."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions["sni_hostname"] = request.url.host
        request.url = request.url.copy_with(host="127.0.0.1")
        return super().handle_request(request)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsServer]:
    made = TlsServer(settings_of(tmp_path))
    made.start()
    try:
        yield made
    finally:
        made.http.close()
        made.stop()


def test_every_name_leads_where_it_says(server: TlsServer) -> None:
    made = server.create()
    assert made["domain"] == f"{DOMAIN}:{server.port}"
    token = {"X-Access-Token": made["envdAccessToken"]}
    envd = f"https://49983-{made['sandboxID']}.{made['domain']}"
    assert server.http.get(f"{envd}/health").status_code == 204
    assert server.http.get(f"{envd}/envs").status_code == 401
    assert server.http.get(f"{envd.upper()}/envs", headers=token).json() == {}
    by_header = {"E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "49983"}
    assert server.http.get(f"https://sandbox.{made['domain']}/envs", headers=token | by_header).json() == {}
    # A header that a page or a program adds does not turn a request to the API into one to a sandbox.
    api = f"https://api.{made['domain']}/v2/sandboxes"
    assert (
        server.http.get(api, headers={"X-API-Key": server.key} | by_header).json()[0]["sandboxID"] == made["sandboxID"]
    )


def test_ports_answer_by_host_name_or_say_what_is_wrong(server: TlsServer) -> None:
    made = server.create()
    heads: list[bytes] = []

    def serve(data: bytes) -> bytes:
        heads.append(data)
        return b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"

    server.agents[-1].ports[8000] = serve
    host = f"8000-{made['sandboxID']}.{made['domain']}"
    assert server.http.get(f"https://{host}/x").text == "hi"
    assert f"Host: {host}\r\n".encode() in heads[0]
    assert b"X-Forwarded-Proto: https\r\n" in heads[0]
    closed = server.http.get(f"https://3000-{made['sandboxID']}.{made['domain']}/")
    assert (closed.status_code, closed.json()) == (
        502,
        {
            "code": 502,
            "message": "The sandbox is running but port is not open",
            "sandboxId": made["sandboxID"],
            "port": 3000,
        },
    )
    gone = server.http.get(f"https://3000-nobody.{made['domain']}/")
    assert (gone.status_code, gone.json()) == (
        502,
        {"code": 502, "message": "The sandbox was not found", "sandboxId": "nobody"},
    )


def test_a_signed_url_of_a_host_name_opens_its_file(server: TlsServer) -> None:
    made = server.create()
    url = f"https://49983-{made['sandboxID']}.{made['domain']}/files"
    server.http.post(url, params={"path": "/tmp/f"}, content=b"x", headers={"X-Access-Token": made["envdAccessToken"]})
    query = {"path": "/tmp/f", "signature": sign("/tmp/f", "read", "", made["envdAccessToken"])}
    assert server.http.get(url, params=query).content == b"x"
    other = server.create()
    wrong = server.http.get(f"https://49983-{other['sandboxID']}.{made['domain']}/files", params=query)
    assert (wrong.status_code, wrong.json()["message"]) == (401, "invalid signature")


def test_a_websocket_passes_by_host_name(server: TlsServer) -> None:
    made = server.create()
    inside = ServerProtocol()

    def serve(data: bytes) -> bytes:
        inside.receive_data(data)
        for event in inside.events_received():
            if isinstance(event, Request):
                inside.send_response(inside.accept(event))
            elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                inside.send_text(bytes(event.data).upper())
        return b"".join(inside.data_to_send())

    server.agents[-1].ports[8000] = serve
    uri = f"wss://8000-{made['sandboxID']}.{made['domain']}/talk"
    connection = socket.create_connection(("127.0.0.1", server.port), 10)
    with connect_websocket(uri, sock=connection, ssl=ssl.create_default_context(cafile=server.ca)) as outside:
        outside.send("hello")
        assert outside.recv(5) == "HELLO"


def test_a_stream_over_tls_is_reset_too(server: TlsServer) -> None:
    made = server.create()
    host = f"49983-{made['sandboxID']}.{made['domain']}"
    body = frame(b'{"process": {"cmd": "sleep", "args": ["50"]}, "stdin": false}')
    head = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: {host}\r\nX-Access-Token: {made['envdAccessToken']}\r\n"
        f"Content-Type: application/connect+json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    context = ssl.create_default_context(cafile=server.ca)
    plain = socket.create_connection(("127.0.0.1", server.port), 10)
    with context.wrap_socket(plain, server_hostname=host.partition(":")[0]) as connection:
        connection.sendall(head.encode() + body)
        got = b""
        while b'"start"' not in got:
            got += connection.recv(65536)
        api = f"https://api.{made['domain']}/sandboxes/{made['sandboxID']}"
        assert server.http.delete(api, headers={"X-API-Key": server.key}).status_code == 204
        connection.settimeout(None)
        with pytest.raises(ConnectionResetError):
            read_raw(connection)


def read_raw(connection: socket.socket) -> None:
    # Below TLS, whose library here tells a reset as an end.
    while os.read(connection.fileno(), 65536):
        pass


# --- certificates ---


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_ca_stays_and_the_certificate_follows_the_domain(tmp_path: Path) -> None:
    first = tls.TlsIdentity(settings_of(tmp_path))
    folder = tmp_path / "state" / "tls"
    assert first.ca == folder / "ca.pem"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca-key.pem": 0o600, "cert.pem": 0o644, "key.pem": 0o600}
    ca, cert = (folder / "ca.pem").read_bytes(), (folder / "cert.pem").read_bytes()
    tls.TlsIdentity(settings_of(tmp_path))
    assert ((folder / "ca.pem").read_bytes(), (folder / "cert.pem").read_bytes()) == (ca, cert)
    tls.TlsIdentity(settings_of(tmp_path, domain="other.test:444"))
    assert (folder / "ca.pem").read_bytes() == ca
    names = load(folder / "cert.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["other.test", "*.other.test", "api.other.test"]


def test_a_certificate_near_its_end_is_renewed_and_shown_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = tls.TlsIdentity(settings_of(tmp_path))
    cert = tmp_path / "state" / "tls" / "cert.pem"
    before = load(cert)
    identity.refresh()
    assert load(cert) == before
    monkeypatch.setattr(tls, "RENEW_DAYS", tls.CERT_DAYS + 1)
    monkeypatch.setattr(tls, "CERT_DAYS", tls.CERT_DAYS + 30)
    identity.refresh()
    after = load(cert)
    assert after.serial_number != before.serial_number
    assert shown_by(identity).serial_number == after.serial_number


def shown_by(identity: tls.TlsIdentity) -> x509.Certificate:
    """The certificate a client sees in a handshake with `identity`."""
    client = ssl.create_default_context(cafile=identity.ca)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=f"x.{DOMAIN}")
    theirs = identity.context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (ours, theirs):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    found = ours.getpeercert(binary_form=True)
    assert found is not None
    return x509.load_der_x509_certificate(found)


@pytest.mark.parametrize("damage", ["cert.pem", "key.pem", "ca.pem", "ca-key.pem"])
def test_damaged_files_are_made_anew(tmp_path: Path, damage: str) -> None:
    tls.TlsIdentity(settings_of(tmp_path))
    path = tmp_path / "state" / "tls" / damage
    path.write_text("nonsense")
    assert shown_by(tls.TlsIdentity(settings_of(tmp_path)))


def test_a_given_certificate_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    _, cert, key = tls.own_certificate(tmp_path / "given", DOMAIN)
    identity = tls.TlsIdentity(settings_of(tmp_path, tls_cert=cert, tls_key=key))
    assert identity.ca is None
    assert not (tmp_path / "state" / "tls").exists()
    with pytest.raises(ConfigError, match=r"does not cover \*\.else\.test, only yard\.test"):
        tls.TlsIdentity(settings_of(tmp_path, domain="else.test", tls_cert=cert, tls_key=key))
    _, _, other = tls.own_certificate(tmp_path / "other", DOMAIN)
    for wrong in (other, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"server\.tls_cert and server\.tls_key must be"):
            tls.TlsIdentity(settings_of(tmp_path, tls_cert=cert, tls_key=wrong))


def test_a_state_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "tls").write_text("in the way")
    with pytest.raises(HostError, match=r"certificates in .*state/tls"):
        tls.TlsIdentity(settings_of(tmp_path))


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ({"domain": "no spaces"}, "host name"),
        ({"domain": "-a.test"}, "host name"),
        ({"domain": "a..test"}, "host name"),
        ({"tls_cert": "/x"}, "come together"),
        ({"tls_key": "/x"}, "come together"),
        ({"tls_port": 443}, "needs server.domain"),
    ],
)
def test_settings_that_do_not_fit_each_other(server: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerSettings.model_validate(server)


def test_the_port_is_part_of_the_domain_unless_it_is_443_or_given(tmp_path: Path) -> None:
    class At(socket.socket):
        number = 0

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", self.number

    with At() as listener:
        for number, domain, public in (
            (8443, "a.test", "a.test:8443"),
            (443, "a.test", "a.test"),
            (1, "A.b:7", "a.b:7"),
        ):
            listener.number = number
            assert with_public_port(settings_of(tmp_path, domain=domain), listener).server.domain == public


def test_a_public_tls_address_needs_no_leave(tmp_path: Path) -> None:
    check_address(settings_of(tmp_path, tls_host="0.0.0.0"))
    with pytest.raises(ConfigError, match="tls_port"):
        check_address(settings_of(tmp_path, host="0.0.0.0"))


def test_both_ports_serve_and_the_hint_is_enough(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    child, ready = start_child(settings, SANDYARD_SERVER__DOMAIN=DOMAIN, SANDYARD_SERVER__TLS_PORT="0")
    try:
        assert child.stdout is not None
        assert httpx.get(f"{ready.split()[4].rstrip(';')}/health").status_code == 204
        hint = dict(word.split("=") for word in child.stdout.readline().split() if "=" in word)
        assert hint["SSL_CERT_FILE"] == hint["NODE_EXTRA_CA_CERTS"]
        trust = ssl.create_default_context(cafile=hint["SSL_CERT_FILE"])
        with httpx.Client(transport=Everywhere(verify=trust)) as client:
            assert client.get(f"https://api.{hint['E2B_DOMAIN']}/health").status_code == 204
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=20)
        assert (child.returncode, out, err) == (0, "", "")
    finally:
        child.kill()
        child.wait()
