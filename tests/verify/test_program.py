"""The runner's answer is believed only when it adds up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandyard.errors import VerifierError
from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome, TestResult, Verdict
from sandyard.verify.program import RunnerLimits, make_job, read_results
from sandyard.verify.runner.values import Codec, Graph, Malformed
from sandyard.verify.shaping import shape_reward

JOB = make_job(Task("t", "p", ("assert 1", "assert 2")), "pass", RunnerLimits(), uid_base=0, require_root=False)


def answer(results: object, count: str, nonce: str = JOB.nonce) -> str:
    return f"noise\n{nonce} {json.dumps({'results': results})}\n{nonce} {count}\n"


GOOD = [[0, "passed", ""], [1, "failed", "AssertionError"]]


def test_a_sound_answer() -> None:
    assert read_results(JOB, answer(GOOD, "TESTS_PASSED 1 2")) == [
        TestResult(0, TestOutcome.PASSED),
        TestResult(1, TestOutcome.FAILED, "AssertionError"),
    ]


@pytest.mark.parametrize(
    "output",
    [
        "",
        "TESTS_PASSED 2 2",
        answer(GOOD, "TESTS_PASSED 1 2", nonce="0" * 64),
        answer(GOOD, "TESTS_PASSED 2 2"),
        answer(GOOD, "TESTS_PASSED 1 3"),
        answer(GOOD[:1], "TESTS_PASSED 1 1"),
        answer([*GOOD, [2, "passed", ""]], "TESTS_PASSED 2 3"),
        answer([GOOD[0], GOOD[0]], "TESTS_PASSED 2 2"),
        answer([GOOD[0], [1, "splendid", ""]], "TESTS_PASSED 1 2"),
        answer([GOOD[0], [1, "broken", "signal 9"]], "TESTS_PASSED 1 2"),
        answer(None, "TESTS_PASSED 0 2"),
        answer(GOOD, "TESTS_PASSED 1 2") * 2,
    ],
)
def test_an_answer_that_does_not_add_up_is_no_verdict(output: str) -> None:
    with pytest.raises(VerifierError):
        read_results(JOB, output)


def test_nothing_that_is_secret_lies_in_the_program() -> None:
    other = make_job(Task("t", "p", ("assert 1",)), "pass", RunnerLimits(), uid_base=0, require_root=False)
    assert other.nonce != JOB.nonce
    assert len(JOB.nonce) >= 32


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


def codec() -> Codec:
    def refuse(*arguments: object) -> object:
        raise ValueError(arguments)

    return Codec(refuse, refuse)


@given(plain)
def test_plain_data_crosses_unchanged(value: object) -> None:
    wire = json.loads(json.dumps(codec().encode(value, Graph())))
    back = codec().decode(wire, Graph())
    assert back == value
    assert repr(back) == repr(value)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["list", "ref", "dict", "instance"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@given(json_like)
def test_hostile_data_is_a_value_or_malformed(wire: object) -> None:
    try:
        codec().decode(wire, Graph())
    except Malformed:
        return


@pytest.mark.parametrize(
    ("submitted", "passed", "total", "reward"),
    [
        (True, 3, 3, 1.0),
        (True, 1, 3, 0.1 + 0.4 / 3),
        (True, 2, 3, 0.1 + 0.8 / 3),
        (True, 0, 3, 0.1),
        (False, 0, 3, 0.0),
    ],
)
def test_shaping(submitted: bool, passed: int, total: int, reward: float) -> None:
    assert shape_reward(Verdict(submitted, passed, total)) == reward


@given(st.integers(1, 1000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_shaping_keeps_its_order(counts: tuple[int, int]) -> None:
    passed, total = counts
    reward = shape_reward(Verdict(True, passed, total))
    assert reward == 1.0 if passed == total else 0.1 <= reward < 0.5


@pytest.mark.parametrize(("passed", "total"), [(0, 0), (4, 3), (-1, 3)])
def test_a_verdict_that_cannot_be_has_no_reward(passed: int, total: int) -> None:
    with pytest.raises(VerifierError):
        shape_reward(Verdict(True, passed, total))
