"""Archives keep modes, links and holes, and what a sandbox packs cannot write outside its target."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from sandyard.cli.archive import ArchiveError, pack, unpack
from sandyard.cli.transfer import write_with_holes

MIB = 1 << 20


def tree(root: Path) -> Path:
    """A file with holes, a program, links of all kinds, a directory that nobody may write to."""
    root.mkdir()
    with (root / "sparse").open("wb") as file:
        file.seek(8 * MIB)
        file.write(b"middle")
        file.truncate(16 * MIB)
    (root / "run").write_bytes(b"#!/bin/sh\n")
    (root / "run").chmod(0o751)
    (root / "empty").touch()
    (root / "dangling").symlink_to("/no/such/file")
    (root / "near").symlink_to("run")
    os.link(root / "run", root / "same")
    (root / "shut").mkdir()
    (root / "shut" / "in").write_text("x" * 70_000)
    (root / "shut").chmod(0o500)
    os.mkfifo(root / "pipe")
    return root


def check(copy: Path) -> None:
    assert (copy / "sparse").stat().st_size == 16 * MIB
    assert (copy / "sparse").stat().st_blocks * 512 < MIB
    assert (copy / "sparse").read_bytes()[8 * MIB : 8 * MIB + 6] == b"middle"
    assert (copy / "run").stat().st_mode & 0o7777 == 0o751
    assert (copy / "run").stat().st_ino == (copy / "same").stat().st_ino
    assert os.readlink(copy / "dangling") == "/no/such/file"
    assert os.readlink(copy / "near") == "run"
    assert (copy / "shut").stat().st_mode & 0o777 == 0o500
    assert (copy / "shut" / "in").read_text() == "x" * 70_000
    assert not (copy / "pipe").exists()


def test_what_is_packed_is_unpacked_alike(tmp_path: Path) -> None:
    archive = io.BytesIO()
    assert pack(tree(tmp_path / "a"), "name", archive) == 9
    assert len(archive.getvalue()) < MIB
    archive.seek(0)
    assert unpack(archive, "name", tmp_path / "b") == 9
    check(tmp_path / "b")


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar here")
def test_gnu_tar_reads_and_writes_the_same(tmp_path: Path) -> None:
    with (tmp_path / "ours.tar").open("wb") as file:
        pack(tree(tmp_path / "a"), "name", file)
    subprocess.run(["tar", "-xpf", tmp_path / "ours.tar", "-C", tmp_path], check=True)
    check(tmp_path / "name")
    subprocess.run(["tar", "-cSf", tmp_path / "its.tar", "-C", tmp_path, "./name"], check=True)
    with (tmp_path / "its.tar").open("rb") as file:
        unpack(file, "name", tmp_path / "c")
    check(tmp_path / "c")


def test_one_file_is_a_tree_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("data")
    archive = io.BytesIO()
    pack(tmp_path / "a", "name", archive)
    archive.seek(0)
    unpack(archive, "name", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "data"


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


HOSTILE = {
    "parent": [member("name/../../out")],
    "absolute": [member("/out")],
    "elsewhere": [member("other/out")],
    "device": [member("name/null", tarfile.CHRTYPE)],
    "link out": [member("name/link", tarfile.LNKTYPE, "../../secret")],
    "link to absolute": [member("name/link", tarfile.LNKTYPE, "/etc/passwd")],
    "through a link": [member("name/to", tarfile.SYMTYPE, "/"), member("name/to/out")],
    "link in a link": [member("name/to", tarfile.SYMTYPE, "/"), member("name/to/out", tarfile.SYMTYPE, "x")],
    "twice": [member("name/a"), member("name/a")],
    "hard link through a link": [
        member("name/to", tarfile.SYMTYPE, "/etc"),
        member("name/link", tarfile.LNKTYPE, "name/to/passwd"),
    ],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_is_written_outside(tmp_path: Path, case: str) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for info in HOSTILE[case]:
            tar.addfile(info)
    archive.seek(0)
    inner = tmp_path / "deep" / "inner"
    inner.mkdir(parents=True)
    with pytest.raises((ArchiveError, OSError)):
        unpack(archive, "name", inner / "target")
    outside = {path.name for path in tmp_path.rglob("*") if inner / "target" not in (path, *path.parents)}
    assert outside == {"deep", "inner"}
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))
    assert not Path("/out").exists()


@pytest.mark.parametrize("data", [b"", b"x" * 1000, b"\0" * 512 + b"x" * 512])
def test_what_is_no_archive(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ArchiveError, match="damaged"):
        unpack(io.BytesIO(data), "name", tmp_path / "target")


def test_no_file_becomes_setuid(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(member("name", mode=0o6755))
    archive.seek(0)
    unpack(archive, "name", tmp_path / "b")
    assert (tmp_path / "b").stat().st_mode & 0o7777 == 0o755


def test_zeros_of_a_stream_become_holes(tmp_path: Path) -> None:
    data = b"a" * 5000 + bytes(MIB) + b"b" * 3 + bytes(9000)
    with (tmp_path / "f").open("wb") as file:
        write_with_holes((data[at : at + 1000] for at in range(0, len(data), 1000)), file)
    assert (tmp_path / "f").read_bytes() == data
    assert (tmp_path / "f").stat().st_blocks * 512 < 64 * 1024
