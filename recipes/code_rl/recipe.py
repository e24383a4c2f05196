"""Code RL: a policy learns to write small programs, with GRPO, from running them in sandboxes.

    sandyard train recipes/code_rl

Evaluate on held-out tasks, train, evaluate again. The policy has two tools: `run_python` (in its own
sandbox) and `submit_solution`; the reward comes from hidden tests in another sandbox. `config.py` holds
the settings, `backend.py` where programs run, `policy.py` who plays, `tasks.py` on what.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sandyard.connection import Connection
from sandyard.errors import ConfigError
from sandyard.tasks.base import Task
from sandyard.train.config import TrainConfig
from sandyard.train.episode import BuildMessages
from sandyard.train.evaluate import EvalResult, summarize
from sandyard.train.nano.demonstrations import system_prompt
from sandyard.train.policies.base import Message
from sandyard.train.progress import RunProgress, comparison_table
from sandyard.train.report import Comparison, write_report
from sandyard.train.runlog import require_unused
from sandyard.train.trainer import GRPOTrainer
from sandyard.train.trajectory import read_trajectories

from .backend import Yard, open_yard
from .config import CONFIG as CONFIG
from .config import RecipeConfig, run_directory, train_config
from .policy import make_policy
from .tasks import choose_tasks, user_message


@dataclass(frozen=True)
class RunResult:
    """Pass@1 on the held-out tasks, sampled at temperature 1 and greedy."""

    before: EvalResult
    after: EvalResult
    before_greedy: EvalResult
    after_greedy: EvalResult
    report_path: Path
    run_dir: Path


async def run(config: RecipeConfig, *, server: Connection, console: Console) -> RunResult:
    """Train with `config` on the sandboxes of `server`.

    What does not fit (settings, deadlines, a model without tool calls or too big, a batch beyond the
    server's capacity) is refused before the first rollout.
    """
    train = train_config(config)
    run_dir = run_directory(config)
    if config.resume is None:
        require_unused(run_dir)
    elif not run_dir.is_dir():
        raise ConfigError(f"there is no run to resume in {run_dir}")
    tasks, held_out = choose_tasks(config)
    async with open_yard(config, train, server) as yard:
        console.print(f"programs run in: {yard.backend.describe()}", highlight=False)
        progress = RunProgress(console, max_steps=train.max_steps, rollouts=train.rollouts)
        trainer = GRPOTrainer(
            await make_policy(train, config.warm_start_steps, console),
            tasks,
            yard.make_env,
            yard.verifier,
            train,
            build_messages=_conversation(yard, train),
            run_dir=run_dir,
            capacity=None if yard.capacity is None else lambda: yard.capacity or 0,
            on_event=progress.on_event,
        )
        trainer.check_capacity()
        if config.resume is not None:
            trainer.resume(run_dir / "checkpoints")
        with progress:
            result = await _before_train_after(trainer, held_out, config, progress)
    _tell(result, console)
    return result


def _conversation(yard: Yard, train: TrainConfig) -> BuildMessages:
    """The messages a task starts with. The nano policy gets a short system prompt, others the back end's."""
    if train.model:
        system = yard.backend.system_prompt(max_turns=train.max_turns, run_timeout=train.deadlines.exec)
    else:
        system = system_prompt(train.max_turns)

    def build(task: Task, observation: str) -> Sequence[Message]:
        return [{"role": "system", "content": system}, user_message(task)]

    return build


async def _before_train_after(
    trainer: GRPOTrainer, held_out: Sequence[Task], config: RecipeConfig, progress: RunProgress
) -> RunResult:
    started = time.perf_counter()
    before = await _evaluate(trainer, held_out, config, "before", progress)
    evaluated = time.perf_counter()
    progress.begin("step 1", trainer.config.rollouts)
    await trainer.train()
    trained = time.perf_counter()
    after = await _evaluate(trainer, held_out, config, "after", progress)
    comparisons = [
        Comparison(f"{config.eval_samples} samples at temperature 1", before[0], after[0]),
        Comparison("greedy", before[1], after[1]),
    ]
    report = write_report(trainer.run_dir, title="code_rl", comparisons=comparisons)
    ended = time.perf_counter()
    progress.console.print(
        f"evaluation before {evaluated - started:.0f} s, training {trained - evaluated:.0f} s, "
        f"evaluation after and report {ended - trained:.0f} s",
        highlight=False,
    )
    return RunResult(before[0], after[0], before[1], after[1], report.html, trainer.run_dir)


async def _evaluate(
    trainer: GRPOTrainer, held_out: Sequence[Task], config: RecipeConfig, name: str, progress: RunProgress
) -> tuple[EvalResult, EvalResult]:
    """(sampled, greedy). What a resumed run measured before it was interrupted is not measured again."""
    results = []
    for label, samples, temperature in ((name, config.eval_samples, 1.0), (f"{name}-greedy", 1, 0.0)):
        file = trainer.run_dir / f"{label}.jsonl"
        if name == "before" and trainer.step > 0 and file.exists():
            results.append(summarize(read_trajectories(file), samples, temperature))
            continue
        file.unlink(missing_ok=True)
        progress.begin(label, samples * len(held_out))
        results.append(await trainer.evaluate(held_out, samples=samples, temperature=temperature, label=label))
    return results[0], results[1]


def _tell(result: RunResult, console: Console) -> None:
    label = f"{result.before.samples} samples a task at temperature 1"
    console.print(comparison_table(Comparison(label, result.before, result.after)))
    console.print(
        f"greedy: {result.before_greedy.pass_at_1:.1%} before, {result.after_greedy.pass_at_1:.1%} after\n"
        f"report: {result.report_path}\n"
        f"a trajectory: {Path('recipes/code_rl/show.py')} {result.run_dir}   (a file of them: --file before)",
        highlight=False,
        soft_wrap=True,
    )
