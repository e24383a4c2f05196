"""Variables in the values of ENV and ARG, in paths and in user names."""

from __future__ import annotations

import re
from collections.abc import Mapping

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLE = re.compile(
    r"\\(?P<escaped>[$\\])|\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?::(?P<how>[-+])(?P<word>[^}]*))?\})"
)


def expand(text: str, env: Mapping[str, str]) -> str:
    """`$NAME`, `${NAME}`, `${NAME:-word}` and `${NAME:+word}`; a backslash keeps a dollar. What is not set is empty,
    except PATH, which every process has."""
    known = {"PATH": DEFAULT_PATH, **env}

    def value(match: re.Match[str]) -> str:
        if (escaped := match["escaped"]) is not None:
            return escaped
        found = known.get(match["plain"] or match["name"], "")
        if match["how"] == "-":
            return found or match["word"]
        if match["how"] == "+":
            return match["word"] if found else ""
        return found

    return _VARIABLE.sub(value, text)
