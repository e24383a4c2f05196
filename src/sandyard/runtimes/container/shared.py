"""What all sandboxes take from the host's root user, because the kernel charges user namespaces to their maker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import structlog

log = structlog.get_logger("sandyard.container")

# By sandbox, and what a host needs so that a thousand sandboxes at their limit leave it enough.
INOTIFY_INSTANCES = 128  # what Linux gives a user
INOTIFY_WATCHES = 65536
_NEEDED = {"max_user_instances": 1 << 17, "max_user_watches": 1 << 26}


def raise_host_limits(
    directory: Path = Path("/proc/sys/fs/inotify"), needed: Mapping[str, int] = _NEEDED
) -> Mapping[str, int]:
    """Raise, never lower, the host's limits; what they are afterwards. Each object is charged to its sandbox's memory.

    A host that does not let us (a container with a read-only /proc/sys) keeps its own, with a warning."""
    limits: dict[str, int] = {}
    for name, wanted in needed.items():
        path = directory / name
        try:
            limits[name] = int(path.read_text())
            if limits[name] < wanted:
                path.write_text(str(wanted))
                limits[name] = wanted
        except OSError as error:
            log.warning("sandboxes share the host's inotify limit", file=str(path), error=str(error))
    return limits
