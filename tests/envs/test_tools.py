"""Tools: a policy's mistakes are answers, and nothing of them is an exception."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandyard.envs.base import Execution, StepResult, StepStatus, ToolSpec
from sandyard.envs.commands import CommandTemplate
from sandyard.envs.memory import MemoryCodeEnv
from sandyard.envs.observation import cut_text, render_execution
from sandyard.envs.tools import EnvTool, ToolManager, parse_spec
from sandyard.errors import BadRequest, CapacityError

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "how": {"type": "string", "enum": ["up", "down"]},
    },
    "required": ["n"],
    "additionalProperties": False,
}


def manager(handler: Any = lambda arguments: f"n is {arguments['n']}", **options: Any) -> ToolManager:
    return ToolManager([EnvTool(ToolSpec("count", "Counts.", SCHEMA), handler, **options)])


@pytest.mark.parametrize(
    "call",
    [
        {"name": "count", "arguments": {"n": 3}},
        {"name": "count", "arguments": '{"n": 3, "how": "up"}'},
        {"type": "function", "id": "1", "function": {"name": "count", "arguments": '{"n": 3}'}},
    ],
)
async def test_a_call(call: Mapping[str, Any]) -> None:
    assert await manager()(call) == StepResult(observation="n is 3")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"name": "cuont", "arguments": {}}, "no tool 'cuont'. The tools are: count. Did you mean count?"),
        ({"name": "count", "arguments": "{n: 3}"}, "the arguments are not JSON"),
        ({"name": "count", "arguments": "[" * 100000}, "the arguments are not JSON"),
        ({"name": "count", "arguments": json.loads('{"n": ' + "[" * 500 + "]" * 500 + "}")}, "nested deeper than 64"),
        ({"name": "count", "arguments": '{"n": ' + "1" * 5000 + "}"}, "the arguments are not JSON"),
        ({"name": "count", "arguments": [3]}, "the arguments must be an object, not list"),
        ({"name": "count", "arguments": None}, "'n' is a required property"),
        ({"name": "count", "arguments": " "}, "'n' is a required property"),
        ({"name": "count"}, "'n' is a required property"),
        ({"name": "count", "arguments": {"n": "3"}}, "n: '3' is not of type 'integer'"),
        ({"name": "count", "arguments": {"n": True}}, "n: True is not of type 'integer'"),
        ({"name": "count", "arguments": {"n": 10}}, "n: 10 is greater than the maximum of 9"),
        ({"name": "count", "arguments": {"n": 1, "how": "left"}}, "how: 'left' is not one of ['up', 'down']"),
        (
            {"name": "count", "arguments": {"n": 1, "m": 2}},
            "Additional properties are not allowed ('m' was unexpected)",
        ),
        ({"arguments": {}}, "a tool call needs a name and arguments"),
        ({"function": 3}, "a tool call needs a name and arguments"),
    ],
)
async def test_a_call_that_cannot_be_made_says_why(call: Mapping[str, Any], text: str) -> None:
    result = await manager()(call)
    assert result.status is StepStatus.INVALID_CALL
    assert text in result.observation
    assert not result.done


async def test_a_tool_may_end_the_episode_and_may_be_async() -> None:
    async def handler(arguments: Mapping[str, Any]) -> StepResult:
        return StepResult(observation="bye", terminated=True)

    assert (await manager(handler).call("count", {"n": 1})).terminated


async def test_a_slow_tool_is_stopped() -> None:
    result = await manager(lambda arguments: asyncio.sleep(30, "late"), timeout=0.05).call("count", {"n": 1})
    assert result.status is StepStatus.TIMEOUT
    assert "0.05 s" in result.observation


async def test_a_tools_own_timeout_error_is_not_ours() -> None:
    async def handler(arguments: Mapping[str, Any]) -> str:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await manager(handler, timeout=5).call("count", {"n": 1})


async def test_infrastructure_errors_come_through() -> None:
    def handler(arguments: Mapping[str, Any]) -> str:
        raise CapacityError("full")

    with pytest.raises(CapacityError):
        await manager(handler).call("count", {"n": 1})


async def test_register_unregister_copy() -> None:
    tools = manager()
    copied = tools.copy()
    tools.register(EnvTool(ToolSpec("count", "Again.", SCHEMA), lambda arguments: "replaced"))
    assert (await tools.call("count", {"n": 1})).observation == "replaced"
    assert (await copied.call("count", {"n": 1})).observation == "n is 1"
    tools.unregister("count")
    tools.unregister("count")
    assert (tools.names(), copied.names()) == ([], ["count"])
    function = {"name": "count", "description": "Counts.", "parameters": SCHEMA}
    assert copied.tool_infos() == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    "schema",
    [
        {"name": "x", "parameters": {"type": "array"}},
        {"name": "x", "parameters": {"type": "object", "properties": {"a": {"type": "strange"}}}},
        {"name": "x", "parameters": {"type": "object", "properties": {"a": {"$ref": "http://example.com/s.json"}}}},
        {"name": "x", "parameters": 3},
        {"parameters": {"type": "object"}},
    ],
)
def test_a_wrong_schema_is_refused_at_once(schema: Mapping[str, Any]) -> None:
    with pytest.raises(BadRequest):
        EnvTool(parse_spec(schema), lambda arguments: "")


async def test_the_tools_of_an_env() -> None:
    async with MemoryCodeEnv() as env:
        await env.reset()
        tools = ToolManager(EnvTool.from_env(env))
        assert tools.names() == ["run_python", "submit_solution"]
        assert (await tools.call("run_python", {"code": "print(6 * 7)"})).observation == "42"
        assert (await tools.call("submit_solution", {"code": "x"})).terminated


@given(st.text(), st.integers(0, 300))
def test_cut_text_keeps_characters_whole_and_the_limit(text: str, limit: int) -> None:
    cut = cut_text(text, limit)
    cut.encode()
    assert len(cut) <= max(limit, 0)
    if len(text) <= limit and text.isascii():
        assert cut == text


def test_cut_text_says_what_was_cut() -> None:
    cut = cut_text("a" * 500 + "😀" * 500, 200)
    assert cut.startswith("aaa")
    assert cut.endswith("😀😀")
    assert "1000 characters, the middle is cut" in cut


@pytest.mark.parametrize(
    ("execution", "observation", "status"),
    [
        (Execution("a\n", "", 0), "a", StepStatus.OK),
        (Execution("", "", 0), "(no output)", StepStatus.OK),
        (Execution("a\n", "b\n", 3), "a\n[stderr]\nb\n[exit code 3]", StepStatus.TASK_FAILED),
        (Execution("a", "", None), "a\n[ended by a signal]", StepStatus.TASK_FAILED),
        (Execution("a", "", None, True, 2.0), "a\n[stopped: ran longer than 2 s]", StepStatus.TIMEOUT),
    ],
)
def test_what_a_policy_reads_of_a_run(execution: Execution, observation: str, status: StepStatus) -> None:
    result = render_execution(execution)
    assert (result.observation, result.status) == (observation, status)


def test_the_ending_is_never_cut() -> None:
    result = render_execution(Execution("x" * 9000, "", 3), 300)
    assert len(result.observation) <= 300
    assert result.observation.endswith("[exit code 3]")


SPEC = ToolSpec("t", "", {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]})


@pytest.mark.parametrize(
    ("template", "arguments", "command"),
    [
        ("cd /w && pytest {a} -x -q", {"a": "test x.py; rm -rf /"}, "cd /w && pytest 'test x.py; rm -rf /' -x -q"),
        ("echo {{}} {a}", {"a": "$(id)"}, "echo {} '$(id)'"),
        ("f --n={a}", {"a": 3}, "f --n=3"),
        ("f {a}", {"a": ["x", "y"]}, """f '["x", "y"]'"""),
        ("echo 'quoted' \"too\" {a} # {{note}}", {"a": "it's"}, "echo 'quoted' \"too\" 'it'\"'\"'s' # {note}"),
        ("echo a#b {a}", {"a": "c"}, "echo a#b c"),
    ],
)
def test_a_command_is_filled_with_single_words(template: str, arguments: Mapping[str, Any], command: str) -> None:
    assert CommandTemplate(template, SPEC).fill(arguments) == command


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("echo '{a}'", "inside ' quotes"),
        ('echo "x {a}"', 'inside " quotes'),
        ("echo `f {a}`", "inside ` quotes"),
        ("echo \\{a}", "behind a backslash"),
        ("echo # {a}", "in a comment"),
        ("cat <<EOF\n{a}\nEOF", "here-document"),
        ("echo $'\\'{a}'", "not allowed"),
        ("echo {b}", "not a required argument"),
        ("echo {c}", "not a required argument"),
        ("echo {}", "is not an argument's name"),
        ("echo {a.x}", "is not an argument's name"),
        ("echo {a!r}", "may not have a format"),
        ("echo {a:>9}", "may not have a format"),
        ("echo {a", "command of tool t"),
    ],
)
def test_a_place_that_cannot_be_filled_safely_is_refused(template: str, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        CommandTemplate(template, SPEC)
    assert text in str(caught.value)
