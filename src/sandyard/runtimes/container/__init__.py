"""Sandboxes over an OCI engine. Start reading at `runtime`."""

from sandyard.runtimes.container.runtime import ContainerRuntime

__all__ = ["ContainerRuntime"]
