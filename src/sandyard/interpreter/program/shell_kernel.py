"""Starts the Bash kernel without the pauses that are meant for slow terminals. Run as a script."""

from __future__ import annotations

import sys
from typing import Any

import bash_kernel.kernel as kernels
from ipykernel.kernelapp import IPKernelApp


class Prompt(kernels.IREPLWrapper):  # type: ignore[misc]
    """pexpect waits 50 ms before it sends a line; the start alone sends dozens, each command two."""

    def __init__(self, child: Any, *arguments: Any, **options: Any) -> None:
        child.delaybeforesend = None
        super().__init__(child, *arguments, **options)


def main() -> None:
    kernels.IREPLWrapper = Prompt
    app: Any = IPKernelApp
    app.launch_instance(kernel_class=kernels.BashKernel)


if __name__ == "__main__":
    sys.path[0] = ""
    main()
