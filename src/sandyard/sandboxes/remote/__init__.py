"""Snapshots in blob storage: sent there piece by piece, and started from on any node that has the same storage."""

from __future__ import annotations

from sandyard.sandboxes.remote.service import RemoteSnapshots
from sandyard.sandboxes.remote.transfer import Transfer

__all__ = ["RemoteSnapshots", "Transfer"]
