"""The command line: one module per noun, thin over the library."""

from sandyard.cli.app import main

__all__ = ["main"]
