"""A small internet: run in a network namespace, it serves every address there until it is killed.

    python internet.py ZONE CERTIFICATE RESOLVER

ZONE is a JSON object from names to lists of addresses. HTTP on 80 and 8080, TLS on 443, SOCKS5 on 1080, an echo on
7 (also by UDP), DNS on 53 of RESOLVER. Every answer tells the address it came to and the host it was asked for.
"""

from __future__ import annotations

import json
import socketserver
import ssl
import sys
import threading
from ipaddress import IPv4Address

from sandyard.network import dns


class Web(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while line := self.rfile.readline().strip():
            host = ""
            while header := self.rfile.readline().strip():
                name, _, value = header.decode().partition(":")
                host = value.strip() if name.lower() == "host" else host
            body = f"{self.connection.getsockname()[0]} {host} {line.decode()}\n".encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


class Secure(socketserver.BaseRequestHandler):
    context: ssl.SSLContext

    def handle(self) -> None:
        with self.context.wrap_socket(self.request, server_side=True) as secure:
            secure.recv(4096)
            body = f"{secure.getsockname()[0]} hello\n".encode()
            secure.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(65536):
            self.request.sendall(data)


class Names(socketserver.BaseRequestHandler):
    zone: dict[str, list[str]]

    def handle(self) -> None:
        message, peer = self.request
        peer.sendto(self.answer(message), self.client_address)

    def answer(self, message: bytes) -> bytes:
        asked = dns.question(message)
        found = self.zone.get(asked.name)
        if found is None:
            return dns.reply(message, asked, dns.Code.NO_NAME)
        if asked.kind != dns.Kind.A:
            return dns.reply(message, asked, dns.Code.OK)
        if len(found) > 1:  # a name that changes: the first address is for the first who asks
            found[:] = [*found[1:], found[0]]
        head = dns.reply(message, asked, dns.Code.OK)
        record = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + IPv4Address(found[-1]).packed
        return head[:6] + b"\0\1" + head[8:] + record


class NamesByStream(Names):
    def handle(self) -> None:
        size = int.from_bytes(self.request.recv(2))
        answer = self.answer(self.request.recv(size))
        self.request.sendall(len(answer).to_bytes(2) + answer)


class Socks(socketserver.BaseRequestHandler):
    """A SOCKS5 proxy for `me` with `secret`, which tells where it was sent before it passes nothing on."""

    def handle(self) -> None:
        peer = self.request
        methods = peer.recv(peer.recv(2)[1])
        if 2 not in methods:
            peer.sendall(b"\x05\xff")
            return
        peer.sendall(b"\x05\x02")
        peer.recv(1)
        user = peer.recv(peer.recv(1)[0])
        password = peer.recv(peer.recv(1)[0])
        if (user, password) != (b"me", b"secret"):
            peer.sendall(b"\x01\x01")
            return
        peer.sendall(b"\x01\x00")
        kind = peer.recv(4)[3]
        target = peer.recv(peer.recv(1)[0]).decode() if kind == 3 else str(IPv4Address(peer.recv(4)))
        port = int.from_bytes(peer.recv(2))
        peer.sendall(b"\x05\x00\x00\x01" + bytes(6))
        peer.recv(4096)
        body = f"sent to {target} {port}\n".encode()
        peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


class Datagrams(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        data, peer = self.request
        peer.sendto(data, self.client_address)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are what the tests do."""


def main() -> None:
    Names.zone = json.loads(sys.argv[1])
    Secure.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    Secure.context.load_cert_chain(sys.argv[2])
    servers: list[socketserver.BaseServer] = [
        *(Server(("", port), Web) for port in (80, 8080)),
        Server(("", 443), Secure),
        Server(("", 7), Echo),
        Server(("", 1080), Socks),
        Server((sys.argv[3], 53), NamesByStream),
        socketserver.ThreadingUDPServer((sys.argv[3], 53), Names),
        socketserver.ThreadingUDPServer(("", 7), Datagrams),
    ]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
