"""The parts of a build that need no sandbox: variables, archives, keys, checks."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandyard.errors import BadRequest
from sandyard.images.build import Base, Plan, Step, check_step
from sandyard.images.build.archive import check_archive, content, header, pick, source_root
from sandyard.images.build.chain import chain, reusable
from sandyard.images.build.expand import DEFAULT_PATH, expand
from sandyard.runtimes.base import Rootfs


def pack(path: Path, *members: tuple[str, bytes | None], links: tuple[tuple[str, str, bytes], ...] = ()) -> Path:
    """A tar.gz of files (content) and directories (None), then of links (name, target, tar type)."""
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.mtime = 1_700_000_000
            if data is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
            else:
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        for name, target, kind in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", "plain"),
        ("$A-2", "1-2"),
        ("${A}b", "1b"),
        ("$MISSING.", "."),
        ("${MISSING:-x}", "x"),
        ("${A:-x}", "1"),
        ("${A:+y}", "y"),
        ("${MISSING:+y}", ""),
        (r"\$A", "$A"),
        (r"C:\dir", r"C:\dir"),
        ("$PATH:/opt", f"{DEFAULT_PATH}:/opt"),
        ("a$", "a$"),
        ("$1", "$1"),
    ],
)
def test_variables(text: str, value: str) -> None:
    assert expand(text, {"A": "1"}) == value


@given(st.text())
def test_a_text_without_dollars_and_backslashes_is_itself(text: str) -> None:
    plain = text.replace("$", "").replace("\\", "")
    assert expand(plain, {"A": "1"}) == plain


@pytest.mark.parametrize(
    ("pattern", "root"),
    [
        ("folder", "folder"),
        ("folder/", "folder"),
        ("./folder/file.txt", "folder/file.txt"),
        ("folder/*", "folder"),
        ("*.txt", ""),
        (".", ""),
        ("a/b*/c", "a"),
        ("a/../b/x", "b/x"),
        ("a/[bc]", "a"),
    ],
)
def test_the_root_of_a_source_is_what_no_wildcard_touches(pattern: str, root: str) -> None:
    assert source_root(pattern) == root


def test_entries_are_picked_relative_to_the_root(tmp_path: Path) -> None:
    archive = pack(
        tmp_path / "a", ("dir", None), ("dir/f", b"1"), ("dir/sub", None), ("dir/sub/g", b"2"), ("other", b"")
    )
    assert [entry.name for entry in pick(archive, "dir")] == ["f", "sub", "sub/g"]
    assert [entry.name for entry in pick(archive, "dir/f")] == [""]
    assert [entry.name for entry in pick(archive, "di")] == []
    assert [entry.name for entry in pick(archive, "")] == ["dir", "dir/f", "dir/sub", "dir/sub/g", "other"]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/../x"])
def test_names_that_leave_the_context_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match="leaves the build context"):
        list(pick(pack(tmp_path / "a", (name, b"")), ""))


def test_a_hard_link_follows_its_target_or_is_refused(tmp_path: Path) -> None:
    archive = pack(tmp_path / "a", ("d/f", b"1"), ("e", b"2"), links=(("d/l", "d/f", tarfile.LNKTYPE),))
    assert [(entry.name, entry.member.linkname) for entry in pick(archive, "d")] == [("f", ""), ("l", "f")]
    archive = pack(tmp_path / "b", ("d/f", b"1"), ("e", b"2"), links=(("d/l", "e", tarfile.LNKTYPE),))
    with pytest.raises(BadRequest, match="not copied"):
        list(pick(archive, "d"))


def test_devices_are_left_out(tmp_path: Path) -> None:
    archive = pack(tmp_path / "a", ("f", b"1"), links=(("null", "", tarfile.CHRTYPE), ("pipe", "", tarfile.FIFOTYPE)))
    assert [entry.name for entry in pick(archive, "")] == ["f"]


def test_an_archive_is_checked_to_its_end(tmp_path: Path) -> None:
    archive = pack(tmp_path / "a", ("f", b"x" * 1000), ("g", bytes(5000)))
    assert check_archive(archive, 6000) == 6000
    with pytest.raises(BadRequest, match="pass 5999 bytes"):
        check_archive(archive, 5999)
    (tmp_path / "cut").write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(BadRequest, match="cannot be read"):
        check_archive(tmp_path / "cut", 6000)
    (tmp_path / "none").write_bytes(b"this is not an archive at all" * 40)
    with pytest.raises(BadRequest, match="cannot be read"):
        check_archive(tmp_path / "none", 6000)


def raw_header(kind: bytes, size: int, name: str = "h") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE])
def test_headers_that_would_fill_the_memory_are_refused(tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "a").write_bytes(raw_header(kind, 1 << 33) + bytes(4096))
    with pytest.raises(BadRequest, match="of 8589934592 bytes before one entry"):
        list(pick(tmp_path / "a", ""))


def test_headers_without_end_are_refused(tmp_path: Path) -> None:
    filler = b"".join(raw_header(tarfile.XGLTYPE, 500_000) + bytes(500_224) for _ in range(20))
    (tmp_path / "a").write_bytes(filler + raw_header(tarfile.REGTYPE, 0) + bytes(1024))
    with pytest.raises(BadRequest, match=r"cannot be read|without end"):
        list(pick(tmp_path / "a", ""))


def test_sparse_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(raw_header(tarfile.GNUTYPE_SPARSE, 0) + bytes(1024))
    with pytest.raises(BadRequest, match="sparse"):
        list(pick(tmp_path / "a", ""))
    with tarfile.open(tmp_path / "b", "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("f")
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
        tar.addfile(member)
    with pytest.raises(BadRequest, match="sparse"):
        list(pick(tmp_path / "b", ""))


def test_what_is_sent_on_is_a_tar_with_other_names_and_owners(tmp_path: Path) -> None:
    long = "n" * 150 + "é"
    archive = pack(tmp_path / "a", ("d", None), (f"d/{long}", b"12345"), links=(("d/s", "/etc/x", tarfile.SYMTYPE),))
    sent = b"".join(
        header(entry, f"to/{entry.name}", (7, 8), 0o640) + b"".join(content(entry, padded=True))
        for entry in pick(archive, "d")
    )
    with tarfile.open(fileobj=io.BytesIO(sent + bytes(1024))) as tar:
        file, link = tar.getmembers()
        assert (file.name, file.uid, file.gid, file.mode, file.uname) == (f"to/{long}", 7, 8, 0o640, "")
        source = tar.extractfile(file)
        assert source is not None
        assert source.read() == b"12345"
        assert (link.name, link.linkname) == ("to/s", "/etc/x")


def test_keys_change_with_all_that_came_before() -> None:
    base = Base(Rootfs([Path("/l")]), "k", "base")
    steps = [Step("RUN", ["a"]), Step("COPY", ["s", "d"], "hash"), Step("RUN", ["b"])]
    keys = chain(base, steps)
    assert len(set(keys)) == 4
    assert chain(base, steps[:2]) == keys[:3]
    assert chain(base, [steps[0], Step("COPY", ["s", "d"], "other"), steps[2]])[:2] == keys[:2]
    assert not set(chain(base, [Step("RUN", ["c"]), *steps[1:]])[1:]) & set(keys)
    assert not set(chain(Base(Rootfs([Path("/l")]), "k2", "base"), steps)) & set(keys)
    assert not set(chain(Base(Rootfs([Path("/l")], {"A": "1"}), "k", "base"), steps)) & set(keys)


def test_arguments_do_not_run_into_one_another() -> None:
    base = Base(Rootfs([]), "k", "base")
    assert chain(base, [Step("ENV", ["a", "bc"])]) != chain(base, [Step("ENV", ["ab", "c"])])
    assert chain(base, [Step("COPY", ["a", "b"], "c")]) != chain(base, [Step("COPY", ["a", "b", "c"], None)])


def test_steps_up_to_the_first_forced_one_may_be_reused() -> None:
    base = Base(Rootfs([]), "k", "base")
    steps = [Step("RUN", ["a"]), Step("RUN", ["b"], force=True), Step("RUN", ["c"])]
    assert reusable(Plan(base, steps)) == 1
    assert reusable(Plan(base, steps[:1])) == 1
    assert reusable(Plan(base, steps[:1], force=True)) == 0


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step("FETCH", ["x"]), "steps.2.type: 'FETCH' is not one of"),
        (Step("RUN"), "takes at least 1"),
        (Step("COPY", ["a"], "h" * 8), "takes at least 2"),
        (Step("COPY", ["a", "b"]), "needs the hash"),
        (Step("COPY", ["a", "b", "", "rwx"], "h" * 8), "not an octal mode"),
        (Step("ENV", ["A"]), "takes at least 2"),
        (Step("ENV", ["A", "1", "B"]), "in turn"),
        (Step("ENV", ["A=B", "1"]), "has '=' in it"),
        (Step("RUN", ["a\0b"]), "NUL"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused_by_name(step: Step, words: str) -> None:
    with pytest.raises(BadRequest, match=words.replace("(", r"\(")):
        check_step(step, 3)
