"""The languages there are: how each one's kernel is started, and how it is told environment variables."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_HERE = Path(__file__).parent
_BINARIES = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Language:
    """`argv` starts the kernel with a connection file. `enter` is code that sets variables and keeps what
    was there, `leave` puts that back; without a `leave` the next `enter` begins anew. Both are run where
    the user does not see them. `interrupt` is how what runs is asked to end, `sockets` what the kernel can
    listen on, and `late` is true for one that may say that it is idle before it has said everything."""

    name: str
    argv: Callable[[str], Sequence[str]]
    enter: Callable[[Mapping[str, str]], str]
    leave: str
    interrupt: Literal["signal", "message"] = "signal"
    sockets: Literal["ipc", "tcp"] = "ipc"
    late: bool = False


class UnknownLanguage(ValueError):
    """There is no kernel for this language here; the message names those there are."""


def find(name: str | None) -> Language:
    """The language called `name` (None: Python). Raises `UnknownLanguage`."""
    wanted = (name or "python").strip().lower()
    language = _LANGUAGES.get(_SHORT.get(wanted, wanted))
    if language is None or (language is _LANGUAGES["javascript"] and _deno() is None):
        raise UnknownLanguage(f"no kernel for language {name!r}; there are: {', '.join(available())}")
    return language


def normal(name: str | None) -> str:
    """The one name of a language that has several. Raises `UnknownLanguage`."""
    wanted = (name or "python").strip().lower()
    find(wanted)
    return _SHORT.get(wanted, wanted)


def available() -> list[str]:
    return [name for name, language in _LANGUAGES.items() if language.name != "javascript" or _deno() is not None]


def _python_argv(connection: str) -> Sequence[str]:
    return [sys.executable, str(_HERE / "launch_kernel.py"), "python", "-f", connection]


def _bash_argv(connection: str) -> Sequence[str]:
    return [sys.executable, str(_HERE / "launch_kernel.py"), "bash", "-f", connection]


def _deno_argv(connection: str) -> Sequence[str]:
    return [_deno() or "deno", "jupyter", "--kernel", "--conn", connection]


def _deno() -> str | None:
    beside = _BINARIES / "deno"
    return str(beside) if beside.exists() else shutil.which("deno")


def _python_enter(variables: Mapping[str, str]) -> str:
    return (
        "(lambda o, s, v: (s.modules.__setitem__('_sandyard_env', {k: o.environ.get(k) for k in v}), "
        f"o.environ.update(v), None)[2])(__import__('os'), __import__('sys'), {dict(variables)!r})"
    )


_PYTHON_LEAVE = (
    "(lambda o, s: [o.environ.pop(k, None) if v is None else o.environ.__setitem__(k, v) for k, v in "
    "s.modules.pop('_sandyard_env', {}).items()] and None or None)(__import__('os'), __import__('sys'))"
)


def _bash_enter(variables: Mapping[str, str]) -> str:
    lines = ["__sandyard_env=()"]
    for key, value in variables.items():
        lines.append(f'__sandyard_env+=({key} "${{{key}+set}}" "${{{key}-}}"); export {key}={shlex.quote(value)}')
    return "\n".join(lines)


_BASH_LEAVE = (
    "for ((__i=0; __i<${#__sandyard_env[@]}; __i+=3)); do "
    'if [ "${__sandyard_env[__i+1]}" ]; then export "${__sandyard_env[__i]}=${__sandyard_env[__i+2]}"; '
    'else unset "${__sandyard_env[__i]}"; fi; done; unset __sandyard_env __i'
)


def _javascript_enter(variables: Mapping[str, str]) -> str:
    return (
        f"{{ const v = {json.dumps(dict(variables))}; globalThis[Symbol.for('sandyard.env')] = "
        "Object.keys(v).map((k) => [k, process.env[k]]); Object.assign(process.env, v); }"
    )


_JAVASCRIPT_LEAVE = (
    "{ const kept = globalThis[Symbol.for('sandyard.env')] ?? []; delete globalThis[Symbol.for('sandyard.env')]; "
    "for (const [k, v] of kept) { if (v === undefined) delete process.env[k]; else process.env[k] = v; } }"
)

_SHORT = {"js": "javascript", "ts": "typescript", "sh": "bash", "py": "python", "python3": "python"}
_PYTHON = Language("python", _python_argv, _python_enter, _PYTHON_LEAVE)
_BASH = Language("bash", _bash_argv, _bash_enter, _BASH_LEAVE)
_JAVASCRIPT = Language(
    "javascript", _deno_argv, _javascript_enter, _JAVASCRIPT_LEAVE, interrupt="message", sockets="tcp", late=True
)
# Deno runs TypeScript, of which JavaScript is a part.
_LANGUAGES = {"python": _PYTHON, "bash": _BASH, "javascript": _JAVASCRIPT, "typescript": _JAVASCRIPT}
