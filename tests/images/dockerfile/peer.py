"""`buildah` as a peer: the same Dockerfiles built by it, in a storage of its own, without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

APPLETS = (
    *("sh", "ls", "cat", "stat", "id", "mkdir", "chmod", "chown", "echo", "ln", "rm", "mv", "cp", "touch", "true"),
    *("false", "pwd", "yes", "mkfifo", "tar", "sleep", "env", "test", "wc", "grep", "find"),
)
PASSWD = "root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1:daemon:/usr/sbin:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"
GROUP = "root:x:0:\ndaemon:x:1:\nnogroup:x:65534:\n"


def have_buildah() -> bool:
    return shutil.which("buildah") is not None and shutil.which("busybox") is not None


def make_busybox(root: Path) -> Path:
    """A root file system of BusyBox, with accounts and what every sandbox has anyway."""
    for folder in ("bin", "etc", "home", "root", "usr/sbin", "var"):
        (root / folder).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text(PASSWD)
    (root / "etc/group").write_text(GROUP)
    for name in ("etc/passwd", "etc/group"):
        (root / name).chmod(0o644)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    root.chmod(0o755)
    return root


def make_bash(root: Path) -> Path:
    """The same with this host's bash, and the libraries that it needs."""
    make_busybox(root)
    bash = Path(shutil.which("bash") or "").resolve()
    said = subprocess.run(["ldd", str(bash)], capture_output=True, text=True, check=True).stdout
    for path in [bash, *(Path(word) for word in said.split() if word.startswith("/"))]:
        target = root / "bin/bash" if path == bash else root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        target.chmod(0o755)
    return root


@dataclass(frozen=True)
class Made:
    """An image as buildah made it: the tar of its files, and its configuration."""

    files: bytes
    config: Mapping[str, Any]


class Buildah:
    """`home`: a directory of its own, removed by whoever made it."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._common = ["--root", str(home / "root"), "--runroot", str(home / "run"), "--storage-driver", "vfs"]
        self._policy = home / "policy.json"
        self._policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        self._registries = home / "registries.conf"
        self._registries.write_text('unqualified-search-registries = ["localhost"]\n')

    def add_base(self, name: str, root: Path) -> None:
        archive = self._home / f"{name}.tar"
        packing = ["tar", "-C", str(root), "--numeric-owner", "--owner=0", "--group=0", "-cf", str(archive), "."]
        subprocess.run(packing, check=True)
        container = self._call("from", "scratch").strip()
        self._call("add", container, str(archive), "/")
        self._call("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        self._call("commit", "--rm", container, f"localhost/{name}")
        archive.unlink()

    def build(self, context: Path, *options: str) -> Made:
        """Raises `subprocess.CalledProcessError` with what buildah said."""
        name = "localhost/built"
        base = ["--isolation", "chroot", "--layers=false", "--pull-never", "--format", "docker", *options]
        # Later versions ask for more than a host may allow.
        base += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
        self._call("bud", *base, "-f", str(context / "Dockerfile"), "-t", name, str(context))
        config = json.loads(self._call("inspect", "--type", "image", name))["Docker"]["config"]
        config["Labels"] = {name: value for name, value in (config["Labels"] or {}).items() if "buildah" not in name}
        container = self._call("from", "--pull-never", name).strip()
        try:
            mounted = self._call("mount", container).strip()
            packing = ["tar", "-C", mounted, "--numeric-owner", "--format=gnu", "-cf", "-", "."]
            files = subprocess.run(packing, capture_output=True, check=True).stdout
        finally:
            self._call("rm", container)
        return Made(files, config)

    def _call(self, *arguments: str) -> str:
        commands = [arguments[0]]
        if arguments[0] in ("bud", "from", "commit", "add"):
            commands += ["--signature-policy", str(self._policy)] if arguments[0] != "add" else []
        argv: Sequence[str] = [
            "buildah",
            *self._common,
            "--registries-conf",
            str(self._registries),
            *commands,
            *arguments[1:],
        ]
        environ = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(self._home)}
        done = subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=120)
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
        return done.stdout
