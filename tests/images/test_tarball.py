"""Archives are unpacked as root: none of them may reach outside, whatever it holds."""

from __future__ import annotations

import io
import os
import stat
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sandyard.errors import BadRequest
from sandyard.images.owners import bind_capability, shifted
from sandyard.images.tarball import unpack

Entry = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


def member(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    info.mtime = 1_700_000_000
    return info


def file(name: str, content: bytes = b"content", mode: int = 0o644) -> Entry:
    info = member(name, mode=mode)
    info.size = len(content)
    return info, content


def archive(path: Path, *entries: Entry, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for entry in entries:
            info, content = entry if isinstance(entry, tuple) else (entry, b"")
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Path]:
    """Unpack entries; owners become those of whoever runs the test, so that root is not needed."""

    def run(*entries: Entry, mode: str = "w") -> Path:
        root = tmp_path / "root"
        unpack(archive(tmp_path / "archive.tar", *entries, mode=mode), root, os.geteuid())
        return root

    return run


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_files_directories_and_links_come_out(opened: Callable[..., Path], mode: str) -> None:
    root = opened(
        member("./", tarfile.DIRTYPE, mode=0o755),
        member("./bin", tarfile.SYMTYPE, link="usr/bin"),
        member("./usr", tarfile.DIRTYPE, mode=0o755),
        member("./usr/bin", tarfile.DIRTYPE, mode=0o555),
        file("./usr/bin/sudo", b"elf", 0o4755),
        member("./usr/bin/also", tarfile.LNKTYPE, link="./usr/bin/sudo"),
        member("./etc/abs", tarfile.SYMTYPE, link="/usr/bin/sudo"),
        member("./run/fifo", tarfile.FIFOTYPE),
        mode=mode,
    )
    assert os.readlink(root / "bin") == "usr/bin"
    assert os.readlink(root / "etc/abs") == "/usr/bin/sudo"
    assert stat.S_IMODE((root / "usr/bin").stat().st_mode) == 0o555
    assert stat.S_IMODE((root / "usr/bin/sudo").stat().st_mode) == 0o4755
    assert (root / "usr/bin/sudo").stat().st_ino == (root / "usr/bin/also").stat().st_ino
    assert (root / "usr/bin/sudo").stat().st_mtime == 1_700_000_000
    assert stat.S_ISFIFO((root / "run/fifo").lstat().st_mode)


HOSTILE: dict[str, list[Entry]] = {
    "absolute": [file("/etc/passwd")],
    "climbs": [file("a/../../passwd")],
    "climbs at once": [file("../passwd")],
    "through a symlink": [member("out", tarfile.SYMTYPE, link="/tmp"), file("out/passwd")],
    "through a relative symlink": [member("a/out", tarfile.SYMTYPE, link="../../.."), file("a/out/passwd")],
    "directory through a symlink": [
        member("out", tarfile.SYMTYPE, link=".."),
        member("out/made", tarfile.DIRTYPE, mode=0o777),
    ],
    "directory over a symlink": [
        member("out", tarfile.SYMTYPE, link=".."),
        member("out", tarfile.DIRTYPE, mode=0o777),
    ],
    "hard link to an absolute path": [member("passwd", tarfile.LNKTYPE, link="/etc/passwd")],
    "hard link that climbs": [member("passwd", tarfile.LNKTYPE, link="../../etc/passwd")],
    "hard link through a symlink": [
        member("out", tarfile.SYMTYPE, link="/etc"),
        member("passwd", tarfile.LNKTYPE, link="out/passwd"),
    ],
    "hard link to what is not there": [member("a", tarfile.LNKTYPE, link="b")],
    "file over a directory": [member("a", tarfile.DIRTYPE, mode=0o755), file("a")],
    "file for the root": [file(".")],
    "through a file": [file("a"), file("a/b")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_outside_changes(tmp_path: Path, name: str) -> None:
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(BadRequest, match=r"archive .*archive\.tar: "):
        unpack(archive(tmp_path / "archive.tar", *HOSTILE[name]), tmp_path / "root", os.geteuid())
    outside = sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "root"))
    assert outside == [*before, tmp_path / "archive.tar"]


def test_a_symlink_is_replaced_and_never_written_through(opened: Callable[..., Path], tmp_path: Path) -> None:
    bait = tmp_path / "bait"
    bait.write_text("host")
    root = opened(member("out", tarfile.SYMTYPE, link=str(bait)), file("out", b"guest"))
    assert bait.read_text() == "host"
    assert (root / "out").read_bytes() == b"guest"


def test_devices_are_left_out(opened: Callable[..., Path]) -> None:
    root = opened(member("dev/sda", tarfile.BLKTYPE), member("dev/mem", tarfile.CHRTYPE), file("dev/x"))
    assert sorted(os.listdir(root)) == ["dev"]
    assert os.listdir(root / "dev") == ["x"]


@pytest.mark.parametrize("content", [b"", b"not a tar at all" * 100, b"\x1f\x8b\x08\x00garbage"])
def test_what_is_no_archive_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "no.tar").write_bytes(content)
    with pytest.raises(BadRequest, match=r"no\.tar"):
        unpack(tmp_path / "no.tar", tmp_path / "root", os.geteuid())


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole.tar", file("a", bytes(100_000))).read_bytes()
    (tmp_path / "half.tar").write_bytes(whole[:50_000])
    with pytest.raises(BadRequest, match=r"half\.tar"):
        unpack(tmp_path / "half.tar", tmp_path / "root", os.geteuid())


def test_ids_shift_into_the_range_and_strangers_become_nobody() -> None:
    assert shifted(0, 100_000) == 100_000
    assert shifted(1000, 100_000) == 101_000
    assert shifted(1 << 31, 100_000) == shifted(-1, 100_000) == 100_000 + 65534


def test_file_capabilities_are_bound_to_the_namespace() -> None:
    old = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
    bound = bind_capability(old, 100_000)
    assert bound == struct.pack("<6I", 0x03000001, 1 << 13, 0, 0, 0, 100_000)
    assert bind_capability(bound, 200_000) == struct.pack("<6I", 0x03000001, 1 << 13, 0, 0, 0, 200_000)
    assert bind_capability(b"short", 1) is None
    assert bind_capability(struct.pack("<5I", 0x01000000, 0, 0, 0, 0), 1) is None
