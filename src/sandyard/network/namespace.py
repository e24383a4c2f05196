"""A network namespace for one sandbox, in which every way out is a socket of this server.

Nothing leads outside: `eth0` ends in the namespace itself. What the sandbox sends by TCP, and its
DNS, is redirected to listeners that this server holds in the namespace and whose other half is in
the host's (`egress`); everything else is refused on the spot. So a server that is down, or a rule
that failed, can only mean less access; the host's routing, addresses and firewall stay untouched.

A guest kernel is behind `TAP`, which its runtime makes in the namespace in place of `eth0`: what comes in
there meets the same rules as what a process in the namespace sends.

The sandbox's root has no power over the namespace: it belongs to the host's user namespace.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from threading import Thread
from typing import TypeVar

from sandyard.errors import HostError

CLONE_NEWNET = 0x40000000
MS_NOSUID_NODEV_NOEXEC_RDONLY = 2 | 4 | 8 | 1
MS_BIND = 4096
MNT_DETACH = 2
TOOL_TIMEOUT = 20.0
TOOL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BACKLOG = 256
TAP = "tap0"
MARK = 1  # of datagrams that are diverted; nobody inside can set one

NO_DIVERSION = "table ip sandyard_datagrams\ndelete table ip sandyard_datagrams\n"
NO_ROUTE = f"rule del fwmark {MARK} lookup 100\nroute flush table 100\n"
ROUTE = f"rule add fwmark {MARK} lookup 100\nroute add local 0.0.0.0/0 dev lo table 100\n"

_SYSCTLS = {
    "net/ipv4/ip_unprivileged_port_start": "0",
    "net/ipv6/conf/default/disable_ipv6": "1",  # for eth0, which is made after this; `::1` stays
    # Every connection leaves an entry in host memory behind; these do not outlive it by minutes.
    "net/netfilter/nf_conntrack_tcp_timeout_time_wait": "5",
    "net/netfilter/nf_conntrack_tcp_timeout_close": "5",
    "net/netfilter/nf_conntrack_udp_timeout": "10",
}
_OPTIONAL = "net/ipv6/", "net/netfilter/"

_libc = ctypes.CDLL(None, use_errno=True)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound in the sandbox's namespace, to loopback."""

    tcp: socket.socket
    dns: socket.socket
    dns_tcp: socket.socket

    def close(self) -> None:
        for listener in (self.tcp, self.dns, self.dns_tcp):
            listener.close()


@dataclass(frozen=True, slots=True)
class Plan:
    """How every namespace of this node looks from inside."""

    subnet: IPv4Network
    never: tuple[IPv4Network, ...]

    @property
    def gateway(self) -> str:
        return str(self.subnet[1])

    @property
    def address(self) -> str:
        return str(self.subnet[2])

    def links(self) -> str:
        """For `ip -batch`."""
        return f"""link set lo up
link add eth0 type veth peer name gw0
addr add {self.address}/{self.subnet.prefixlen} dev eth0
link set gw0 up
link set eth0 up
route add default via {self.gateway}
"""

    def rules(self, tcp: int, dns: int, dns_tcp: int) -> str:
        """For `nft -f`: one transaction, whatever was there before."""
        local = f"127.0.0.0/8, {self.address}"
        never = ", ".join(str(block) for block in self.never)
        return f"""table ip sandyard
delete table ip sandyard
table ip sandyard {{
    chain untracked {{
        type filter hook output priority raw; policy accept;
        ip saddr 127.0.0.0/8 ip daddr 127.0.0.0/8 notrack
    }}
    chain out {{
        type nat hook output priority -100; policy accept;
        ip daddr {{ {local} }} return
        udp dport 53 redirect to :{dns}
        tcp dport 53 redirect to :{dns_tcp}
        ip daddr {{ {never} }} return
        meta l4proto tcp redirect to :{tcp}
    }}
    chain rest {{
        type filter hook output priority filter; policy drop;
        ip daddr {{ {local} }} accept
        meta l4proto udp meta mark {MARK} accept
        meta l4proto tcp reject with tcp reset
        reject with icmp type admin-prohibited
    }}
    chain guest_source {{
        type filter hook prerouting priority raw; policy accept;
        iifname "{TAP}" ip saddr != {self.address} drop
    }}
    chain guest_out {{
        type nat hook prerouting priority -100; policy accept;
        iifname != "{TAP}" return
        udp dport 53 dnat to 127.0.0.1:{dns}
        tcp dport 53 dnat to 127.0.0.1:{dns_tcp}
        ip daddr {{ {never} }} return
        meta l4proto tcp dnat to 127.0.0.1:{tcp}
    }}
    chain guest_rest {{
        type filter hook prerouting priority filter; policy accept;
        iifname != "{TAP}" accept
        ct status dnat accept
        meta l4proto udp meta mark {MARK} accept
        meta l4proto tcp reject with tcp reset
        reject with icmp type admin-prohibited
    }}
}}
"""

    def diversion(self, port: int, allowed: tuple[IPv4Network, ...]) -> str:
        """For `nft -f`: datagrams to `allowed` go to a transparent socket."""
        local = f"127.0.0.0/8, {self.address}"
        never = ", ".join(str(block) for block in self.never)
        blocks = ", ".join(str(block) for block in allowed)
        return f"""table ip sandyard_datagrams
delete table ip sandyard_datagrams
table ip sandyard_datagrams {{
    chain out {{
        type route hook output priority mangle; policy accept;
        meta l4proto != udp return
        ip daddr {{ {local} }} return
        ip daddr {{ {never} }} return
        udp dport 53 return
        ip daddr {{ {blocks} }} meta mark set {MARK}
    }}
    chain back {{
        type filter hook prerouting priority mangle; policy accept;
        iif lo meta l4proto udp meta mark {MARK} tproxy to 127.0.0.1:{port}
    }}
    chain guest {{
        type filter hook prerouting priority mangle; policy accept;
        iifname != "{TAP}" return
        ip daddr {{ {never} }} return
        udp dport 53 return
        ip daddr {{ {blocks} }} meta l4proto udp meta mark set {MARK} tproxy to 127.0.0.1:{port}
    }}
}}
"""


async def make(plan: Plan) -> tuple[int, Listeners]:
    """A new namespace, by a descriptor that keeps it, and its listeners. Raises `HostError`."""

    def body() -> tuple[int, Listeners]:
        with ExitStack() as undo:
            _check("unshare", _libc.unshare(CLONE_NEWNET))
            _sysctls()
            _tool(["ip", "-batch", "-"], plan.links())
            listeners = _listen(plan)
            undo.callback(listeners.close)
            descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            undo.pop_all()
            return descriptor, listeners

    return await _alone(body)


async def reopen(descriptor: int, plan: Plan) -> Listeners:
    """New listeners in a namespace whose old ones went with an earlier server. Raises `HostError`.

    Its sandbox may have taken the old ports meanwhile: they are chosen anew."""
    return await inside(descriptor, lambda: _listen(plan))


async def inside(descriptor: int, call: Callable[[], _Result]) -> _Result:
    """Run a blocking call within a namespace. Raises `HostError`, and what the call raises."""

    def body() -> _Result:
        _check("setns", _libc.setns(descriptor, CLONE_NEWNET))
        return call()

    return await _alone(body)


def divert(plan: Plan, port: int, allowed: tuple[IPv4Network, ...]) -> None:
    """Let datagrams to `allowed`, and to nowhere else, come to a transparent socket of this port.
    Call it `inside` the namespace. Raises `HostError`, with all of them denied."""
    _tool(["nft", "-f", "-"], NO_DIVERSION)
    if allowed:
        _tool(["ip", "-force", "-batch", "-"], NO_ROUTE, missing_is_fine=True)
        _tool(["ip", "-batch", "-"], ROUTE)
        _tool(["nft", "-f", "-"], plan.diversion(port, allowed))


def show(descriptor: int, directory: Path) -> None:
    """Give a namespace names that outlive this process: `net` to join it, `sys` to mount, in a new
    directory. Call it `inside` the namespace: the sysfs is of where it is mounted. Raises `HostError`."""
    directory.mkdir(mode=0o711)
    (directory / "net").touch(mode=0o400)
    _mount(f"/proc/self/fd/{descriptor}", directory / "net", None, MS_BIND)
    (directory / "sys").mkdir(mode=0o711)
    _mount("sysfs", directory / "sys", "sysfs", MS_NOSUID_NODEV_NOEXEC_RDONLY)


def hide(directory: Path) -> None:
    """Undo `show`, whatever step it stopped at. Idempotent. Raises `OSError`."""
    for name in ("sys", "net"):
        while _libc.umount2(os.fsencode(directory / name), MNT_DETACH) == 0:
            pass
    with suppress(FileNotFoundError):
        for entry in directory.iterdir():
            entry.rmdir() if entry.is_dir() else entry.unlink()
        directory.rmdir()


def _listen(plan: Plan) -> Listeners:
    with ExitStack() as undo:

        def bound(kind: socket.SocketKind) -> socket.socket:
            made = undo.enter_context(socket.socket(socket.AF_INET, kind))
            made.setblocking(False)
            made.bind(("127.0.0.1", 0))
            if kind is socket.SOCK_STREAM:
                made.listen(BACKLOG)
            return made

        tcp, dns_tcp = bound(socket.SOCK_STREAM), bound(socket.SOCK_STREAM)
        dns = bound(socket.SOCK_DGRAM)
        ports = [listener.getsockname()[1] for listener in (tcp, dns, dns_tcp)]
        _tool(["nft", "-f", "-"], plan.rules(*ports))
        undo.pop_all()
        return Listeners(tcp, dns, dns_tcp)


def _sysctls() -> None:
    for name, value in _SYSCTLS.items():
        try:
            Path("/proc/sys", name).write_text(value)
        except OSError as error:
            if not name.startswith(_OPTIONAL):
                raise HostError(f"sysctl {name}: {error}", remedy="make /proc/sys writable for the server") from error


def _tool(command: list[str], text: str, *, missing_is_fine: bool = False) -> None:
    """Run a program in the namespace of this thread."""
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT,
            env={"PATH": TOOL_PATH, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        package = {"ip": "iproute2", "nft": "nftables"}[command[0]]
        raise HostError(f"network: {command[0]} is missing", remedy=f"install {package}") from None
    except subprocess.TimeoutExpired as error:
        raise HostError(f"network: {command[0]} did not return in {TOOL_TIMEOUT:g} s") from error
    if done.returncode != 0 and not missing_is_fine:
        said = (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[0]
        remedy = "the kernel needs veth and nftables with NAT, or set network.egress = off"
        raise HostError(f"network: {' '.join(command)}: {said}", remedy=remedy)


def _mount(source: str, target: Path, kind: str | None, flags: int) -> None:
    text = kind.encode() if kind else None
    _check(f"mount {target}", _libc.mount(source.encode(), os.fsencode(target), text, flags, None))


def _check(what: str, result: int) -> None:
    if result != 0:
        reason = os.strerror(ctypes.get_errno())
        raise HostError(f"network: {what}: {reason}", remedy="run as root, with namespaces and mounts allowed")


async def _alone(body: Callable[[], _Result]) -> _Result:
    """Run `body` in a thread of its own: it changes the thread's namespace, which ends with it.

    It always runs to its end; a caller that is cancelled meanwhile gets that afterwards, and what
    `body` made is closed."""
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(body())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            outcome.set_exception(error)

    Thread(target=run, name="sandyard-netns", daemon=True).start()
    waiting = asyncio.wrap_future(outcome)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        while not waiting.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((waiting,))
        if waiting.exception() is None:
            _discard(waiting.result())
        raise


def _discard(result: object) -> None:
    for part in result if isinstance(result, Iterable) else (result,):
        if isinstance(part, Listeners | socket.socket):
            part.close()
        elif isinstance(part, int):
            os.close(part)
