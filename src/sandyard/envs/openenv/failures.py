"""What goes wrong between a client and an OpenEnv server. All of it is infrastructure: never a reward."""

from __future__ import annotations

from sandyard.errors import SandboxError


class SessionLost(SandboxError, ConnectionError):
    """The session is gone, and the episode with it. `reset` begins another; nothing else does."""

    def __init__(self, message: str) -> None:
        super().__init__(message, remedy="reset begins a new episode in a new session")


class ServerFault(SandboxError):
    """The server answered with an error that was not the caller's; `code` is the protocol's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the OpenEnv server answered {code}: {message}")
        self.code = code
