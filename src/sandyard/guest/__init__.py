"""The agent inside a sandbox: its contract, the link to the real one, and an in-memory twin."""

from __future__ import annotations

from pathlib import Path

from sandyard.errors import HostError
from sandyard.guest.base import (
    Agent,
    Channel,
    ExitStatus,
    FileInfo,
    FileType,
    PortStream,
    Process,
    ProcessSpec,
    PtySize,
    UserInfo,
    Watch,
    WatchEvent,
    WatchEventType,
)
from sandyard.guest.client import LinkAgent, open_agent
from sandyard.guest.memory import MemoryAgent

__all__ = [
    "Agent",
    "Channel",
    "ExitStatus",
    "FileInfo",
    "FileType",
    "LinkAgent",
    "MemoryAgent",
    "PortStream",
    "Process",
    "ProcessSpec",
    "PtySize",
    "UserInfo",
    "Watch",
    "WatchEvent",
    "WatchEventType",
    "agent_binary",
    "open_agent",
]


def agent_binary() -> Path:
    """The static agent that this package was built with. `HostError` where it was not built."""
    path = Path(__file__).parent / "bin" / "sandyard-agent"
    if not path.is_file():
        raise HostError(f"the guest agent is missing at {path}", remedy="run `make setup`")
    return path
