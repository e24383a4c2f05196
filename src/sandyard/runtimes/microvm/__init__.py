"""The microVM runtime: sandboxes with a kernel of their own, over QEMU."""

from sandyard.runtimes.microvm.runtime import MicroVMRuntime

__all__ = ["MicroVMRuntime"]
