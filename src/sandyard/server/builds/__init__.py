"""Template builds of a server: uploaded files, where builds start, the queue that runs them, what they said."""

from __future__ import annotations

from sandyard.server.builds.bases import Credentials, Origin
from sandyard.server.builds.files import FileStore
from sandyard.server.builds.log import BuildLog, LogEntry
from sandyard.server.builds.queue import Builds, Order

__all__ = ["BuildLog", "Builds", "Credentials", "FileStore", "LogEntry", "Order", "Origin"]
