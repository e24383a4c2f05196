"""Who calls the control plane: an API key, which belongs to a tenant."""

from __future__ import annotations

import hmac
import time

from starlette.types import Scope

from sandyard.config import Settings
from sandyard.errors import Unauthorized
from sandyard.server.tokens import KEY_FILE, hash_key, new_api_key, read_or_make, secrets_dir
from sandyard.store import Store

DEFAULT_TENANT = "default"
CACHE_SECONDS = 30.0  # a key that another process revokes works for so long at most


class Keys:
    """Looks tenants up by key. The first key is made at first start and lies in `secrets/api-key`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._first: tuple[str, str] | None = None
        self._known: dict[str, tuple[float, str]] = {}

    async def open(self, settings: Settings) -> None:
        """Read the key file, made with a fresh key where there is none. Raises `HostError`."""
        key = read_or_make(secrets_dir(settings.paths.state) / KEY_FILE, new_api_key())
        # The file is the truth for this key: whoever replaces it has revoked the old one.
        self._first = (hash_key(key), DEFAULT_TENANT)

    async def issue(self, tenant: str, name: str = "") -> str:
        """Make another key for a tenant; it is shown once and stored as a hash."""
        key = new_api_key()
        await self._store.add_key(hash_key(key), tenant, name)
        return key

    async def revoke(self, key: str) -> None:
        self._known.pop(hash_key(key), None)
        await self._store.drop_key(hash_key(key))

    async def tenant(self, scope: Scope) -> str:
        """The tenant of a request's key. Raises `Unauthorized`."""
        key_hash = hash_key(_presented(scope))
        if self._first is not None and hmac.compare_digest(key_hash, self._first[0]):
            return self._first[1]
        asked_at, tenant = self._known.get(key_hash, (0.0, None))
        if tenant is None or time.monotonic() - asked_at > CACHE_SECONDS:
            tenant = await self._store.tenant_of(key_hash)
            if tenant is None:
                self._known.pop(key_hash, None)
                raise Unauthorized("the API key is not known", remedy="see secrets/api-key in the server's state")
            self._known[key_hash] = (time.monotonic(), tenant)
        return tenant


def _presented(scope: Scope) -> str:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    keys = [value for name, value in headers if name == b"x-api-key"]
    if not keys:
        bearers = [value for name, value in headers if name == b"authorization"]
        keys = [value[7:].strip() for value in bearers if value[:7].lower() == b"bearer "]
    if not keys:
        raise Unauthorized("no API key", remedy="send it as X-API-Key, or set E2B_API_KEY for an SDK")
    if len(keys) > 1:
        raise Unauthorized("more than one API key in the request")
    return keys[0].decode("latin-1")
