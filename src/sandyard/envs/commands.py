"""Command templates: `cd /workspace && pytest {test_file} -x -q`, filled with shell-quoted arguments."""

from __future__ import annotations

import json
import re
import shlex
import string
from collections.abc import Mapping
from typing import Any

from sandyard.envs.base import ToolSpec
from sandyard.errors import BadRequest

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


class CommandTemplate:
    """A shell command with `{argument}` places; `{{` and `}}` are braces.

    A place always becomes exactly one shell word. Therefore one that stands inside quotes or a
    comment, or behind a backslash, where quoting would mean something else, is refused. So is
    an argument whose place the tool's schema does not know or does not require.
    """

    def __init__(self, template: str, spec: ToolSpec) -> None:
        self.template = template
        try:
            self._parts = [(literal, field) for literal, field, _, _ in _parse(template)]
        except ValueError as error:
            raise BadRequest(f"command of tool {spec.name}: {error}", field="command") from error
        self._check_names(spec)
        self._check_places(spec)

    def fill(self, arguments: Mapping[str, Any]) -> str:
        """The command for these arguments. Texts as they are, everything else as JSON."""
        pieces = []
        for literal, name in self._parts:
            pieces.append(literal)
            if name is not None:
                value = arguments[name]
                pieces.append(shlex.quote(value if isinstance(value, str) else json.dumps(value)))
        return "".join(pieces)

    def _check_names(self, spec: ToolSpec) -> None:
        required = set(spec.parameters.get("required", ()))
        for _, name in self._parts:
            if name is not None and not _NAME.match(name):
                raise BadRequest(f"command of tool {spec.name}: {{{name}}} is not an argument's name", field="command")
            if name is not None and name not in required:
                raise BadRequest(
                    f"command of tool {spec.name}: {{{name}}} is not a required argument of its schema", field="command"
                )

    def _check_places(self, spec: ToolSpec) -> None:
        if "$'" in self.template or '$"' in self.template:
            raise BadRequest(f"command of tool {spec.name}: $'…' and $\"…\" are not allowed", field="command")
        before = ""
        for literal, name in self._parts:
            before += literal
            if name is None:
                continue
            state = _shell_state(before)
            if state:
                raise BadRequest(
                    f"command of tool {spec.name}: {{{name}}} stands {state}",
                    field="command",
                    remedy="leave the quoting to the tool",
                )
            before += "x"


def _parse(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    parts = list(string.Formatter().parse(template))
    for _, field, format_spec, conversion in parts:
        if format_spec or conversion:
            raise ValueError(f"{{{field}}} may not have a format")
    return parts


def _shell_state(before: str) -> str:
    """Where in the shell's grammar the end of `before` is: '' for plain text."""
    quote, index, word_start = "", 0, True
    while index < len(before):
        char = before[index]
        if char == "\\" and quote != "'":
            if index + 1 == len(before):
                return "behind a backslash"
            index += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char == "#" and word_start:
            end = before.find("\n", index)
            if end < 0:
                return "in a comment"
            index = end
        elif before.startswith("<<", index) and not before.startswith("<<<", index):
            return "behind a here-document"
        word_start = char in " \t\n;&|()"
        index += 1
    return f"inside {quote} quotes" if quote else ""
