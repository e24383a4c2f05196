"""Slots: each sandbox with a network has one, a namespace and the policy of its way out.

A slot is named by its sandbox's id in a directory of this node, so that a later server finds it:
`adopt` takes it over, `drop` and `sweep` remove it. Spares, made ahead, have no name and go with
the process.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from sandyard.config import Settings
from sandyard.errors import HostError, NotFound, SandboxError, SandyardError
from sandyard.network import namespace
from sandyard.network.budget import Budget
from sandyard.network.datagrams import Datagrams
from sandyard.network.egress import Egress
from sandyard.network.engine import Engine
from sandyard.network.forwarder import Forwarder
from sandyard.network.namespace import Listeners, Plan
from sandyard.network.outside import Outside, is_local
from sandyard.network.policy import CLOSED, Policy, never_allowed
from sandyard.network.resolver import Resolver
from sandyard.network.voice import Voice
from sandyard.runtimes.container.layout import Layout

log = structlog.get_logger("sandyard.network")

MADE_AT_ONCE = 8  # mostly waiting for the kernel
RETRY_SECONDS = 5.0
OUTSIDE = "1.1.1.1"  # any public address: the trial never leaves the namespace
KERNEL = "the kernel needs nftables with NAT, or set network.egress = off"


@dataclass(frozen=True, slots=True)
class Slot:
    """`path` is the namespace to join; beside it lie `sys`, its sysfs, and `resolv.conf`."""

    sandbox_id: str
    path: Path


@dataclass(slots=True, eq=False)
class _Held:
    slot: Slot
    descriptor: int
    listeners: Listeners
    egress: Egress
    forwarder: Forwarder
    datagrams: Datagrams


class Slots:
    """One per server, on one event loop. Needs root, `ip` and `nft`."""

    def __init__(self, settings: Settings, *, resolver: Resolver | None = None) -> None:
        network = settings.network
        never = never_allowed(network)
        self._settings = network
        self._layout = Layout(settings.paths.run.absolute(), settings.paths.state.absolute())
        self._plan = Plan(network.subnet, never)
        self._outside = Outside(never)
        self._budget = Budget.of_process()
        self._resolver = resolver or Resolver([str(server) for server in network.resolvers])
        self._engine: Engine | None = None
        self._held: dict[str, _Held] = {}
        self._spares: deque[tuple[int, Listeners]] = deque()
        self._making = asyncio.Semaphore(MADE_AT_ONCE)
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def directory(self) -> Path:
        """Where slots have their names. Every sandbox's root, nobody on the host, must get there.

        Raises `HostError`."""
        self._layout.prepare()
        mark = hashlib.sha256(str(self._layout.run).encode()).hexdigest()[:8]
        return self._layout.mounts() / f"netns-{mark}"

    def ids(self) -> Sequence[str]:
        """Sandboxes with a slot, also those of an earlier server."""
        with suppress(FileNotFoundError):
            return sorted(entry.name for entry in self.directory.iterdir())
        return []

    def holds(self, sandbox_id: str) -> bool:
        return sandbox_id in self._held

    def start(self) -> None:
        """Begin to make spares. Idempotent."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="network-spares")

    async def probe(self) -> str:
        """What holds, found out in a namespace made for it. Raises `HostError`."""
        if is_local(IPv4Address(OUTSIDE)):
            message = "network: the host takes every address for its own, so every connection would be refused"
            raise HostError(message, remedy="sysctl -w net.ipv4.ip_nonlocal_bind=0")
        descriptor, listeners = await namespace.make(self._plan)
        try:
            return await namespace.inside(descriptor, lambda: _try_out(self._plan, listeners))
        finally:
            _discard(descriptor, listeners)

    async def take(self, sandbox_id: str, policy: Policy = CLOSED) -> Slot:
        """A slot for a new sandbox. Raises `HostError`, with nothing left behind."""
        async with self._lock(sandbox_id):
            if sandbox_id in self._held:
                raise SandboxError(f"sandbox {sandbox_id} has a network slot already")
            home = self.directory / sandbox_id
            home.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
            descriptor, listeners = await self._made()
            try:
                await namespace.inside(descriptor, lambda: self._name(descriptor, home))
                return await self._hold(sandbox_id, descriptor, listeners, policy)
            except BaseException:
                await self._let_go(sandbox_id, descriptor, listeners)
                namespace.hide(home)
                raise

    async def adopt(self, sandbox_id: str, policy: Policy = CLOSED) -> Slot | None:
        """The slot of a sandbox that an earlier server made; None if it has none. One that is held
        already stays as it is. Raises `HostError`."""
        async with self._lock(sandbox_id):
            held = self._held.get(sandbox_id)
            if held is not None:
                return held.slot
            path = self.directory / sandbox_id / "net"
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                listeners = await namespace.reopen(descriptor, self._plan)
            except BaseException:
                os.close(descriptor)
                raise
            try:
                return await self._hold(sandbox_id, descriptor, listeners, policy)
            except BaseException:
                await self._let_go(sandbox_id, descriptor, listeners)
                raise

    async def replace(self, sandbox_id: str, policy: Policy) -> None:
        """Change the policy at once; connections that it does not allow are cut. Raises `NotFound`."""
        held = self._held.get(sandbox_id)
        if held is None:
            raise NotFound(f"sandbox {sandbox_id} has no network")
        await self._running().call(_replace(held, policy))

    async def drop(self, sandbox_id: str) -> None:
        """Cut a sandbox off and remove its slot. Idempotent. Raises `SandboxError` naming what stays."""
        async with self._lock(sandbox_id):
            held = self._held.pop(sandbox_id, None)
            if held is not None:
                await self._running().call(_close(held))
                os.close(held.descriptor)
            try:
                await asyncio.to_thread(namespace.hide, self.directory / sandbox_id)
            except OSError as error:
                raise SandboxError(f"network slot of sandbox {sandbox_id} does not go: {error}") from error

    async def sweep(self, keep: Collection[str]) -> None:
        """Remove every slot but these, whoever of this node's servers made it."""
        for sandbox_id in self.ids():
            if sandbox_id not in keep:
                await self.drop(sandbox_id)

    async def stop(self) -> None:
        """Close what this process holds. Named slots stay, cut off, for `adopt`. Idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper
        while self._spares:
            _discard(*self._spares.popleft())
        for sandbox_id in [*self._held]:
            held = self._held.pop(sandbox_id)
            await self._running().call(_close(held))
            os.close(held.descriptor)
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()
        with suppress(OSError):  # somebody's slot is in it
            self.directory.rmdir()

    def counts(self) -> dict[str, int]:
        """For metrics: slots, spares, open connections and refused ones of the sandboxes that live."""
        ways = [held.egress for held in list(self._held.values())]  # another thread adds to it
        return {
            "slots": len(ways),
            "spares": len(self._spares),
            "connections": sum(way.open_connections for way in ways),
            "refused": sum(way.refused for way in ways),
        }

    def _lock(self, sandbox_id: str) -> asyncio.Lock:
        return self._busy.setdefault(sandbox_id, asyncio.Lock())

    def _running(self) -> Engine:
        if self._engine is None:
            self._engine = Engine()
        return self._engine

    def _name(self, descriptor: int, home: Path) -> None:
        namespace.hide(home)  # a boot that a crash cut short may have left one
        namespace.show(descriptor, home)
        (home / "resolv.conf").write_text(f"nameserver {self._plan.gateway}\n")

    async def _made(self) -> tuple[int, Listeners]:
        self._wake.set()
        if self._spares:
            return self._spares.popleft()
        async with self._making:
            return await namespace.make(self._plan)

    async def _hold(self, sandbox_id: str, descriptor: int, listeners: Listeners, policy: Policy) -> Slot:
        slot = Slot(sandbox_id, self.directory / sandbox_id / "net")
        await self._running().call(self._open(slot, descriptor, listeners, policy))
        return slot

    async def _open(self, slot: Slot, descriptor: int, listeners: Listeners, policy: Policy) -> None:
        voice, outside, resolver = Voice(slot.sandbox_id), self._outside, self._resolver
        egress = Egress(voice, listeners.tcp, outside, resolver, self._budget, self._settings.max_connections)
        forwarder = Forwarder(voice, listeners.dns, listeners.dns_tcp, outside, resolver)
        # Here, not by who awaits this: that one may be cancelled, and has to find what to close.
        datagrams = Datagrams(voice, descriptor, self._plan, outside, self._budget)
        held = self._held[slot.sandbox_id] = _Held(slot, descriptor, listeners, egress, forwarder, datagrams)
        await _replace(held, policy)

    async def _let_go(self, sandbox_id: str, descriptor: int, listeners: Listeners) -> None:
        held = self._held.pop(sandbox_id, None)
        if held is not None:
            await self._running().call(_close(held))
        _discard(descriptor, listeners)

    async def _keep(self) -> None:
        while True:
            try:
                while len(self._spares) < self._settings.spare:
                    async with self._making:
                        self._spares.append(await namespace.make(self._plan))
            except SandyardError as error:
                log.warning("network namespace could not be made ahead", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._wake.clear()
            await self._wake.wait()


async def _replace(held: _Held, policy: Policy) -> None:
    held.forwarder.policy = policy
    held.egress.replace(policy)
    await held.datagrams.replace(policy)


async def _close(held: _Held) -> None:
    await held.egress.close()
    await held.forwarder.close()
    await held.datagrams.close()
    held.listeners.close()


def _discard(descriptor: int, listeners: Listeners) -> None:
    listeners.close()
    os.close(descriptor)


def _try_out(plan: Plan, listeners: Listeners) -> str:
    never = str(plan.never[0][1])
    with socket.socket() as client:
        client.settimeout(2)
        try:
            client.connect((OUTSIDE, 443))
            listeners.tcp.accept()[0].close()
        except OSError as error:
            raise HostError(f"network: a connection is not redirected: {error}", remedy=KERNEL) from error
    with socket.socket() as client:
        client.settimeout(2)
        if client.connect_ex((never, 443)) != errno.ECONNREFUSED:
            raise HostError(f"network: a connection to {never} is not refused", remedy=KERNEL)
    return "connections are redirected, private ranges refused"
