"""A Dockerfile's text as instructions.

The grammar is BuildKit's, as `e2b_dockerfile_utils` has it; here it is bounded, since the text is a stranger's, and
what nobody supports is refused by name and line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from e2b_dockerfile_utils import (
    DockerfileHeredoc,
    DockerfileInstruction,
    DockerfileSyntaxError,
    chomp_heredoc_content,
    parse_dockerfile_ast,
)

from sandyard.errors import BadRequest

LIMIT = 2 << 20  # characters
MOST = 10_000  # instructions
_DIRECTIVE_LIMIT = 512
_FLAGS = {
    "FROM": {"platform"},
    "COPY": {"from", "chown", "chmod", "link", "exclude"},
    "ADD": {"chown", "chmod", "link", "exclude"},
    "RUN": {"mount", "network"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}
_REPEATED = {"mount", "exclude"}
_SWITCHES = {"link"}


class DockerfileError(BadRequest):
    """What is wrong with a Dockerfile, and the line of it."""

    def __init__(self, line: int, message: str, *, remedy: str | None = None) -> None:
        super().__init__(f"Dockerfile:{line}: {message}", field="dockerfile", remedy=remedy)
        self.line = line


@dataclass(frozen=True, slots=True)
class Heredoc:
    """`expand`: variables in it are the builder's business."""

    name: str
    content: str
    expand: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """`args` as the grammar splits them; `exec_form`: they were given in JSON. `text` is the whole line, joined."""

    name: str
    args: Sequence[str]
    flags: Sequence[tuple[str, str]]
    exec_form: bool
    heredocs: Sequence[Heredoc]
    line: int
    text: str

    def flag(self, name: str) -> str | None:
        return next((value for known, value in self.flags if known == name), None)

    def all_of(self, name: str) -> Sequence[str]:
        return [value for known, value in self.flags if known == name]

    @property
    def title(self) -> str:
        text = " ".join(self.text.split())
        return text if len(text) <= 200 else f"{text[:200]}…"


@dataclass(frozen=True, slots=True)
class Dockerfile:
    instructions: Sequence[Instruction]
    escape: str


def parse(text: str) -> Dockerfile:
    """Raises `DockerfileError` naming the line."""
    if len(text) > LIMIT:
        raise DockerfileError(1, f"{len(text)} characters, more than the {LIMIT} that are read")
    if "\0" in text:
        raise DockerfileError(text[: text.index("\0")].count("\n") + 1, "a NUL character")
    try:
        ast = parse_dockerfile_ast(_bounded_directives(text))
    except DockerfileSyntaxError as error:
        raise DockerfileError(error.line or 1, str(error).partition(": ")[2] or str(error)) from error
    if not ast.instructions:
        raise DockerfileError(1, "no instruction")
    if len(ast.instructions) > MOST:
        raise DockerfileError(ast.instructions[MOST].start_line, f"more than {MOST} instructions")
    return Dockerfile([_instruction(each) for each in ast.instructions], ast.escape_token)


def parse_trigger(text: str, line: int, escape: str) -> Instruction:
    """The instruction that an ONBUILD holds back. Raises `DockerfileError`."""
    try:
        ast = parse_dockerfile_ast(f"# escape={escape}\n{text}")
    except DockerfileSyntaxError as error:
        raise DockerfileError(line, f"ONBUILD: {str(error).partition(': ')[2]}") from error
    if len(ast.instructions) != 1:
        raise DockerfileError(line, "ONBUILD takes one instruction")
    found = ast.instructions[0]
    if found.name in ("ONBUILD", "FROM", "MAINTAINER"):
        raise DockerfileError(line, f"ONBUILD {found.name} is not allowed")
    found.start_line = line
    return _instruction(found)


def pairs(instruction: Instruction) -> Sequence[tuple[str, str]]:
    """Names and values of ENV and LABEL, as they were written."""
    found = list(zip(instruction.args[::3], instruction.args[1::3], strict=True))
    if not found or any(not name for name, _ in found):
        raise DockerfileError(instruction.line, f"{instruction.name} takes names and values")
    return found


def assignments(value: str, line: int, what: str) -> Mapping[str, str]:
    """`type=cache,target=/x` as a mapping; a word alone is "true"."""
    found: dict[str, str] = {}
    for part in value.split(","):
        name, sign, text = part.strip().partition("=")
        if not name:
            raise DockerfileError(line, f"{what}: '{value}' has an empty part")
        found[name.lower()] = text if sign else "true"
    return found


def _bounded_directives(text: str) -> str:
    """Parser directives are looked for with an expression that long lines would keep busy: they hold none."""
    lines = text.removeprefix("\ufeff").split("\n")
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("#"):
            break
        if len(line) > _DIRECTIVE_LIMIT:
            lines[number] = "#"
    return "\n".join(lines)


def _instruction(found: DockerfileInstruction) -> Instruction:
    flags = [_flag(found, flag) for flag in found.flags]
    for name in {name for name, _ in flags} - _REPEATED:
        if sum(known == name for known, _ in flags) > 1:
            raise DockerfileError(found.start_line, f"{found.name}: --{name} is given twice")
    exec_form, args = found.json, list(found.args)
    if found.name in ("RUN", "SHELL") and exec_form and not args:  # of CMD and ENTRYPOINT it takes one away
        raise DockerfileError(found.start_line, f"{found.name} [] names no command")
    return Instruction(
        found.name,
        tuple(args),
        tuple(flags),
        exec_form,
        tuple(_heredoc(each) for each in found.heredocs),
        found.start_line,
        found.original.strip(),
    )


def _flag(found: DockerfileInstruction, flag: str) -> tuple[str, str]:
    name, sign, value = flag.removeprefix("--").partition("=")
    if name not in _FLAGS.get(found.name, set()):
        raise DockerfileError(found.start_line, f"{found.name} --{name} is not supported")
    if not sign and name not in _SWITCHES:
        raise DockerfileError(found.start_line, f"{found.name} --{name} needs a value: --{name}=…")
    return name, value if sign else "true"


def _heredoc(found: DockerfileHeredoc) -> Heredoc:
    content = chomp_heredoc_content(found.content) if found.chomp else found.content
    return Heredoc(found.name, content, found.expand)


def quoted(argv: Sequence[str]) -> str:
    """A command in exec form, for people."""
    return json.dumps(list(argv), ensure_ascii=False)
