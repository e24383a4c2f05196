"""Tools of one trajectory, and the one way in which a policy's tool calls reach them.

Whatever the policy gets wrong (a tool that does not exist, JSON that does not parse, arguments that
do not fit) becomes a `StepResult` with status INVALID_CALL and a text that says what was expected.
Only infrastructure errors and programming errors come out as exceptions.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from jsonschema.protocols import Validator

from sandyard.envs.base import Env, StepResult, StepStatus, ToolSpec
from sandyard.envs.ledger import Ledger
from sandyard.envs.observation import DEFAULT_LIMIT, cut_text
from sandyard.envs.schema import compile_schema, explain_mismatch
from sandyard.errors import BadRequest

# JSON that the parser still takes would overflow the stack of a validator or a handler.
_MAX_DEPTH = 64
ToolAnswer = str | StepResult
ToolHandler = Callable[[Mapping[str, Any]], ToolAnswer | Awaitable[ToolAnswer]]


def invalid_call(observation: str) -> StepResult:
    """The answer to a call that could not be made."""
    return StepResult(observation=observation, status=StepStatus.INVALID_CALL)


def parse_spec(schema: ToolSpec | Mapping[str, Any]) -> ToolSpec:
    """A `ToolSpec` from one, from an OpenAI `tools=` entry, or from its `function` part.

    Raises `BadRequest` naming the field.
    """
    if isinstance(schema, ToolSpec):
        return schema
    function = schema.get("function", schema)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise BadRequest("a tool needs a name", field="name")
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, Mapping):
        raise BadRequest(f"tool {name}: parameters must be a JSON schema", field="parameters")
    return ToolSpec(name, str(function.get("description", "")), parameters)


@dataclass(slots=True)
class EnvTool:
    """A tool: what the policy sees of it and what it does.

    `handler(arguments)` returns the observation, or a whole `StepResult`; it may be async. After
    `timeout` seconds an async handler is cancelled and the answer is TIMEOUT. `own_limit` is the time in
    which the handler ends by itself, for those who check the chain of deadlines. `ledger` is the episode's
    account, the same for all tools of an env.
    """

    spec: ToolSpec
    handler: ToolHandler
    timeout: float | None = None
    observation_limit: int = DEFAULT_LIMIT
    own_limit: float | None = None
    ledger: Ledger = field(default_factory=Ledger)
    _validator: Validator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for limit in (self.timeout, self.own_limit):
            if limit is not None and not 0 < limit < math.inf:
                raise BadRequest(f"tool {self.spec.name}: a timeout of {limit} s", field="timeout")
        self._validator = compile_schema(self.spec.name, self.spec.parameters)

    @classmethod
    def from_env(cls, env: Env) -> list[EnvTool]:
        """One tool for each of the env's, each doing `env.step`, for one episode: they share one account."""
        limits, ledger = env.time_limits(), Ledger()

        def stepper(name: str) -> ToolHandler:
            return lambda arguments: env.step(name, arguments)

        return [cls(spec, stepper(spec.name), own_limit=limits.get(spec.name), ledger=ledger) for spec in env.tools()]

    @property
    def time_limit(self) -> float | None:
        """Seconds after which a call is over, if anything sees to it."""
        return min((limit for limit in (self.timeout, self.own_limit) if limit is not None), default=None)

    @property
    def last_result(self) -> StepResult | None:
        """The last answer in the episode, whichever of its tools gave it."""
        return self.ledger.last

    @property
    def done(self) -> bool:
        return self.ledger.done

    @property
    def episode_reward(self) -> float | None:
        """The sum of the episode's rewards, None while none was due."""
        return self.ledger.reward

    def tool_info(self) -> dict[str, Any]:
        return self.spec.to_openai()

    async def call(self, arguments: Mapping[str, Any]) -> StepResult:
        mismatch = explain_mismatch(self._validator, arguments)
        if mismatch is not None:
            return invalid_call(f"{self.spec.name}: the arguments do not fit: {mismatch}")
        try:
            async with asyncio.timeout(self.timeout) as deadline:
                answer = self.handler(arguments)
                answer = await answer if inspect.isawaitable(answer) else answer
        except TimeoutError:
            if not deadline.expired():
                raise
            text = f"{self.spec.name} was stopped: it ran longer than {self.timeout:g} s"
            return self.ledger.record(StepResult(observation=text, status=StepStatus.TIMEOUT))
        result = answer if isinstance(answer, StepResult) else StepResult(observation=answer)
        return self.ledger.record(replace(result, observation=cut_text(result.observation, self.observation_limit)))


class ToolManager:
    """The tools of one trajectory by name; a name registered again replaces the tool before it."""

    def __init__(self, tools: Iterable[EnvTool] | Mapping[str, EnvTool] = ()) -> None:
        self._tools: dict[str, EnvTool] = {}
        for tool in tools.values() if isinstance(tools, Mapping) else tools:
            self.register(tool)

    def register(self, tool: EnvTool) -> None:
        self._tools[tool.spec.name] = tool

    def unregister(self, name: str) -> EnvTool | None:
        """Forget a tool and return it; one that is not there is no error."""
        return self._tools.pop(name, None)

    def names(self) -> list[str]:
        return list(self._tools)

    def specs(self) -> list[ToolSpec]:
        return [tool.spec for tool in self._tools.values()]

    def copy(self) -> ToolManager:
        return ToolManager(list(self._tools.values()))

    def tool_infos(self) -> list[dict[str, Any]]:
        """The `tools=` argument of a chat template."""
        return [spec.to_openai() for spec in self.specs()]

    def time_limits(self) -> dict[str, float]:
        """Seconds after which calls are over, by tool, where anything sees to it."""
        return {name: limit for name, tool in self._tools.items() if (limit := tool.time_limit) is not None}

    @property
    def done(self) -> bool:
        return any(ledger.done for ledger in self._ledgers())

    @property
    def episode_reward(self) -> float | None:
        """The sum of what all tools earned, None while no reward was due."""
        earned = [ledger.reward for ledger in self._ledgers() if ledger.reward is not None]
        return sum(earned) if earned else None

    def begin(self) -> None:
        """The next episode of the same tools."""
        for ledger in self._ledgers():
            ledger.begin()

    def _ledgers(self) -> list[Ledger]:
        return list({id(tool.ledger): tool.ledger for tool in self._tools.values()}.values())

    async def __call__(self, call: Mapping[str, Any]) -> StepResult:
        """Do one tool call: `{"name", "arguments"}`, or OpenAI's `{"function": {...}}` around it.

        `arguments` is an object or its JSON text; none at all is an empty object.
        """
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return invalid_call("a tool call needs a name and arguments")
        return await self.call(function["name"], function.get("arguments", {}))

    async def call(self, name: str, arguments: object) -> StepResult:
        """Call tool `name` with `arguments` as they came from the policy."""
        tool = self._tools.get(name)
        if tool is None:
            return invalid_call(self._unknown(name))
        if arguments is None or (isinstance(arguments, str | bytes) and not arguments.strip()):
            arguments = {}
        if isinstance(arguments, str | bytes):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                return invalid_call(f"{name}: the arguments are not JSON: {error}")
        if not isinstance(arguments, Mapping):
            return invalid_call(f"{name}: the arguments must be an object, not {type(arguments).__name__}")
        if _deeper_than(_MAX_DEPTH, arguments):
            return invalid_call(f"{name}: the arguments are nested deeper than {_MAX_DEPTH}")
        return await tool.call(arguments)

    def _unknown(self, name: str) -> str:
        near = get_close_matches(name, self._tools, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return cut_text(f"There is no tool {name[:100]!r}. The tools are: {', '.join(self._tools) or 'none'}.{hint}")


def _deeper_than(limit: int, value: object) -> bool:
    level: list[object] = [value]
    for _ in range(limit + 1):
        level = [
            item
            for container in level
            if isinstance(container, Mapping | list)
            for item in (container.values() if isinstance(container, Mapping) else container)
        ]
        if not level:
            return False
    return True
