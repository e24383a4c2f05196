"""A tiny random model with a byte tokenizer, and in-memory envs and verifiers: no files, no sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sandyard.envs.base import Env, Execution, StepResult, StepStatus, ToolSpec
from sandyard.tasks.base import Task
from sandyard.train.policies.chat import HERMES_TEMPLATE
from sandyard.train.policies.transformers import TransformersPolicy
from sandyard.verify.base import Verdict, Verifier

torch.set_num_threads(1)

RUN = ToolSpec("run_python", "Run a program.", {"type": "object", "properties": {"code": {"type": "string"}}})
SUBMIT = ToolSpec("submit_solution", "Submit.", {"type": "object", "properties": {"code": {"type": "string"}}})


def make_tokenizer(template: str | None = HERMES_TEMPLATE) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(tokenizer: Any, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "initializer_range": 0.1,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def make_policy(seed: int = 0, **options: Any) -> TransformersPolicy:
    tokenizer = make_tokenizer()
    return TransformersPolicy(make_model(tokenizer, seed), tokenizer, **options)


class FakeEnv(Env):
    """`run_python` answers "ok", `submit_solution` ends the episode; `fail(step number)` may return an error
    to raise (0 is reset)."""

    live = 0
    most = 0

    def __init__(self, delay: float = 0.0, fail: Callable[[int], Exception | None] = lambda step: None) -> None:
        self._delay = delay
        self._fail = fail
        self._steps = 0
        self._submission: str | None = None
        self.open = False

    async def reset(self, task: Task | None = None) -> StepResult:
        self.open = True
        FakeEnv.live += 1
        FakeEnv.most = max(FakeEnv.most, FakeEnv.live)
        self._raise()
        return StepResult()

    def _raise(self) -> None:
        error = self._fail(self._steps)
        self._steps += 1
        if error is not None:
            raise error

    async def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        await asyncio.sleep(self._delay)
        self._raise()
        if tool_name == "submit_solution":
            self._submission = str(arguments.get("code"))
            return StepResult("submitted", terminated=True)
        if tool_name != "run_python":
            return StepResult(f"Error: no tool {tool_name}", status=StepStatus.INVALID_CALL)
        return StepResult("ok")

    def tools(self) -> Sequence[ToolSpec]:
        return [RUN, SUBMIT]

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        return Execution("", "", 0)

    @property
    def submission(self) -> str | None:
        return self._submission

    async def close(self) -> None:
        if self.open:
            FakeEnv.live -= 1
        self.open = False


class FakeVerifier(Verifier):
    """A solution passes as many of the task's tests as it has letters "x". `fail(attempt)` may return an
    error to raise."""

    def __init__(self, fail: Callable[[int], Exception | None] = lambda attempt: None, delay: float = 0.0) -> None:
        self.calls = 0
        self._fail = fail
        self._delay = delay

    async def verify(self, task: Task, solution: str | None) -> Verdict:
        error = self._fail(self.calls)
        self.calls += 1
        await asyncio.sleep(self._delay)
        if error is not None:
            raise error
        passed = min((solution or "").count("x"), len(task.tests))
        return Verdict(solution is not None, passed, len(task.tests))

    async def close(self) -> None:
        return None


def make_tasks(count: int, tests: int = 2) -> list[Task]:
    return [Task(f"t{i}", f"Do {i}.", tests=("assert x",) * tests, family=f"f{i % 2}") for i in range(count)]
