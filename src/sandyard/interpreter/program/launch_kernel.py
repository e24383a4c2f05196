"""Starts the Python or the Bash kernel: `launch_kernel.py python|bash -f CONNECTION_FILE`. Run as a script."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from traitlets.config import Config

MESSAGES = 100_000  # that wait for the server; beyond the 1,000 that ZeroMQ keeps by itself it drops them


class App(IPKernelApp):
    """An application whose output waits to be heard where it would be lost."""

    def init_iopub(self, context: Any) -> None:
        context.sndhwm = MESSAGES  # for the sockets made from here on
        super().init_iopub(context)  # type: ignore[no-untyped-call]


def python(arguments: list[str]) -> None:
    """IPython, with what a code interpreter shows beside text."""
    config = Config()
    config.InteractiveShell.colors = "NoColor"
    config.HistoryManager.enabled = False  # nobody asks for it, and it would be a database on disk
    app: Any = App.instance(config=config)
    app.initialize(arguments)
    _display().install(app.shell)
    app.start()


def bash(arguments: list[str]) -> None:
    """Bash, without the pauses that are meant for slow terminals."""
    import bash_kernel.kernel as kernels

    class Prompt(kernels.IREPLWrapper):  # type: ignore[misc]
        """pexpect waits 50 ms before it sends a line; the start alone sends dozens, each command two.

        The terminal adds no carriage returns: one that arrives without its line feed counts as a line's end."""

        def __init__(self, child: Any, *arguments: Any, extra_init_cmd: str, **options: Any) -> None:
            child.delaybeforesend = None
            super().__init__(child, *arguments, extra_init_cmd=f"{extra_init_cmd}; stty -onlcr", **options)

    kernels.IREPLWrapper = Prompt
    app: Any = App
    app.launch_instance(arguments, kernel_class=kernels.BashKernel)


def _display() -> Any:
    """The module beside this one. The path of modules is the user's alone."""
    spec = importlib.util.spec_from_file_location("_sandyard_display", Path(__file__).with_name("display.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    # A script's directory comes first on the path; for the user that place is the working directory.
    sys.path[0] = ""
    {"python": python, "bash": bash}[sys.argv[1]](sys.argv[2:])
