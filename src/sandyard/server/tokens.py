"""Secrets of one server: the API key, the seed of sandbox tokens. Files of mode 0600 under `secrets/`."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from sandyard.errors import HostError

KEY_FILE = "api-key"
SEED_FILE = "token-seed"


def secrets_dir(state: Path) -> Path:
    return state / "secrets"


def new_api_key() -> str:
    return f"e2b_{secrets.token_hex(20)}"


def hash_key(key: str) -> str:
    """Keys are random, so a plain hash is enough to keep them out of the database."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_or_make(path: Path, make: str) -> str:
    """The text of a secret file; where there is none, it is made with mode 0600. Raises `HostError`."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_new(path, make)
        return path.read_text().strip()
    except OSError as error:
        raise HostError(f"secret {path}: {error.strerror}", remedy="run as the user that owns paths.state") from error


def _write_new(path: Path, value: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(value + "\n")
    try:
        os.link(temporary, path)  # unlike rename, does not replace what another process made first
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


class SandboxTokens:
    """A sandbox's token is HMAC-SHA256(seed, id): nothing to store, the same after a restart."""

    def __init__(self, seed: str) -> None:
        self._seed = seed.encode()

    def of(self, sandbox_id: str) -> str:
        return hmac.new(self._seed, sandbox_id.encode(), hashlib.sha256).hexdigest()

    def fits(self, sandbox_id: str, token: bytes) -> bool:
        return hmac.compare_digest(self.of(sandbox_id).encode(), token)

    def traffic_of(self, sandbox_id: str) -> str:
        """What opens the ports of a sandbox that are not public; it opens nothing else."""
        return self.of(f"traffic:{sandbox_id}")  # no id has a colon

    def traffic_fits(self, sandbox_id: str, token: bytes) -> bool:
        return hmac.compare_digest(self.traffic_of(sandbox_id).encode(), token)
