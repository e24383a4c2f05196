"""Our envs in TRL's real `GRPOTrainer`, on a tiny random model whose turns are scripted."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sandyard.envs.base import Env
from sandyard.envs.embedded.echo import EchoEnv
from sandyard.envs.embedded.guessing import GuessingEnv
from sandyard.envs.interop.trl import TrlEnvironments, row_task, tool_functions
from sandyard.envs.memory import MemoryCodeEnv
from sandyard.envs.sync import SyncEnv
from sandyard.errors import BadRequest, ConfigError, SandboxDied, VerifierError
from sandyard.tasks.base import Task
from tests.envs.pool.probes import ProbeEnv
from tests.train.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = {thread.name for thread in threading.enumerate()}
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith("sandyard") and t.name not in before]


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# ------------------------------------------------------------------------------------ the adapter alone


def test_tools_are_methods_with_their_schema() -> None:
    with TrlEnvironments(GuessingEnv) as factory:
        environment = factory()
        assert type(environment) is type(factory())
        public = {name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if name[0] != "_"}
        assert public == {"reset", "get_reward", "guess"}
        assert str(inspect.signature(environment.guess)) == "(number: int) -> str"
        assert type(environment).__name__ == "GuessingEnv"


def test_an_episode_and_its_reward() -> None:
    with TrlEnvironments(GuessingEnv) as factory:
        environment = factory()
        rewards = []
        for seed in (3, 3, 4):
            assert "from 1 to 100" in environment.reset(prompt="p", seed=seed)
            low, high, text = 1, 100, ""
            while "Right" not in text:
                middle = (low + high) // 2
                text = environment.guess(number=middle)
                low, high = (middle + 1, high) if "Higher" in text else (low, middle - 1)
            assert environment.guess(number=1) == "The episode is over."
            rewards.append(environment.get_reward())
        assert rewards == [1.0] * 3
        environment.reset(seed=3)
        assert environment.get_reward() == 0.0  # nothing was earned, and nothing failed
        assert "is not of type 'integer'" in environment.guess(number="x")
        assert "'number' is a required property" in environment.guess()


def test_an_infrastructure_failure_is_no_reward() -> None:
    with TrlEnvironments(ProbeEnv) as factory:
        environment = factory()
        environment.reset()
        environment.count()
        assert "not scored" in environment.fail(how="died")
        assert "not scored" in environment.count()
        assert environment.get_reward() is None
        environment.reset()
        environment.count()
        environment.count()
        assert environment.get_reward() == 3.0
        environment.reset()
        environment.fail(how="nan")
        assert environment.get_reward() is None


def test_a_fault_of_the_program_is_raised_where_trl_does_not_hide_it() -> None:
    with TrlEnvironments(ProbeEnv) as factory:
        environment = factory()
        environment.reset()
        assert "not scored" in environment.fail(how="a bug")
        with pytest.raises(KeyError, match="a bug"):
            environment.get_reward()
        environment.reset()
        assert environment.get_reward() == 0.0


def test_a_reset_that_fails_is_tried_again_on_a_fresh_env_and_then_masked() -> None:
    made: list[ProbeEnv] = []

    def make() -> ProbeEnv:
        made.append(ProbeEnv(fail_reset="bad" if len(made) < failing else ""))
        return made[-1]

    for failing, reward in ((1, 0.0), (9, None)):
        made.clear()
        with TrlEnvironments(make) as factory:
            environment = factory()
            environment.reset(task_id="bad")
            assert environment.get_reward() == reward
            assert len(made) == min(failing + 1, 3)


def test_a_call_that_hangs_is_the_infrastructures() -> None:
    with TrlEnvironments(GuessingEnv, step_timeout=0.3) as factory:
        environment = factory()
        rollout = environment._rollout
        rollout.env.env.register_tool(rollout.env.env.tools()[0], lambda env, arguments: asyncio.sleep(30, "late"))
        environment.reset()
        assert "TimeoutError" in environment.guess(number=3)
        assert environment.get_reward() is None


def test_a_tool_that_may_outlast_its_call_is_refused_at_once() -> None:
    factory = TrlEnvironments(ProbeEnv, step_timeout=50.0)
    with pytest.raises(ConfigError, match="tool wait may run 50 s"):
        factory()
    factory.close()
    factory.close()


class Reserved(EchoEnv):
    def __init__(self) -> None:
        super().__init__()
        self.register_tool({"name": "get_reward", "parameters": {"type": "object"}}, lambda env, arguments: "")


def test_a_tool_by_a_name_of_trls_is_refused() -> None:
    with TrlEnvironments(Reserved) as factory, pytest.raises(BadRequest, match="TRL has its own use"):
        factory()


def test_scored_by_a_verifier() -> None:
    async def score(task: Task, submission: str | None) -> float:
        if submission == "broken":
            raise VerifierError("cannot tell")
        return 1.0 if submission == task.tests[0] else 0.25

    with TrlEnvironments(MemoryCodeEnv, score=score) as factory:
        environment = factory()
        for submission, reward in (("x = 1", 1.0), ("x = 2", 0.25), ("broken", None)):
            environment.reset(prompt="p", task_id="t1", test_list=["x = 1"])
            assert environment.run_python(code="print(6 * 7)") == "42"
            environment.submit_solution(code=submission)
            assert environment.get_reward() == reward


def test_a_row_is_a_task_without_its_prompt() -> None:
    row = {"prompt": "p", "task_id": 7, "test_list": ["assert x"], "test_setup_code": "x = 1", "seed": 5, "other": 1}
    assert row_task(row) == Task("7", "", ("assert x",), "x = 1", metadata={"seed": 5})
    assert row_task({}) == Task("", "")


# ------------------------------------------------------------------------------------ the real trainer


def scripted(model: Any, tokenizer: Any, turns: Sequence[Sequence[str]]) -> None:
    """Let `model` say `turns`, one list for each generation, one text for each row in it."""
    left = list(turns)

    def generate(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        texts = left.pop(0)
        assert len(texts) == len(input_ids), (len(texts), len(input_ids))
        said = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
        width = max(map(len, said))
        padded = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in said]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    model.generate = generate


def make_trainer(folder: Path, turns: Sequence[Sequence[str]], rows: int = 1, **options: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = make_tokenizer(qwen3_chat_template)
    model = make_model(tokenizer, max_position_embeddings=8192)
    scripted(model, tokenizer, turns)
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4000,
        max_steps=len(turns) // 3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "Go."}], "seed": n} for n in range(rows)])
    return GRPOTrainer(model=model, args=config, processing_class=tokenizer, train_dataset=data, **options)


def watch(trainer: Any) -> list[dict[str, Any]]:
    """What every step computed."""
    seen: list[dict[str, Any]] = []
    inner: Callable[..., Any] = trainer._generate_and_score_completions

    def outer(inputs: Any) -> Any:
        found = inner(inputs)
        seen.append(found)
        return found

    trainer._generate_and_score_completions = outer
    return seen


@pytest.mark.filterwarnings("ignore")  # TRL and its libraries warn of themselves
def test_the_real_trainer_plays_learns_and_masks(tmp_path: Path) -> None:
    """Two steps of four rollouts: in each one earns 3, one earns 1, one loses its env, one does nothing."""
    one_step = [
        [call("count"), call("count"), call("count"), "Nothing to do."],
        [call("count"), "Done.", call("fail", '{"how": "died"}')],
        ["Done.", "Done."],
    ]
    with TrlEnvironments(ProbeEnv) as factory:
        trainer = make_trainer(tmp_path, one_step * 2, rows=2, environment_factory=factory)
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        seen = watch(trainer)
        trainer.train()
        assert len(seen) == 2
        for step in seen:
            advantages = step["advantages"].flatten().tolist()
            # The lost one (third) has no part in the baseline of the others: (3, 1, 0), mean 4/3, std 1.5275.
            assert advantages == pytest.approx([1.0910, -0.2182, 0.0, -0.8728], abs=1e-3)
            mask = step["tool_mask"]
            assert 0 < int(mask[0].sum()) < mask.shape[1]
        logged = [entry for entry in trainer.state.log_history if "reward" in entry]
        assert [entry["rewards/ProbeEnv/mean"] for entry in logged] == pytest.approx([4 / 3] * 2, abs=1e-4)
        assert all(math.isfinite(entry["loss"]) for entry in logged)
        assert any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore")
def test_tools_without_an_episode_in_the_real_trainer(tmp_path: Path) -> None:
    turns = [[call("echo", '{"message": "hello"}')] * 4, ["Done."] * 4, []]
    heard: list[str] = []

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        heard.extend(message["content"] for c in completions for message in c if message["role"] == "tool")
        return [float(index) for index in range(len(completions))]

    env: Env = EchoEnv()
    with SyncEnv(env) as shared:
        shared.reset()
        trainer = make_trainer(tmp_path, turns, tools=tool_functions(shared), reward_funcs=reward)
        trainer.train()
    assert heard == ["hello"] * 4


def test_a_function_of_a_shared_env_lets_failures_out() -> None:
    with SyncEnv(ProbeEnv()) as shared:
        shared.reset()
        fail = next(f for f in tool_functions(shared) if f.__name__ == "fail")
        with pytest.raises(SandboxDied):
            fail(how="died")
