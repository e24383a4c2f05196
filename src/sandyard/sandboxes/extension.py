"""A service outside that takes part in the life of sandboxes: told before one is used and after one is gone."""

from __future__ import annotations

from typing import Protocol

from sandyard.sandboxes.model import Sandbox


class Extension(Protocol):
    async def started(self, sandbox: Sandbox, *, fresh: bool) -> None:
        """A sandbox was made (`fresh`), or goes on after a pause; its caller does not have it yet.

        Raises `SandboxError`: then the create or the resume fails."""

    def stopped(self, sandbox: Sandbox) -> None:
        """A sandbox was paused or is no more. Does not wait and does not fail."""


class NoExtension:
    """Nobody is told."""

    async def started(self, sandbox: Sandbox, *, fresh: bool) -> None:
        pass

    def stopped(self, sandbox: Sandbox) -> None:
        pass
