"""Build contexts: what is sent, what is not, and what a hostile directory comes to."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from sandyard.errors import BadRequest
from sandyard.images.dockerfile import DockerfileError, parse
from sandyard.images.dockerfile.context import ignored, pack, scan, select, sources
from sandyard.images.dockerfile.tree import read_tree


def packed(context: Path, text: str, **args: str) -> tuple[dict[str, tarfile.TarInfo], str]:
    wanted = sources(parse(text), args, None)
    tree = scan(context, ignored(context, context / "Dockerfile"))
    names = select(tree, wanted) if wanted is not None else sorted(tree.nodes)
    out = io.BytesIO()
    digest = pack(context, tree, names, out)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        return {member.name: member for member in tar}, digest


@pytest.fixture
def context(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.txt", "src/x.py", "src/deep/y.py", "src/deep/y.pyc", "big/1", ".env", "docs/keep.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_only_what_is_named_is_sent(context: Path) -> None:
    names, _ = packed(
        context, "FROM a\nARG D=src\nCOPY $D/deep /x\nCOPY a*.txt /y/\nFROM a AS unused\nCOPY big /b\nFROM a\n"
    )
    assert set(names) == set()
    names, _ = packed(
        context, "FROM a AS b\nARG D=src\nCOPY $D/deep /x\nCOPY a*.txt /y/\nFROM b\nCOPY --from=b /big /b\n"
    )
    assert set(names) == {"src", "src/deep", "src/deep/y.py", "src/deep/y.pyc", "a.txt"}
    names, _ = packed(context, "FROM a\nRUN --mount=target=/c,source=docs ls\n")
    assert set(names) == {"docs", "docs/keep.md"}


def test_a_variable_of_the_image_sends_all(context: Path) -> None:
    names, _ = packed(context, "FROM a\nCOPY $FROM_IMAGE /x\n")
    assert "big/1" in names
    assert "src/deep/y.py" in names


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ("**/*.py*\n", {"a.txt", "b.txt", "big/1", ".env", "docs/keep.md"}),
        ("*\n!src/**/y.py\n", {"src/deep/y.py"}),
        ("*\n!docs\n", {"docs/keep.md"}),
        ("# src\n\n  src  \n/big\n.env\n", {"a.txt", "b.txt", "docs/keep.md"}),
        (
            "*.txt\n!*.txt\nb.*\n",
            {"a.txt", "src/x.py", "src/deep/y.py", "src/deep/y.pyc", "big/1", ".env", "docs/keep.md"},
        ),
        ("src/*\r\n!src/x.py\r\n", {"a.txt", "b.txt", "src/x.py", "big/1", ".env", "docs/keep.md"}),
        ("\ufeff?.txt\n", {"src/x.py", "src/deep/y.py", "src/deep/y.pyc", "big/1", ".env", "docs/keep.md"}),
    ],
)
def test_dockerignore(context: Path, rules: str, kept: set[str]) -> None:
    (context / ".dockerignore").write_bytes(rules.encode())
    names, _ = packed(context, "FROM a\nCOPY . /x\n")
    assert {name for name, member in names.items() if member.isreg()} - {".dockerignore"} == kept


def test_a_dockerignore_beside_the_dockerfile_comes_first(context: Path) -> None:
    (context / ".dockerignore").write_text("*")
    (context / "Dockerfile.dockerignore").write_text("src")
    names, _ = packed(context, "FROM a\nCOPY . /x\n")
    assert "a.txt" in names
    assert "src/x.py" not in names


def test_a_bad_dockerignore_is_named(context: Path) -> None:
    (context / ".dockerignore").write_text("a[")
    with pytest.raises(BadRequest, match=r"\.dockerignore: Invalid ignore pattern 'a\['"):
        packed(context, "FROM a\nCOPY . /x\n")


def test_a_source_that_is_ignored_or_missing_fails_with_its_line(context: Path) -> None:
    (context / ".dockerignore").write_text("a.txt")
    with pytest.raises(DockerfileError, match=r"Dockerfile:2: 'a.txt' is not there in the build context"):
        packed(context, "FROM a\nCOPY a.txt /x\n")
    with pytest.raises(BadRequest, match="leaves the build context"):
        packed(context, "FROM a\nCOPY ../secret /x\n")


def test_links_out_of_the_context_bring_nothing_in(context: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("secret")
    (context / "out").symlink_to(secret)
    (context / "outdir").symlink_to(secret.parent)
    (context / "src/up").symlink_to("../../../../../../etc/passwd")
    names, _ = packed(context, "FROM a\nCOPY src /x\n")
    assert names["src/up"].issym()
    for source in ("out", "outdir/secret", "outdir"):
        with pytest.raises(DockerfileError, match="is not there"):
            packed(context, f"FROM a\nCOPY {source} /x\n")


def test_links_within_are_sent_with_what_they_lead_to(context: Path) -> None:
    (context / "l").symlink_to("src/deep")
    (context / "top").symlink_to("/a.txt")
    os.link(context / "b.txt", context / "z.txt")
    names, _ = packed(context, "FROM a\nCOPY l /x\nCOPY top /y\nCOPY z.txt /z\n")
    assert names["l"].issym()
    assert names["src/deep/y.py"].isreg()
    assert (names["a.txt"].isreg(), names["b.txt"].isreg(), names["z.txt"].islnk()) == (True, True, True)


def test_an_archive_is_the_same_for_the_same_files(context: Path) -> None:
    text = "FROM a\nCOPY src /x\n"
    _, first = packed(context, text)
    os.utime(context / "src/x.py", (1, 1))
    assert packed(context, text)[1] == first
    (context / "src/x.py").chmod(0o755)
    assert packed(context, text)[1] != first
    (context / "src/x.py").chmod(0o644)
    (context / "src/x.py").write_text("other")
    assert packed(context, text)[1] != first


def test_sockets_and_pipes_are_left_out(context: Path) -> None:
    os.mkfifo(context / "src/pipe")
    names, _ = packed(context, "FROM a\nCOPY src /x\n")
    assert "src/pipe" not in names


def archive(path: Path, *members: tuple[str, bytes, str, int]) -> Path:
    """(name, type, link, size) as a stranger would pack them."""
    with tarfile.open(path, "w") as tar:
        for name, kind, link, size in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, size
            tar.addfile(member, io.BytesIO(bytes(size)) if size else None)
    return path


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("../x", tarfile.REGTYPE, "", 1)], "leaves the build context"),
        ([("h", tarfile.LNKTYPE, "../../etc/passwd", 0)], "leaves the build context"),
        ([("h", tarfile.LNKTYPE, "never", 0)], "comes later or never"),
        ([("big", tarfile.REGTYPE, "", 5000)], "pass 4096 bytes"),
    ],
)
def test_an_archive_that_leaves_its_tree_is_refused(
    tmp_path: Path, members: list[tuple[str, bytes, str, int]], words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        read_tree(archive(tmp_path / "a.tar", *members), 4096)
