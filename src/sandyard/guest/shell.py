"""Commands for bash in images that have none."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest.base import Agent, Process, ProcessSpec

BASH = "/bin/bash"
SH = "/bin/sh"
_PLAIN = re.compile(r"(?:[\w@%+:,./-][\w@%+:,./=-]*|'[^']*'|\s)+")  # words, some in single quotes


async def spawn_shell(agent: Agent, spec: ProcessSpec) -> Process:
    """`Agent.spawn`; where `/bin/bash` is asked for and missing, `/bin/sh` gets its arguments. Where that is missing
    too, a command of plain words runs without a shell.

    Raises what `spawn` raises for what was asked for."""
    try:
        return await agent.spawn(spec)
    except GuestError as error:
        if error.code is not GuestErrorCode.NOT_FOUND or spec.argv[0] != BASH:
            raise
        others = [[SH, *spec.argv[1:]], *([words] if (words := plain_words(spec.argv)) else [])]
        for argv in others:
            try:
                return await agent.spawn(replace(spec, argv=argv))
            except GuestError as other:
                if other.code is not GuestErrorCode.NOT_FOUND:
                    raise
        raise


def plain_words(argv: Sequence[str]) -> list[str]:
    """The words of a shell's `-c` command that asks nothing of a shell; empty for any other."""
    if len(argv) < 3 or argv[-2] != "-c" or not _PLAIN.fullmatch(argv[-1]):
        return []
    return shlex.split(argv[-1])
