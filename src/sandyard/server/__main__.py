"""`python -m sandyard.server`: serve with the settings of this machine.

With `--embedded`, settings come as one line of JSON on stdin, the ready line goes to stdout as JSON,
and the end of stdin (the parent is gone, or wants it so) stops the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from sandyard.config import Settings, load_settings
from sandyard.errors import SandyardError
from sandyard.server.serve import run_server

PARENT_SECONDS = 2.0


def main(arguments: list[str]) -> int:
    try:
        if arguments == ["--embedded"]:
            settings = Settings.model_validate_json(sys.stdin.buffer.readline())
            run_server(settings, on_ready=_tell_parent, watch_stop=_stop_at_end_of_stdin)
        else:
            run_server(load_settings())
    except SandyardError as error:
        print(f"sandyard: {error}", file=sys.stderr)
        return 1
    return 0


def _tell_parent(url: str, key_file: Path) -> None:
    print(json.dumps({"url": url, "key_file": str(key_file), "pid": os.getpid()}), flush=True)


def _stop_at_end_of_stdin(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop()

    loop.add_reader(descriptor, readable)
    _watch_parent(os.getppid(), stop)


def _watch_parent(parent: int, stop: Callable[[], None]) -> None:
    # A worker that the parent forked may hold the pipe open long after the parent is gone.
    if os.getppid() != parent:
        stop()
    else:
        asyncio.get_running_loop().call_later(PARENT_SECONDS, _watch_parent, parent, stop)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
