"""`sandyard eval`: score solutions of a task file with the verifier, in sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sandyard.cli.console import stderr, stdout
from sandyard.cli.yard import yard

if TYPE_CHECKING:
    from sandyard.connection import Connection
    from sandyard.tasks.base import Task
    from sandyard.verify.evaluate import EvalReport


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    tasks: Annotated[str, typer.Argument(help="task file (JSONL, JSON, parquet), or `humaneval`, or `builtin`")],
    solutions: Annotated[
        str, typer.Option(help="`reference`, `pass`, or a JSONL file of task_id and solution")
    ] = "reference",
    limit: Annotated[int | None, typer.Option(help="only the first N tasks")] = None,
    concurrency: Annotated[int, typer.Option(help="verifications at once", min=1)] = 2 * (os.cpu_count() or 1),
    output: Annotated[Path | None, typer.Option(help="write every score to this JSON file")] = None,
    api_url: Annotated[
        str | None, typer.Option(help="server to use; without one a server is started for this run")
    ] = None,
) -> None:
    """Run solutions against the hidden tests of their tasks and report the rewards."""
    selected = select_tasks(tasks, limit)
    with yard(api_url) as connection:
        report = asyncio.run(_evaluate(selected, solutions, connection, concurrency))
    for line in report.lines():
        stdout.print(line, markup=False)
    if output is not None:
        output.write_text(json.dumps(report.to_dict(), indent=2))
        stdout.print(f"every score: {output}", markup=False)
    raise typer.Exit(1 if report.infrastructure else 0)


async def _evaluate(tasks: list[Task], solutions: str, connection: Connection, concurrency: int) -> EvalReport:
    from sandyard.envs.lease import SandboxLease
    from sandyard.verify.code import CodeVerifier, SandboxLauncher
    from sandyard.verify.evaluate import evaluate_solutions

    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with SandboxLease(connection, labels={"sandyard.run": "eval"}, warm={"base": concurrency}) as lease:
        verifier = CodeVerifier(SandboxLauncher(connection, lease=lease))
        with Progress(*columns, console=stderr, transient=True) as progress:
            bar = progress.add_task("verify", total=len(tasks))
            return await evaluate_solutions(
                tasks,
                solutions,
                verifier,
                concurrency=concurrency,
                on_progress=lambda done, _: progress.update(bar, completed=done),
            )


def select_tasks(name: str, limit: int | None) -> list[Task]:
    """Tasks of a file, of HumanEval, or of the built-in set. Raises `TaskError` naming file and line."""
    if name == "builtin":
        from sandyard.tasks.builtin import builtin_tasks

        return builtin_tasks()[:limit]
    if name == "humaneval":
        from sandyard.tasks.humaneval import load_humaneval

        return load_humaneval(limit)
    from sandyard.tasks.files import load_tasks

    return load_tasks(name, limit=limit)
