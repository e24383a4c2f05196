"""Starts the Python kernel with what a code interpreter shows beside text. Run as a script."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from traitlets.config import Config


def main() -> None:
    config = Config()
    config.InteractiveShell.colors = "NoColor"
    config.HistoryManager.enabled = False  # nobody asks for it, and it would be a database on disk
    app: Any = IPKernelApp.instance(config=config)
    app.initialize(sys.argv[1:])
    _display().install(app.shell)
    app.start()


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
    main()
