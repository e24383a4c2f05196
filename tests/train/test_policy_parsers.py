from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandyard.train.policies.chat import render_call
from sandyard.train.policies.parsers import parse_hermes

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.text(min_size=1), st.dictionaries(st.text(), json_values))
def test_what_is_rendered_is_parsed(name: str, arguments: dict[str, object]) -> None:
    text = render_call(name, arguments)
    if "<tool_call>" in json.dumps([name, arguments]) or "</tool_call>" in json.dumps([name, arguments]):
        return
    (call,) = parse_hermes(text).calls
    assert (call.name, call.arguments) == (name, arguments)


@given(st.text(alphabet='<>/tol_cal{}":,[]name arguments\n'))
def test_no_text_makes_it_raise(text: str) -> None:
    parse_hermes(text)
    parse_hermes(f"<tool_call>{text}</tool_call>")


def test_text_without_calls_is_content() -> None:
    parsed = parse_hermes("  I am done. ")
    assert (parsed.content, list(parsed.calls), parsed.error) == ("I am done.", [], None)


def test_calls_keep_their_order() -> None:
    parsed = parse_hermes(render_call("a", {}) + "\n" + render_call("b", {"x": 1}))
    assert [call.name for call in parsed.calls] == ["a", "b"]


def test_arguments_may_be_a_json_string() -> None:
    parsed = parse_hermes('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>')
    assert parsed.calls[0].arguments == {"x": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool_call>{", "without </tool_call>"),
        ("x</tool_call>", "without <tool_call>"),
        ("<tool_call>{]</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "a", "arguments": {"code": "x\ny"}}</tool_call>', "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "a tool call is"),
        ('<tool_call>{"name": 3}</tool_call>', "a tool call is"),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "JSON object"),
        ('<tool_call>{"name": "a", "arguments": "{"}</tool_call>', "arguments of a are not valid JSON"),
        ('<tool_call>{"name": "a", "arguments": {"n": ' + "1" * 5000 + "}}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "a", "arguments": "' + "1" * 5000 + '"}</tool_call>', "arguments of a are not valid"),
        ("<tool_call>" + "[" * 100000 + "</tool_call>", "not valid JSON"),
        (render_call("a", {}) + "<tool_call>oops</tool_call>", "not valid JSON"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_called(text: str, said: str) -> None:
    parsed = parse_hermes(text)
    assert said in (parsed.error or "")
    assert not parsed.calls
