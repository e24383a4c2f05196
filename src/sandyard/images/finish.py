"""What a base root file system must have, whatever it came from: user, sudo, names.

Only files are edited and nothing of the tree is run: it may be a stranger's. A symlink where a
plain file or directory belongs is refused, since the edit would land outside.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from sandyard.errors import BadRequest

USER = "user"
COMMANDS = ("bash", "python3", "git", "curl", "sudo", "tput", "ls", "ps")
_PLACES = ("usr/local/bin", "usr/bin", "bin", "usr/sbin", "sbin")


def missing_commands(root: Path, commands: Sequence[str] = COMMANDS) -> list[str]:
    """Which of `commands` the tree lacks."""
    return [name for name in commands if not any(os.path.lexists(root / place / name) for place in _PLACES)]


def finish(root: Path) -> None:
    """Add the user (uid 1000, or the next free), sudo without password, and `python`.

    Raises `BadRequest` where the tree is not one that can be finished safely.
    """
    _directory(root, "etc")
    uid = _add_user(root)
    _add_home(root, uid)
    _directory(root, "etc/sudoers.d")
    _put(root, "etc/sudoers.d/sandyard", f"{USER} ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)
    _put(root, "etc/resolv.conf", "# no network\n", 0o644)
    _put(root, "etc/hostname", "sandbox\n", 0o644)
    _quicken_profile(root)
    if missing_commands(root, ["python"]) and os.path.lexists(root / "usr/bin/python3"):
        _directory(root, "usr/bin")
        os.symlink("python3", root / "usr/bin/python")


def _quicken_profile(root: Path) -> None:
    """Debian's profile starts `id` for what bash knows, and each command runs in a login shell: 2 ms of 4."""
    path = root / "etc/profile"
    if not os.path.lexists(path) or not stat.S_ISREG(path.lstat().st_mode):
        return
    text = _text(root, "etc/profile")
    if "$(id -u)" in text and "EUID" not in text:
        _put(root, "etc/profile", text.replace("$(id -u)", "${EUID:-$(id -u)}"), 0o644)


def _add_user(root: Path) -> int:
    accounts = [line.split(":") for line in _text(root, "etc/passwd").splitlines()]
    for fields in accounts:
        if fields[0] == USER and len(fields) > 2:
            return int(fields[2])
    groups = [line.split(":") for line in _text(root, "etc/group").splitlines()]
    taken = {fields[2] for fields in (*accounts, *groups) if len(fields) > 2}
    uid = next(number for number in range(1000, 60000) if str(number) not in taken)
    _append(root, "etc/group", f"{USER}:x:{uid}:\n")
    _append(root, "etc/passwd", f"{USER}:x:{uid}:{uid}::/home/{USER}:/bin/bash\n")
    if os.path.lexists(root / "etc/shadow"):
        _append(root, "etc/shadow", f"{USER}:!:19000:0:99999:7:::\n")
    return uid


def _add_home(root: Path, uid: int) -> None:
    _directory(root, "home")
    home = root / "home" / USER
    if os.path.lexists(home):
        return
    home.mkdir(mode=0o755)
    skeleton = root / "etc/skel"
    if stat.S_ISDIR(skeleton.lstat().st_mode) if os.path.lexists(skeleton) else False:
        for entry in os.scandir(skeleton):
            if entry.is_file(follow_symlinks=False):
                _put(root, f"home/{USER}/{entry.name}", Path(entry.path).read_text(errors="surrogateescape"), 0o644)
    for path in (home, *home.iterdir()):
        os.chown(path, uid, uid, follow_symlinks=False)


def _directory(root: Path, name: str) -> None:
    """Make `name` a real directory, all the way."""
    at = root
    for part in Path(name).parts:
        at = at / part
        if not os.path.lexists(at):
            at.mkdir(mode=0o755)
        elif not stat.S_ISDIR(at.lstat().st_mode):
            raise BadRequest(f"root file system: /{at.relative_to(root)} is not a directory")


def _text(root: Path, name: str) -> str:
    path = root / name
    if not os.path.lexists(path):
        return ""
    _plain(root, path)
    return path.read_text(errors="surrogateescape")


def _append(root: Path, name: str, text: str) -> None:
    before = _text(root, name)
    if before and not before.endswith("\n"):
        before += "\n"
    path = root / name
    if path.exists():
        path.write_text(before + text, errors="surrogateescape")
    else:
        path.write_text(text)


def _put(root: Path, name: str, text: str, mode: int) -> None:
    """Replace whatever bears the name."""
    path = root / name
    if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
        path.unlink()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w", errors="surrogateescape") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)


def _plain(root: Path, path: Path) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise BadRequest(f"root file system: /{path.relative_to(root)} is not a plain file")
