"""Users within a build's sandbox, by its files alone: it works on BusyBox and where there is no shell."""

from __future__ import annotations

import re

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest.base import Agent, UserInfo
from sandyard.images.build.base import DEFAULT_USER

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_FILE_LIMIT = 1 << 20


async def find_user(agent: Agent, name: str) -> UserInfo | None:
    try:
        return await agent.user(name)
    except GuestError as error:
        if error.code is not GuestErrorCode.NO_USER:
            raise
        return None


async def ensure_user(agent: Agent, name: str) -> bool:
    """Make the user, with a group and a home of its own, if it is missing; whether it was.

    Raises `ValueError` for a name no user can have."""
    if await find_user(agent, name) is not None:
        return False
    if not _NAME.fullmatch(name):
        raise ValueError(f"invalid username: '{name}'")
    passwd, group = await _lines(agent, "/etc/passwd"), await _lines(agent, "/etc/group")
    taken = {fields[2] for line in (*passwd, *group) if len(fields := line.split(":")) > 2}
    number = next(str(n) for n in range(1000, 60000) if str(n) not in taken)
    gid = next((fields[2] for line in group if (fields := line.split(":"))[0] == name and len(fields) > 2), None)
    if gid is None:
        gid = number
        await _write(agent, "/etc/group", [*group, f"{name}:x:{gid}:"], 0o644)
    shell = "/bin/bash" if await exists(agent, "/bin/bash") else "/bin/sh"
    home = f"/home/{name}"
    await _write(agent, "/etc/passwd", [*passwd, f"{name}:x:{number}:{gid}::{home}:{shell}"], 0o644)
    if await exists(agent, "/etc/shadow"):
        shadow = await _lines(agent, "/etc/shadow")
        if not any(line.startswith(f"{name}:") for line in shadow):
            await _write(agent, "/etc/shadow", [*shadow, f"{name}:!:19000:0:99999:7:::"], 0o640)
    await make_dir(agent, "/home", "0:0")
    await make_dir(agent, home, name)
    return True


async def prepare(agent: Agent) -> bool:
    """What every template has: `user`, a home, sudo without a password where sudo is there. Whether a file changed.

    Root is a user too, in images that have no /etc/passwd at all."""
    changed = False
    if await find_user(agent, "root") is None or not await exists(agent, "/etc/passwd"):
        await make_dir(agent, "/etc", "0:0")
        await agent.write_file("/etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", "0:0", 0o644)
        await agent.write_file("/etc/group", b"root:x:0:\n", "0:0", 0o644)
        changed = True
    changed = await ensure_user(agent, DEFAULT_USER) or changed
    rule = f"/etc/sudoers.d/{DEFAULT_USER}"
    if await _has_sudo(agent) and not await exists(agent, "/etc/sudoers.d/sandyard") and not await exists(agent, rule):
        await agent.write_file(rule, f"{DEFAULT_USER} ALL=(ALL:ALL) NOPASSWD: ALL\n".encode(), "root", 0o440)
        changed = True
    return changed


async def resolve_owner(agent: Agent, owner: str) -> tuple[int, int]:
    """Uid and gid of `user`, `user:group` or numbers. Raises `ValueError` naming what is unknown."""
    name, _, group = owner.partition(":")
    user = await find_user(agent, name)
    if user is None and not name.isdigit():
        raise ValueError(f"invalid username: '{name}'")
    uid, gid = (user.uid, user.gid) if user is not None else (int(name), int(name))
    if group.isdigit():
        return uid, int(group)
    if group and (user is None or group != user.name):
        fields = [line.split(":") for line in await _lines(agent, "/etc/group")]
        found = next((int(f[2]) for f in fields if f[0] == group and len(f) > 2 and f[2].isdigit()), None)
        if found is None:
            raise ValueError(f"invalid group: '{group}'")
        gid = found
    return uid, gid


async def make_dir(agent: Agent, path: str, user: str) -> bool:
    """mkdir -p; whether it was missing. Raises `GuestError`, also where a file is in the way."""
    try:
        await agent.make_dir(path, user)
    except GuestError as error:
        if error.code is not GuestErrorCode.EXISTS or not await is_dir(agent, path):
            raise
        return False
    return True


async def exists(agent: Agent, path: str) -> bool:
    try:
        await agent.stat(path)
    except GuestError as error:
        if error.code not in (GuestErrorCode.NOT_FOUND, GuestErrorCode.NOT_DIRECTORY):
            raise
        return False
    return True


async def is_dir(agent: Agent, path: str) -> bool:
    """Whether the path is a directory or a link to one."""
    try:
        info = await agent.stat(path)
    except GuestError as error:
        if error.code not in (GuestErrorCode.NOT_FOUND, GuestErrorCode.NOT_DIRECTORY):
            raise
        return False
    return "directory" in (info.type, info.target_type)


async def _has_sudo(agent: Agent) -> bool:
    return await is_dir(agent, "/etc/sudoers.d") and await exists(agent, "/usr/bin/sudo")


async def _lines(agent: Agent, path: str) -> list[str]:
    data = b""
    try:
        async for chunk in agent.read_file(path):
            data += chunk
            if len(data) > _FILE_LIMIT:
                raise GuestError(GuestErrorCode.TOO_BIG, f"{path} passes {_FILE_LIMIT} bytes")
    except GuestError as error:
        if error.code is not GuestErrorCode.NOT_FOUND:
            raise
    return data.decode("utf-8", "surrogateescape").splitlines()


async def _write(agent: Agent, path: str, lines: list[str], mode: int) -> None:
    text = "".join(f"{line}\n" for line in lines)
    await agent.write_file(path, text.encode("utf-8", "surrogateescape"), "0:0", mode)
