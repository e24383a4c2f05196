"""How sandboxes are isolated: the contract (`base`), its implementations, and `open_runtime`."""

from __future__ import annotations

from sandyard.config import Settings
from sandyard.runtimes.base import Runtime


def open_runtime(settings: Settings) -> Runtime:
    """The runtime that `settings.sandbox.runtime` names. Nothing is started; call on the event loop."""
    if settings.sandbox.runtime == "memory":
        from sandyard.runtimes.memory import MemoryRuntime

        return MemoryRuntime()
    if settings.sandbox.runtime == "microvm":
        from sandyard.runtimes.microvm import MicroVMRuntime

        return MicroVMRuntime(settings)
    from sandyard.runtimes.container import ContainerRuntime

    return ContainerRuntime(settings)


__all__ = ["open_runtime"]
