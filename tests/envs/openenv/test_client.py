"""The client: whose answer it is, what a failure means, and what it never does silently."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from sandyard.envs.base import StepStatus
from sandyard.envs.openenv.client import ClientOptions, OpenEnvClient
from sandyard.envs.openenv.failures import ServerFault, SessionLost
from sandyard.envs.sync import SyncEnv
from sandyard.errors import BadRequest, Boundary, CapacityError, Conflict, CreateFailed, SandyardError, Unsupported
from sandyard.tasks.base import Task
from tests.envs.openenv.probes import serving
from tests.envs.openenv.stub import echoing, error, observation, stubbed

QUICK = ClientOptions(step_timeout=0.3, reset_timeout=0.3, connect_timeout=5, capacity_wait=0.5)


async def say(env: OpenEnvClient, message: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((await env.step("step", {"message": message})).observation)
    return told


async def test_an_episode_on_a_server_of_ours() -> None:
    async with serving("code", "memory") as server, OpenEnvClient(server.url) as env:
        assert [spec.name for spec in env.tools()] == ["run_python", "submit_solution"]
        task = Task("t1", "Add.", tests=["assert hidden"], reference="secret", metadata={"seed": 1})
        assert (await env.reset(task)).observation == "Add."
        assert (await env.state())["episode_id"] == "t1"
        assert (await env.step("run_python", {"code": "print(1 + 1)"})).observation == "2"
        failed = await env.step("run_python", {"code": "1 / 0"})
        assert (failed.status, failed.info["exit_code"]) == (StepStatus.TASK_FAILED, 1)
        assert (await env.step("run_python", {})).status is StepStatus.INVALID_CALL
        assert (await env.step("fly", {})).status is StepStatus.INVALID_CALL
        over = await env.step("submit_solution", {"code": "x = 1"})
        assert (over.terminated, over.reward, env.submission) == (True, None, "x = 1")
        assert (await env.step("run_python", {"code": "1"})).status is StepStatus.INVALID_CALL
        with pytest.raises(Unsupported):
            await env.execute("print(1)")
        assert (await env.reset()).observation == ""
        assert env.submission is None


async def test_a_game_with_its_reward_through_the_synchronous_face() -> None:
    async with serving("guessing") as server:
        url = server.url

        def play() -> tuple[float | None, bool, bool]:
            with SyncEnv(OpenEnvClient(url)) as env:
                env.reset(Task("g", "", metadata={"seed": 4}))
                result = env.step("guess", {"number": 0})
                while not result.done:
                    assert result.reward is None
                    result = env.step("guess", {"number": 0})
                return result.reward, result.truncated, result.terminated

        assert await asyncio.to_thread(play) == (0.0, True, False)


async def test_what_enters_the_server_of_a_task() -> None:
    async with stubbed(echoing) as stub, OpenEnvClient(stub.url, ClientOptions(headers={"X-Team": "blue"})) as env:
        await env.reset(Task("t1", "prompt", tests=["assert hidden"], reference="secret", metadata={"seed": 1}))
        assert stub.heard == [{"type": "reset", "data": {"episode_id": "t1", "seed": 1}}]
        assert [headers["X-Team"] for headers in stub.headers] == ["blue", "blue"]
        with pytest.raises(BadRequest, match="not JSON"):
            await env.reset(Task("t1", "", metadata={"odd": object()}))


async def test_after_a_timeout_the_session_is_lost_and_no_answer_is_stale() -> None:
    async def slow(message: dict[str, Any]) -> object:
        if message["data"].get("message") == "slow":
            await asyncio.sleep(0.6)
        return await echoing(message)

    async with stubbed(slow) as stub, OpenEnvClient(stub.url, QUICK) as env:
        await env.reset()
        assert await say(env, "one") == {"said": "one"}
        with pytest.raises(SessionLost, match=r"not answered within 0\.3 s") as lost:
            await say(env, "slow")
        assert lost.value.boundary is Boundary.SANDBOX
        await asyncio.sleep(0.5)  # the late answer is on its way now
        for _ in range(2):
            with pytest.raises(SessionLost, match="reset begins a new episode"):
                await say(env, "two")
        with pytest.raises(SessionLost):
            await env.connect()
        assert stub.sessions == 1
        await env.reset()
        assert stub.sessions == 2
        assert await say(env, "three") == {"said": "three"}


async def test_a_cancelled_call_takes_the_session_with_it() -> None:
    async with stubbed(echoing) as stub, OpenEnvClient(stub.url) as env:
        await env.reset()
        call = asyncio.create_task(say(env, "given up"))
        await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(SessionLost, match="given up"):
            await say(env, "next")


async def test_concurrent_calls_are_queued_and_each_gets_its_own_answer() -> None:
    async with stubbed(echoing) as stub, OpenEnvClient(stub.url) as env:
        await env.reset()
        said = await asyncio.gather(*(say(env, f"{number}") for number in range(20)))
        assert said == [{"said": f"{number}"} for number in range(20)]


async def test_concurrent_calls_are_refused_where_asked_for() -> None:
    async with stubbed(echoing) as stub, OpenEnvClient(stub.url, ClientOptions(concurrent="refuse")) as env:
        await env.reset()
        results = await asyncio.gather(say(env, "a"), say(env, "b"), return_exceptions=True)
        assert results[0] == {"said": "a"}
        assert isinstance(results[1], Conflict)
        assert await say(env, "c") == {"said": "c"}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([observation(said="x"), observation(said="y")], "nobody waits for"),
        ({"type": "state", "data": {}}, "answered step with 'state'"),
        ("not json", "not a message of the protocol"),
        ({"type": "observation", "data": []}, "not a message of the protocol"),
        (error("SESSION_ERROR", "idle"), "the server ended the session: idle"),
    ],
    ids=["two", "foreign", "noise", "shape", "idle"],
)
async def test_a_server_that_breaks_the_protocol_loses_its_session(answer: object, why: str) -> None:
    async def wrong(message: dict[str, Any]) -> object:
        return answer if message["type"] == "step" else observation()

    async with stubbed(wrong) as stub, OpenEnvClient(stub.url, QUICK) as env:
        await env.reset()
        with pytest.raises(SessionLost, match=why):
            await step_until_lost(env)
        with pytest.raises(SessionLost):
            await env.step("step", {"message": "x"})


async def step_until_lost(env: OpenEnvClient) -> None:
    for _ in range(3):
        await env.step("step", {"message": "x"})
        await asyncio.sleep(0.05)


async def test_a_session_that_the_server_closes_is_lost() -> None:
    async with serving(idle_timeout=0.2) as server, OpenEnvClient(server.url) as env:
        await env.reset()
        await asyncio.sleep(0.5)
        with pytest.raises(SessionLost, match=r"0\.2 s without a request"):
            await env.step("do", {"how": "hello"})
        assert (await env.reset()).observation == "ready"
    async with serving() as server:
        env = OpenEnvClient(server.url)
        await env.reset()
        await server.stop()
        with pytest.raises(SessionLost, match=r"closed the session|broke"):
            await env.step("do", {"how": "hello"})
        await env.close()


async def test_a_full_server_is_asked_again_and_then_is_capacity() -> None:
    full = error("CAPACITY_REACHED", "full", active_sessions=1, max_sessions=1)
    patient = ClientOptions(capacity_wait=5)
    async with (
        stubbed(echoing, greeting=lambda number: full if number < 2 else None) as stub,
        OpenEnvClient(stub.url, patient) as env,
    ):
        assert stub.sessions == 3
        await env.reset()
        assert await say(env, "in") == {"said": "in"}
    async with stubbed(echoing, greeting=lambda number: full) as stub:
        env = OpenEnvClient(stub.url, QUICK)
        started = time.monotonic()
        with pytest.raises(CapacityError, match="full"):
            await env.reset()
        assert time.monotonic() - started < 3
        assert stub.sessions >= 3
        await env.close()


async def test_a_real_full_server_frees_its_place_to_who_waits() -> None:
    async with serving(max_sessions=1) as server:
        first, second = OpenEnvClient(server.url), OpenEnvClient(server.url)
        await first.reset()
        waiting = asyncio.create_task(second.reset())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await first.close()
        assert (await waiting).observation == "ready"
        await second.close()


@pytest.mark.parametrize(
    ("told", "kind", "boundary"),
    [
        (error("EXECUTION_ERROR", "boom"), ServerFault, Boundary.SANDBOX),
        (error("EXECUTION_ERROR", "no room", boundary="capacity", retry_after=3), CapacityError, Boundary.CAPACITY),
        (error("EXECUTION_ERROR", "reset first", boundary="client"), Conflict, Boundary.CLIENT),
        (error("FACTORY_ERROR"), CreateFailed, Boundary.SANDBOX),
        (error("UNKNOWN_TYPE"), BadRequest, Boundary.CLIENT),
        (error("SOMETHING_NEW"), ServerFault, Boundary.SANDBOX),
        (observation(reward=float("nan")), ServerFault, Boundary.SANDBOX),
        (observation(reward="much"), ServerFault, Boundary.SANDBOX),
    ],
)
async def test_errors_of_the_server_are_typed_and_attributed(
    told: object, kind: type[SandyardError], boundary: Boundary
) -> None:
    async def failing(message: dict[str, Any]) -> object:
        return told if message["type"] == "step" else observation()

    async with stubbed(failing) as stub, OpenEnvClient(stub.url, QUICK) as env:
        await env.reset()
        with pytest.raises(kind) as raised:
            await env.step("step", {"message": "x"})
        assert raised.value.boundary is boundary


async def test_an_action_that_does_not_fit_is_the_policys() -> None:
    async def strict(message: dict[str, Any]) -> object:
        wrong = error("VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["message"]}])
        return wrong if message["type"] == "step" else observation()

    async with stubbed(strict) as stub, OpenEnvClient(stub.url) as env:
        await env.reset()
        result = await env.step("step", {"masage": "x"})
        assert (result.status, "loc" in result.observation) == (StepStatus.INVALID_CALL, True)
        assert "There is no tool" in (await env.step("fly", {})).observation


async def test_plain_servers_have_one_tool_and_their_own_reward() -> None:
    async def answers(message: dict[str, Any]) -> object:
        if message["type"] == "reset":
            return observation(stdout="hello\n")
        return observation(reward=True, done=True, stdout="out\n", stderr="err", exit_code=1)

    async with stubbed(answers) as stub, OpenEnvClient(stub.url) as env:
        (spec,) = env.tools()
        assert (spec.name, spec.parameters["required"]) == ("step", ["message"])
        assert (await env.reset()).observation == "hello"
        result = await env.step("step", {"message": "x"})
        assert (result.observation, result.reward, result.terminated) == ("out\nerr", 1.0, True)
        assert result.status is StepStatus.TASK_FAILED
        assert (await env.step("step", {"message": "x"})).status is StepStatus.INVALID_CALL
        assert len(stub.heard) == 2


async def test_an_answer_too_long_ends_the_session() -> None:
    async with serving() as server, OpenEnvClient(server.url, ClientOptions(max_message=1 << 16)) as env:
        await env.reset()
        with pytest.raises(SessionLost):
            await env.step("do", {"how": "big"})


async def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENENV_BASE_URL", raising=False)
    with pytest.raises(BadRequest, match="OPENENV_BASE_URL"):
        OpenEnvClient()
    with pytest.raises(BadRequest, match="not an address"):
        OpenEnvClient("localhost:8000")
    monkeypatch.setenv("OPENENV_BASE_URL", "wss://yard.example/env/")
    assert OpenEnvClient().base_url == "https://yard.example/env"
    env = OpenEnvClient("http://127.0.0.1:9", QUICK)
    with pytest.raises(Conflict, match="connect or reset"):
        env.tools()
    with pytest.raises(Conflict, match="reset first"):
        await env.step("x", {})
    with pytest.raises(CreateFailed, match="connect"):
        await env.reset()
    await env.close()
