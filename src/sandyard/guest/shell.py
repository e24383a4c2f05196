"""Commands for bash in images that have none."""

from __future__ import annotations

from dataclasses import replace

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest.base import Agent, Process, ProcessSpec

BASH = "/bin/bash"
SH = "/bin/sh"


async def spawn_shell(agent: Agent, spec: ProcessSpec) -> Process:
    """`Agent.spawn`; where `/bin/bash` is asked for and missing, `/bin/sh` gets its arguments.

    Raises what `spawn` raises for what was asked for."""
    try:
        return await agent.spawn(spec)
    except GuestError as error:
        if error.code is not GuestErrorCode.NOT_FOUND or spec.argv[0] != BASH:
            raise
        try:
            return await agent.spawn(replace(spec, argv=[SH, *spec.argv[1:]]))
        except GuestError as other:
            raise (error if other.code is GuestErrorCode.NOT_FOUND else other) from None
