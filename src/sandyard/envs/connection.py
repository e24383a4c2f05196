"""Moved: `sandyard.connection` holds the one rule."""

from sandyard.connection import Connection, resolve_connection

__all__ = ["Connection", "resolve_connection"]
