"""How many connections all sandboxes of a server may have open: its descriptors are its own life too."""

from __future__ import annotations

import resource
from dataclasses import dataclass

_EACH = 2  # descriptors: one in the sandbox's namespace, one in the host's


@dataclass(slots=True)
class Budget:
    """Used from one thread."""

    left: int

    @classmethod
    def of_process(cls) -> Budget:
        """Half of the descriptors that this process may have."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = 1 << 20 if soft == resource.RLIM_INFINITY else soft
        return cls(most // 2 // _EACH)

    def take(self) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        return True

    def give(self) -> None:
        self.left += 1
