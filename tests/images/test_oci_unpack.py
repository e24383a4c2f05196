"""A layer becomes what overlayfs takes, and a hostile one becomes nothing."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from sandyard.errors import BadRequest
from sandyard.images.oci.base import digest_of
from sandyard.images.oci.unpack import OPAQUE, Unpacked, unpack_layer
from tests.images.oci import Entry, folder, layer

BASE = 1_000_000
pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


def unpack(data: bytes, root: Path, *below: Path, limit: int = 1 << 30) -> Unpacked:
    return unpack_layer(io.BytesIO(data), root, BASE, limit, below)


def is_whiteout(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def test_files_modes_owners_attributes_and_hard_links(tmp_path: Path) -> None:
    data = layer(
        folder("bin", 0o755),
        Entry("bin/tool", b"tool", mode=0o4755, attributes={"user.note": b"x\xff", "trusted.overlay.opaque": b"y"}),
        Entry("bin/same", kind=tarfile.LNKTYPE, link="bin/tool"),
        Entry("bin/short", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        Entry("dev-null", kind=tarfile.CHRTYPE),
        folder("home", 0o700, uid=1000),
    )
    root = tmp_path / "a"
    made = unpack(data, root)
    tool = (root / "bin/tool").stat()
    assert made == Unpacked(digest_of(data), 4, True)
    assert (stat.S_IMODE(tool.st_mode), tool.st_uid, tool.st_nlink) == (0o4755, BASE, 2)
    assert os.listxattr(root / "bin/tool") == ["user.note"]
    assert os.getxattr(root / "bin/tool", "user.note") == b"x\xff"
    assert os.readlink(root / "bin/short") == "/etc/passwd"
    assert (root / "home").stat().st_uid == BASE + 1000
    assert not os.path.lexists(root / "dev-null")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_every_packing_has_the_digest_of_the_tar(pack: object, tmp_path: Path) -> None:
    assert callable(pack)
    data = layer(Entry("a", b"1" * 100_000))
    assert unpack(pack(data), tmp_path / "a").diff_id == digest_of(data)


def test_whiteouts_and_opaque_directories(tmp_path: Path) -> None:
    root = tmp_path / "a"
    unpack(layer(folder("d"), Entry("d/.wh.gone"), folder("o"), Entry("o/.wh..wh..opq"), Entry(".wh.top")), root)
    assert is_whiteout(root / "d/gone")
    assert is_whiteout(root / "top")
    assert os.getxattr(root / "o", OPAQUE) == b"y"
    assert not list(root.rglob(".wh.*"))


@pytest.mark.parametrize("whiteout_first", [True, False])
def test_what_the_same_layer_makes_anew_wins(whiteout_first: bool, tmp_path: Path) -> None:
    marks = [Entry(".wh.file"), Entry(".wh.tree")]
    made = [Entry("file", b"new"), folder("tree"), Entry("tree/leaf", b"new")]
    root = tmp_path / "a"
    unpack(layer(*marks, *made) if whiteout_first else layer(*made, *marks), root)
    assert (root / "file").read_bytes() == b"new"
    assert (root / "tree/leaf").read_bytes() == b"new"
    assert os.getxattr(root / "tree", OPAQUE) == b"y"  # what lay in it below is gone


def test_left_out_parents_are_as_the_layers_below_have_them(tmp_path: Path) -> None:
    below, root = tmp_path / "below", tmp_path / "a"
    unpack(layer(folder("tmp", 0o1777), folder("srv", 0o750, uid=7)), below)
    made = unpack(layer(Entry("tmp/x", b"1"), Entry("srv/new/y", b"2")), root, below)
    assert not made.self_contained
    assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777
    assert (stat.S_IMODE((root / "srv").stat().st_mode), (root / "srv").stat().st_uid) == (0o750, BASE + 7)
    assert stat.S_IMODE((root / "srv/new").stat().st_mode) == 0o755


def test_a_link_to_a_file_of_a_lower_layer_is_copied_up(tmp_path: Path) -> None:
    below, root = tmp_path / "below", tmp_path / "a"
    unpack(layer(folder("lib"), Entry("lib/one", b"content", mode=0o640, uid=5)), below)
    made = unpack(layer(folder("lib"), Entry("lib/two", kind=tarfile.LNKTYPE, link="lib/one")), root, below)
    two = (root / "lib/two").stat()
    assert not made.self_contained
    assert (root / "lib/two").read_bytes() == b"content"
    assert (stat.S_IMODE(two.st_mode), two.st_uid, two.st_nlink) == (0o640, BASE + 5, 2)


def test_nothing_below_is_reached_through_a_symlink(tmp_path: Path) -> None:
    below, root, secret = tmp_path / "below", tmp_path / "a", tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("k")
    unpack(layer(Entry("lib", kind=tarfile.SYMTYPE, link=str(secret))), below)
    with pytest.raises(BadRequest, match="links to"):
        unpack(layer(folder("lib"), Entry("lib/mine", kind=tarfile.LNKTYPE, link="lib/key")), root, below)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([Entry("/etc/x")], "absolute"),
        ([Entry("a/../../x")], "leaves the archive"),
        ([Entry("d", kind=tarfile.SYMTYPE, link="/etc"), Entry("d/x")], "passes through"),
        ([Entry("d", kind=tarfile.SYMTYPE, link="/etc"), Entry("d/.wh.passwd")], "passes through"),
        ([Entry("l", kind=tarfile.LNKTYPE, link="/etc/passwd")], "absolute"),
        ([Entry("d/.wh...")], "whites out nothing"),
        ([Entry("big", b"x" * 5000)], "limit"),
    ],
)
def test_hostile_layers_are_refused(entries: list[Entry], why: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=why):
        unpack(layer(*entries), tmp_path / "a", limit=4096)


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(200 << 20))  # a tar that ends at once, then zeros without end
    with pytest.raises(BadRequest, match="unpacks to more"):
        unpack(bomb, tmp_path / "a", limit=1 << 20)


@pytest.mark.parametrize("cut", [10, 600, 3000])
def test_a_cut_archive_is_refused(cut: int, tmp_path: Path) -> None:
    data = gzip.compress(layer(folder("d"), Entry("d/x", os.urandom(4000))))
    with pytest.raises(BadRequest, match="not a tar archive that can be unpacked"):
        unpack(data[:cut], tmp_path / "a")


def _header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def _times(value: bytes) -> bytes:
    record = b"%d mtime=%s\n" % (len(value) + 10, value)
    return _header(tarfile.XHDTYPE, len(record)) + record.ljust(512, b"\0") + _header(tarfile.REGTYPE, 0)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_a_header_without_end_is_not_read_into_memory(kind: bytes, tmp_path: Path) -> None:
    class Endless(io.RawIOBase):
        given = at = 0

        def seek(self, offset: int, whence: int = 0) -> int:
            self.at = offset
            return offset

        def read(self, size: int = -1) -> bytes:
            data = _header(kind, 7 << 30)[self.at : self.at + size]
            self.at += size
            self.given += size
            return data + b" " * (size - len(data))

    endless = Endless()
    with pytest.raises(BadRequest, match="of 7516192768 bytes before one entry"):
        unpack_layer(endless, tmp_path / "x", BASE, 8 << 30)  # type: ignore[arg-type]
    assert endless.given < 8 << 20


@pytest.mark.parametrize(("count", "size"), [(100, 1 << 20), (2000, 512)])
def test_headers_before_no_entry_come_to_an_end(count: int, size: int, tmp_path: Path) -> None:
    data = io.BytesIO((_header(tarfile.XGLTYPE, size) + bytes(size)) * count + layer(Entry("a")))
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="before one entry"):
            unpack_layer(data, tmp_path / "x", BASE, 1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_values_for_all_entries_are_few(tmp_path: Path) -> None:
    parts = []
    for number in range(300):
        record = b"23 a%04d=%s\n" % (number, b"x" * 13)
        parts.append(_header(tarfile.XGLTYPE, len(record)) + record.ljust(512, b"\0") + _header(tarfile.REGTYPE, 0))
    with pytest.raises(BadRequest, match="more than 256 values for all"):
        unpack(b"".join(parts) + bytes(1024), tmp_path / "x")


@pytest.mark.parametrize("value", [b"1e300", b"nan", b"inf", b"-1e300"])
def test_times_that_are_none(value: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="not a tar archive that can be unpacked"):
        unpack(_times(value) + bytes(1024), tmp_path / "x")
