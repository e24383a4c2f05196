"""`make compat`: what people's code speaks, driven against a server of this tree, as a table of numbers.

The suites and clients are not ours and nothing of them is kept here: the official SDK's own tests come
from a checkout (`CHECKOUT=`), released SDKs and Harbor from their registries, into `.cache/compat`.
Each part runs against a server of its own, with directories of its own. Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sandyard.errors import SandyardError
from tests.compat import clients, harbor, js_sdk, openenv_parts, python_sdk, twinkle_parts
from tests.compat.report import Row, console, say, show
from tests.compat.workshop import ROOT, PartFailed, Workshop

PARTS: Mapping[str, Callable[[Workshop], list[Row]]] = {
    "python": python_sdk.run,
    "microvm": python_sdk.run_over_guests,
    "js": js_sdk.run,
    "clients": clients.run,
    "interpreter": clients.run_interpreter,
    "harbor": harbor.run,
    "openenv": openenv_parts.run,
    "twinkle": twinkle_parts.run,
}


def main() -> int:
    options = _options()
    shop = Workshop(
        cache=ROOT / ".cache" / "compat", checkout=options.checkout, checks=options.checks, internet=options.internet
    )
    rows: list[Row] = []
    failures: list[str] = []
    for part in options.parts:
        say(f"== {part}")
        try:
            rows += PARTS[part](shop)
        except (PartFailed, SandyardError) as error:
            failures.append(f"{part}: {error}")
            console.print(f"{part}: {error}", style="red", markup=False)
    show(rows)
    for failure in failures:
        console.print(f"did not run: {failure}", style="red", markup=False)
    return int(bool(failures) or not all(row.kept for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("--checkout", type=_path, help="checkout of the official SDK's repository")
    parser.add_argument("--checks", type=_path, help="a folder with e2b_smoke.py, a further check of the Python SDK")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--internet", action="store_true", help="run the tests that reach public addresses, too")
    return parser.parse_args()


def _path(text: str) -> Path:
    return Path(text).resolve()


def _parts(text: str) -> list[str]:
    chosen = [word for word in text.split(",") if word]
    unknown = set(chosen) - set(PARTS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return chosen or list(PARTS)


if __name__ == "__main__":
    sys.exit(main())
