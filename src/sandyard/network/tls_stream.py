"""TLS to a port inside a sandbox, for programs there that serve nothing else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest.base import PortStream

T = TypeVar("T")

HANDSHAKE_SECONDS = 10.0


def _context() -> ssl.SSLContext:
    """Trusts anything: nobody but the sandbox is on the way, and what it shows is of its own making."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


class TlsStream(PortStream):
    """A stream within another; closing it closes both. Raises `GuestError(IO)` for what is no TLS."""

    def __init__(self, inner: PortStream, server_name: str) -> None:
        self._inner = inner
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context().wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._sending = asyncio.Lock()  # records must not be mixed up

    async def handshake(self) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._drive(self._tls.do_handshake)
        except TimeoutError as error:
            raise GuestError(GuestErrorCode.IO, f"no TLS handshake within {HANDSHAKE_SECONDS:g} s") from error

    async def read(self, limit: int = 65536) -> bytes:
        try:
            return await self._drive(lambda: self._tls.read(limit))
        except ssl.SSLZeroReturnError:
            return b""

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), 65536):
            self._tls.write(data[at : at + 65536])  # a memory buffer takes all of it
            await self._flush()

    async def write_eof(self) -> None:
        """Nothing: TLS as programs speak it has no half-closed state."""

    async def close(self) -> None:
        await self._inner.close()

    async def _drive(self, step: Callable[[], T]) -> T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self._flush()
                data = await self._inner.read()
                if data:
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            except ssl.SSLZeroReturnError:
                raise
            except ssl.SSLError as error:
                raise GuestError(GuestErrorCode.IO, f"TLS: {error.reason or error}") from error
            else:
                await self._flush()
                return result

    async def _flush(self) -> None:
        async with self._sending:
            while data := self._outgoing.read(65536):
                await self._inner.write(data)
