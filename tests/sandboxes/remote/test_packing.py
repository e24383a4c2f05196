"""Directories as tars, and back: what a sandbox can see of a layer stays, and the bytes are the same every time."""

from __future__ import annotations

import io
import os
import stat
import struct
from pathlib import Path

import pytest

from sandyard.images.oci.unpack import OPAQUE, unpack_layer
from sandyard.images.owners import CAPABILITY
from sandyard.sandboxes.remote.packing import pack
from sandyard.store.blobs import BlobError

pytestmark = pytest.mark.root
BASE = 1_879_048_192
_BOUND = struct.pack("<6I", 0x03000001, 1 << 10, 0, 0, 0, BASE)


def _own(path: Path, uid: int, gid: int, mode: int | None = None) -> None:
    os.chown(path, BASE + uid, BASE + gid, follow_symlinks=False)
    if mode is not None:
        path.chmod(mode)


def _tree(root: Path) -> None:
    root.mkdir()
    _own(root, 0, 0, 0o755)
    for name, mode in (("etc", 0o755), ("tmp", 0o1777), ("etc/opaque", 0o700), ("leer ä\udcff", 0o2755)):
        (root / name).mkdir()
        _own(root / name, 0, 7, mode)
    os.setxattr(root / "etc/opaque", OPAQUE, b"y")
    (root / "etc/sudo").write_bytes(b"\0" * 5000 + b"x")
    _own(root / "etc/sudo", 0, 0, 0o4755)
    (root / "etc/ping").write_bytes(os.urandom(3000))
    _own(root / "etc/ping", 1000, 1000, 0o640)
    os.setxattr(root / "etc/ping", CAPABILITY, _BOUND)
    os.setxattr(root / "etc/ping", "user.note", bytes(range(1, 256)))
    os.setxattr(root / "etc", "user.dir", b"1")
    os.link(root / "etc/ping", root / "again")
    os.symlink("../nowhere/at all", root / "etc/link")
    _own(root / "etc/link", 5, 6)
    os.symlink("etc", root / "folder")
    _own(root / "folder", 0, 0)
    os.mkfifo(root / "pipe", 0o622)
    _own(root / "pipe", 2, 2, 0o622)
    os.mknod(root / "etc/gone", stat.S_IFCHR, os.makedev(0, 0))
    (root / ("long" * 50)).mkdir()
    _own(root / ("long" * 50), 3, 3)
    (root / ("long" * 50) / ("name" * 60)).write_bytes(b"")
    _own(root / ("long" * 50) / ("name" * 60), 65534, 65534, 0o000)
    os.utime(root / "etc/sudo", (1, 1_234_567_890.75))


def _seen(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    inodes: dict[int, str] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        entry, name = path.lstat(), str(path.relative_to(root))
        kind = stat.S_IFMT(entry.st_mode)
        names = os.listxattr(path, follow_symlinks=False)
        found[name] = (
            oct(entry.st_mode) if kind != stat.S_IFCHR else None,
            (entry.st_uid, entry.st_gid) if kind != stat.S_IFCHR else None,
            os.readlink(path) if kind == stat.S_IFLNK else None,
            path.read_bytes() if kind == stat.S_IFREG else None,
            {key: os.getxattr(path, key, follow_symlinks=False) for key in names},
            int(entry.st_mtime) if kind in (stat.S_IFREG, stat.S_IFDIR) else None,
            inodes.setdefault(entry.st_ino, name),
        )
    return found


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    _tree(tmp_path / "one")
    packed = b"".join(pack(tmp_path / "one", BASE))
    unpack_layer(io.BytesIO(packed), tmp_path / "two", BASE, 1 << 30)
    assert _seen(tmp_path / "two") == _seen(tmp_path / "one")
    assert b"".join(pack(tmp_path / "two", BASE)) == packed
    unpack_layer(io.BytesIO(packed), tmp_path / "three", BASE + 65536, 1 << 30)  # a node with another range of ids
    assert b"".join(pack(tmp_path / "three", BASE + 65536)) == packed


def test_what_no_layer_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    _tree(tmp_path / "one")
    (tmp_path / "one/etc/.wh.x").write_bytes(b"")
    with pytest.raises(BlobError, match=r"\.wh\.x"):
        b"".join(pack(tmp_path / "one", BASE))


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    _tree(tmp_path / "one")
    (tmp_path / "one/zz").write_bytes(os.urandom(3 << 20))

    def shrink() -> None:
        for piece in pack(tmp_path / "one", BASE):
            if len(piece) == 1 << 20:
                os.truncate(tmp_path / "one/zz", 1 << 20)

    with pytest.raises(OSError, match="had 3145728 a moment ago"):
        shrink()
