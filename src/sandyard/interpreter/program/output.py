"""What a kernel says, as the lines that go to the client; bounded, since code may print for ever."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from .kernel import Message

TEXT_LIMIT = 16 << 20  # characters of stdout and stderr of one execution
RESULT_LIMIT = 48 << 20  # characters of all its results
PIECE = 1 << 20  # of text in one line

Item = dict[str, Any]

_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}


class Output:
    """The lines of one execution, from the kernel's messages to a reader that may be slow.

    `put` never waits, so that the kernel is always heard; the limits bound what may lie here."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._text = 0
        self._results = 0
        self._failed = False

    async def next(self) -> bytes | None:
        """The next line with its newline; None when all have been told."""
        return await self._lines.get()

    def heard(self, message: Message) -> None:
        """Take a message from the kernel's IOPub channel."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            self.text(content["name"], content["text"])
        elif kind in ("execute_result", "display_data"):
            self._result(content["data"], main=kind == "execute_result")
        elif kind == "execute_input":
            self._put({"type": "number_of_executions", "execution_count": content["execution_count"]})
        elif kind == "error":
            self.error(content.get("ename"), content.get("evalue"), content.get("traceback") or [])

    def replied(self, content: Message) -> None:
        """Take the kernel's reply: some tell of an error only there."""
        if content.get("status") == "error":
            self.error(content.get("ename"), content.get("evalue"), content.get("traceback") or [])
        elif content.get("status") in ("abort", "aborted"):
            self.error("KeyboardInterrupt", "the execution was interrupted", [])

    def text(self, name: str, text: str) -> None:
        """`name` is `stdout` or `stderr`."""
        if self._text > TEXT_LIMIT:
            return
        self._text += len(text)
        if self._text > TEXT_LIMIT:
            text = text[: len(text) - (self._text - TEXT_LIMIT)]
        for start in range(0, len(text), PIECE):
            self._stream(name, text[start : start + PIECE])
        if self._text > TEXT_LIMIT:
            self._stream("stderr", f"\n[output left out from here on: more than {TEXT_LIMIT >> 20} Mi characters]\n")

    def error(self, name: str | None, value: str | None, traceback: list[str]) -> None:
        """The first one counts."""
        if not self._failed:
            self._failed = True
            told = "\n".join(traceback)[-PIECE:]
            self._put({"type": "error", "name": name or "Error", "value": (value or "")[:PIECE], "traceback": told})

    def alive(self) -> None:
        """A line that says only that the connection is alive: writing it finds out whether it is."""
        self._put({"type": "keepalive"})

    def end(self) -> None:
        self._put({"type": "end_of_execution"})
        self._lines.put_nowait(None)

    def _stream(self, name: str, text: str) -> None:
        self._put({"type": name, "text": text, "timestamp": time.time_ns()})

    def _result(self, data: dict[str, Any], *, main: bool) -> None:
        item: Item = {"type": "result", "is_main_result": main}
        extra = {}
        for kind, value in data.items():
            if kind in _FIELDS:
                item[_FIELDS[kind]] = value
            else:
                extra[kind] = value
        if extra:
            item["extra"] = extra
        if isinstance(text := item.get("text"), str):
            item["text"] = _unquoted(text)
        line = _line(item)
        self._results += len(line)
        if self._results > RESULT_LIMIT:
            self._results -= len(line)
            kinds, size = ", ".join(sorted(data)), len(line) >> 20
            self._stream(
                "stderr", f"[a result of {size} MiB ({kinds}) was left out: more than {RESULT_LIMIT >> 20} MiB]\n"
            )
            return
        self._lines.put_nowait(line)

    def _put(self, item: Item) -> None:
        self._lines.put_nowait(_line(item))


def _line(item: Item) -> bytes:
    try:
        return json.dumps(item, allow_nan=False).encode() + b"\n"
    except ValueError:  # a number that JSON does not have, in a display of the user's own
        return json.dumps(_finite(item), allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))) else value


def _unquoted(text: str) -> str:
    """A string's repr without its quotes, as the SDKs' users know it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
