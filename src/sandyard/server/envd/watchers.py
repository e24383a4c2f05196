"""Watching directories: as a stream, or by polling a named watcher."""

from __future__ import annotations


class Watchers:
    """The named watchers of one sandbox."""

    def abort(self) -> None:
        pass
