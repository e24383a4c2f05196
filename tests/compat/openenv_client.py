"""The official OpenEnv client, alone, against servers of ours: OPENENV_CODE_URL serves the code env and
OPENENV_ECHO_URL the echo env. Prints one line a check and ends with 1 if any failed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.interfaces import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

CODE = os.environ["OPENENV_CODE_URL"]
ECHO = os.environ["OPENENV_ECHO_URL"]


class Code(Action):  # type: ignore[misc]  # its package is in the venv of this script alone
    code: str


class Ran(Observation):  # type: ignore[misc]
    """As typed clients have it: a field that it does not know is an error."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class CodeClient(EnvClient[Code, Ran, State]):  # type: ignore[misc]
    def _step_payload(self, action: Code) -> dict[str, Any]:
        return {"code": action.code}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Ran]:
        observation = Ran(**payload["observation"])
        return StepResult(observation=observation, reward=payload.get("reward"), done=bool(payload.get("done")))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(episode_id=payload.get("episode_id"), step_count=payload.get("step_count", 0))


async def a_typed_coding_client() -> None:
    async with CodeClient(base_url=CODE) as env:
        begun = await env.reset()
        assert (begun.observation.exit_code, begun.done, begun.reward) == (0, False, None)
        ran = await env.step(Code(code="print(40 + 2)"))
        assert (ran.observation.stdout, ran.observation.exit_code) == ("42\n", 0)
        failed = await env.step(Code(code="1 / 0"))
        assert failed.observation.exit_code == 1
        assert "ZeroDivisionError" in failed.observation.stderr
        left = await env.step(Code(code="raise SystemExit(3)"))
        assert left.observation.exit_code == 3
        state = await env.state()
        assert state.step_count == 3


async def the_generic_client_with_tools() -> None:
    async with GenericEnvClient(base_url=CODE) as env:
        begun = await env.reset(seed=3, episode_id="e1")
        assert begun.done is False
        ran = await env.step({"tool": "run_python", "arguments": {"code": "print(7)"}})
        assert ran.observation["stdout"] == "7"
        assert (await env.state())["episode_id"] == "e1"
        over = await env.step({"tool": "submit_solution", "arguments": {"code": "x = 1"}})
        assert (over.done, over.reward) == (True, None)
        await refused(env.step({"code": "print(1)"}), "reset")
        assert (await env.reset()).done is False


async def mcp_tools_as_steps() -> None:
    async with GenericEnvClient(base_url=ECHO) as env:
        await env.reset()
        listed = await env.step({"type": "list_tools"})
        assert [tool["name"] for tool in listed.observation["tools"]] == ["echo", "stop"]
        said = await env.step({"type": "call_tool", "tool_name": "echo", "arguments": {"message": "hi"}})
        assert said.observation["result"]["data"] == "hi"
        over = await env.step({"type": "call_tool", "tool_name": "stop", "arguments": {}})
        assert (over.done, over.reward) == (True, 1.0)


async def the_tool_client() -> None:
    """0.10 keeps a session over HTTP for its calls and joins it with its socket; 0.3 does all by its socket."""
    async with MCPToolClient(base_url=ECHO) as env, MCPToolClient(base_url=ECHO) as other:
        await env.reset()
        await other.reset()
        assert [tool.name for tool in await env.list_tools()] == ["echo", "stop"]
        assert await env.call_tool("echo", message="hi") == "hi"
        assert (await env.state()).step_count == 1
        assert (await other.state()).step_count == 0


async def seventeen_tool_clients_free_their_places() -> None:
    for number in range(17):  # one more than the server has places
        async with MCPToolClient(base_url=ECHO) as env:
            await env.reset()
            assert await env.call_tool("echo", message=f"{number}") == f"{number}"


async def a_step_before_reset_is_refused() -> None:
    async with GenericEnvClient(base_url=ECHO) as env:
        await refused(env.step({"message": "hi"}), "reset")


async def sessions_are_apart() -> None:
    async def play(number: int) -> None:
        async with GenericEnvClient(base_url=CODE) as env:
            await env.reset()
            await env.step({"code": f"open('mine', 'w').write('{number}')"})
            assert (await env.step({"code": "print(open('mine').read())"})).observation["stdout"] == f"{number}\n"

    await asyncio.gather(*(play(number) for number in range(6)))


async def sixteen_episodes_one_after_another() -> None:
    for number in range(16):
        async with GenericEnvClient(base_url=ECHO) as env:
            await env.reset()
            assert (await env.step({"message": f"{number}"})).observation["text"] == f"{number}"


async def refused(call: Awaitable[object], word: str) -> None:
    (answer,) = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(answer, RuntimeError), answer
    assert word in str(answer), answer


CHECKS: list[Callable[[], Awaitable[None]]] = [
    a_typed_coding_client,
    the_generic_client_with_tools,
    mcp_tools_as_steps,
    the_tool_client,
    seventeen_tool_clients_free_their_places,
    a_step_before_reset_is_refused,
    sessions_are_apart,
    sixteen_episodes_one_after_another,
]


def main() -> int:
    failed = 0
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            asyncio.run(asyncio.wait_for(check(), 60))
        except Exception as error:  # noqa: BLE001  whatever a check meets is its result
            failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            print(f"ok {name}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
