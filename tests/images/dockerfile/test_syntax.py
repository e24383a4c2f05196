"""The text of Dockerfiles: what is read, what is refused and on which line, and that no text keeps anybody busy."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandyard.errors import BadRequest
from sandyard.images.dockerfile import Dockerfile, DockerfileError, Recipe, check, parse
from sandyard.images.dockerfile.actions import Planned, Put, Run
from sandyard.images.dockerfile.config import ImageSettings
from sandyard.images.dockerfile.match import BadPattern, matcher
from sandyard.images.dockerfile.plan import Planner
from sandyard.images.dockerfile.stages import split
from sandyard.images.dockerfile.syntax import LIMIT
from sandyard.images.dockerfile.tree import FILE, LINK, Node, NoSource, Tree


def plan(text: str, base: ImageSettings | None = None, tree: Tree | None = None, **args: str) -> Planned:
    stages = split(parse(text), args)
    planner = Planner(stages, tree, lambda origin: f"key of {origin}", network=False)
    return planner.plan(stages.all[-1], base or ImageSettings(), 1)


def words_of(planned: Planned) -> list[str]:
    return [work.action.argv[-1] for work in planned.works if isinstance(work.action, Run)]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "no instruction"),
        ("# only\n# comments\n", 1, "no instruction"),
        ("RUN true\n", 1, "RUN before the first FROM"),
        ("FROM a\n\nNOSUCH x\n", 3, "unknown instruction: NOSUCH"),
        ("FROM a\nRUN --privileged true\n", 2, "RUN --privileged is not supported"),
        ("FROM a\nCOPY --parents a b\n", 2, "COPY --parents is not supported"),
        ("FROM a\nCOPY --chown a b\n", 2, "COPY --chown needs a value"),
        ("FROM a\nCOPY --chmod=u+x a b\n", 2, "write an octal mode"),
        ("FROM a\nCOPY --chown=1 --chown=2 a b\n", 2, "--chown is given twice"),
        ("FROM a\nADD https://example.com/x /x\n", 2, "ADD of a URL"),
        ("FROM a\nADD git@example.com:x.git /x\n", 2, "ADD of a URL"),
        ("FROM a\nCOPY one two three\n", 2, "must end with a slash"),
        ("FROM a\nCOPY one\n", 2, "takes a source and a destination"),
        ("FROM a\nCOPY one /two\n", 2, "none were sent"),
        ("FROM a AS x\nFROM b AS X\n", 2, "there is a stage 'x' already"),
        ("FROM a AS\n", 1, "FROM takes an image"),
        ("FROM $NOPE\n", 1, "names no image"),
        ("FROM --platform=linux/s390x a\n", 1, "--platform=linux/s390x: builds here are for"),
        ("FROM a\nENV x\n", 2, "ENV must have two arguments"),
        ("FROM a\nENV a=1 b\n", 2, "can't find = in"),
        ("FROM a\nENV A='open\n", 2, "single-quote"),
        ("FROM a\nENV A=${B\n", 2, "missing '}'"),
        ('FROM a\nENV A="${B:?must be there}"\n', 2, "must be there"),
        ("FROM a\nSHELL /bin/sh\n", 2, "SHELL takes a JSON list"),
        ("FROM a\nEXPOSE 99999\n", 2, "not a port"),
        ("FROM a\nHEALTHCHECK --interval=soon CMD x\n", 2, "write a duration"),
        ("FROM a\nHEALTHCHECK MAYBE\n", 2, "takes CMD with a command, or NONE"),
        ("FROM a\nUSER $NOBODY\n", 2, "it is empty"),
        ("FROM a\nWORKDIR\n", 2, "it is empty"),
        ("FROM a\nONBUILD ONBUILD RUN x\n", 2, "ONBUILD ONBUILD is not allowed"),
        ("FROM a\nONBUILD FROM b\n", 2, "ONBUILD FROM is not allowed"),
        ("FROM a\nRUN <<EOF\nnever ends\n", 2, "unterminated heredoc"),
        ("FROM a\nRUN --mount=type=secret,id=x cat\n", 2, "--mount=type=secret is not supported"),
        ("FROM a\nRUN --mount=type=ssh true\n", 2, "--mount=type=ssh is not supported"),
        ("FROM a\nRUN --mount=type=cache true\n", 2, "needs a target"),
        ("FROM a\nRUN --mount=type=tmpfs,target=/ true\n", 2, "its target is the root"),
        ("FROM a\nRUN --mount=type=cache,target=/x,from=b true\n", 2, "caches begin empty"),
        ("FROM a\nRUN --network=host true\n", 2, "--network=host is not supported"),
        ("FROM a\nRUN one\\\n\0\n", 3, "a NUL character"),
        ("# escape=x\nFROM a\n", 1, "invalid escape token"),
        ("# escape=`\n# escape=`\nFROM a\n", 2, "only one escape parser directive"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(DockerfileError) as caught:
        plan(text)
    assert str(caught.value).startswith(f"Dockerfile:{line}: ")
    assert words in str(caught.value)
    assert "\n" not in caught.value.message


def test_a_byte_order_mark_and_line_ends_of_windows_are_nothing() -> None:
    planned = plan("\ufeffFROM a\r\nRUN one \\\r\n  two\r\nENV A=b\r\n\r\nRUN three\r\n")
    assert words_of(planned) == ["one   two", "three"]
    assert planned.settings.env["A"] == "b"
    assert [work.line for work in planned.works] == [2, 4, 6]


def test_variables_of_stages() -> None:
    text = "ARG G=1\nARG H\nFROM a AS x\nARG G\nARG H=own\nARG L\nRUN $G\nENV G=env\nARG G=late\nRUN $G\nENV Z=$G$H$L\n"
    planned = plan(text, H="given", L="late")
    assert planned.settings.env["Z"] == "envgivenlate"
    first, second = (work.action for work in planned.works if isinstance(work.action, Run))
    assert (first.env["G"], first.env["H"], first.env["L"]) == ("1", "given", "late")
    assert second.env["G"] == "env"
    assert plan("FROM a\nRUN x\n", HTTP_PROXY="p").works[0].key == plan("FROM a\nRUN x\n").works[0].key
    assert plan("FROM a\nARG V\nRUN x\n", V="1").works[1].key != plan("FROM a\nARG V\nRUN x\n", V="2").works[1].key
    assert plan("FROM a\nRUN x\n", V="1").works[0].key == plan("FROM a\nRUN x\n", V="2").works[0].key


def test_a_key_is_of_bytes_modes_and_names() -> None:
    def key(**node: object) -> str:
        tree = Tree({"f": Node(FILE, **{"mode": 0o644, "digest": "1", **node})})  # type: ignore[arg-type]
        return plan("FROM a\nCOPY f /x\n", tree=tree).key

    assert key() == key()
    assert len({key(), key(mode=0o755), key(digest="2")}) == 3


def test_commands_and_what_resets_them() -> None:
    base = ImageSettings.of({"Entrypoint": ["e"], "Cmd": ["c"], "Healthcheck": {"Test": ["CMD", "x"]}})
    kept = plan("FROM a\nRUN true\n", base).settings
    assert (kept.start(), kept.command_is_own) == (["e", "c"], False)
    assert plan('FROM a\nENTRYPOINT ["f"]\n', base).settings.start() == ["f"]
    assert plan('FROM a\nCMD ["d"]\nENTRYPOINT ["f"]\n', base).settings.start() == ["f", "d"]
    assert plan("FROM a\nENTRYPOINT []\nCMD x y\n", base).settings.start() == ["/bin/sh", "-c", "x y"]
    assert plan("FROM a\nHEALTHCHECK NONE\n", base).settings.oci()["Healthcheck"] == {"Test": ["NONE"]}
    assert plan("FROM a\nEXPOSE 8000-8002/udp 80\n").settings.ports == ["8000/udp", "8001/udp", "8002/udp", "80/tcp"]


def test_stages_that_nobody_asks_for_are_not_needed() -> None:
    text = "FROM a AS one\nFROM a AS two\nFROM one AS three\nRUN --mount=from=two,target=/x ls\nFROM a AS four\n"
    stages = split(parse(text), {})
    assert [stage.index for stage in stages.needed(stages.target("three"))] == [0, 1, 2]
    assert [stage.index for stage in stages.needed(stages.target(None))] == [3]
    assert stages.target("1").name == "two"
    with pytest.raises(BadRequest, match="target 'five' is no stage; there are: one, two, three, four"):
        check(Recipe(parse(text), target="five"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM a\n" + "#" * LIMIT, "more than the"),
        ("FROM a\n" + "ENV A=1\n" * 10_001, "more than 10000 instructions"),
        ("FROM a\nENV A=" + "x" * 1000 + "\n" + "ENV A=$A$A$A$A\n" * 20, "Dockerfile:6: a value of"),
        ("FROM a\nENV A=" + "x" * 60_000 + "\nENV B=" + "$A" * 100_000, "come to too much text"),
        ("FROM a\nENV A=" + "a" * 5000 + "\nENV B=${A//*a*a*a*b/}\n", "patterns in"),
    ],
)
def test_a_text_that_asks_for_too_much_is_refused_at_once(text: str, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(DockerfileError, match=words):
        plan(text)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "text",
    [
        "# syntax=" + "x" + " " * 500_000 + "y\nFROM a\nRUN true\n",
        "FROM a\nRUN " + "\\\n  x " * 9_990 + "true\n",
        "FROM a\nRUN true\n" + "# comment\n" * 10_000,
        "FROM a\nRUN true " + "x" * 1_000_000,
        "FROM a\n" + "".join(f"ENV V{number}={number}\n" for number in range(9_000)) + "RUN true\n",
        "FROM a\nRUN true " + "\\ " * 100_000 + "\n",
    ],
)
def test_long_texts_are_read(text: str) -> None:
    began = time.monotonic()
    assert len(words_of(plan(text))) == 1
    assert time.monotonic() - began < 30  # milliseconds to seconds; a bad expression would take hours


@given(st.text(alphabet="FROMRUNa \\\n\"'$<>{}[]#=`-\0\t:,*", max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    for each in (text, f"FROM a\n{text}", f"FROM a\nCOPY {text}", f"FROM a\nRUN {text}"):
        try:
            file: Dockerfile = parse(each)
            split(file, {})
            plan(each)
        except BadRequest:
            continue


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*.txt", "a.txt", True),
        ("*.txt", ".txt", True),
        ("*", ".hidden", True),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("[a-c]x", "bx", True),
        ("[^a-c]x", "bx", False),
        ("[!a]x", "!x", True),
        (r"\*", "*", True),
        (r"\*", "a", False),
        ("[]]", "]", None),
        ("[a", "a", None),
        ("a*b*c", "a1b2c", True),
        ("*" * 30 + "x", "a" * 5000, False),
    ],
)
def test_wildcards_are_those_of_go(pattern: str, name: str, matches: bool | None) -> None:
    if matches is None:
        with pytest.raises(BadPattern):
            matcher(pattern)
    else:
        assert matcher(pattern)(name) is matches


def test_links_lead_within_the_tree_only() -> None:
    tree = Tree(
        {
            "etc/passwd": Node(FILE, digest="own"),
            "out": Node(LINK, target="/etc/passwd"),
            "up": Node(LINK, target="../../../../etc/passwd"),
            "gone": Node(LINK, target="/etc/shadow"),
            "round": Node(LINK, target="round"),
            "d/link": Node(LINK, target="../etc"),
        }
    )
    assert [found.path for found in tree.find("out")] == ["etc/passwd"]
    assert [found.path for found in tree.find("up")] == ["etc/passwd"]
    assert [found.path for found in tree.find("d/link/pass*")] == ["etc/passwd"]
    for name, words in (("gone", "is not there"), ("round", "in a circle"), ("nothing", "is not there")):
        with pytest.raises(NoSource, match=words):
            tree.find(name)
    with pytest.raises(BadRequest, match="leaves the build context"):
        tree.find("../etc/passwd")


def test_a_copy_is_told_where_to() -> None:
    tree = Tree({"f": Node(FILE, digest="1")})
    text = "FROM a\nWORKDIR /w\nCOPY f .\nCOPY f ./\nCOPY f x\nCOPY f ../y\nCOPY f /\n"
    targets = [work.action.target for work in plan(text, tree=tree).works if isinstance(work.action, Put)]
    assert targets == ["/w/", "/w/", "/w/x", "/y", "/"]
