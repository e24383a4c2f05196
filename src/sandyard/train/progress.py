"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sandyard.train.report import Comparison, family_rows, percent
from sandyard.train.trainer import TrainEvent


class RunProgress:
    """Shows `TrainEvent`s: pass `progress.on_event` to the trainer, and use it as a context manager.

    `begin(what, total)` starts a phase of `total` rollouts (a step or an evaluation). On a console that is
    no terminal only the lines of steps, skips and phases are printed.
    """

    def __init__(self, console: Console | None = None, *, max_steps: int = 0, rollouts: int = 0) -> None:
        self.console = console or Console()
        self._max_steps = max_steps
        self._rollouts = rollouts
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("rollouts", total=rollouts or None)

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, what: str, total: int) -> None:
        """A phase begins: `what` is shown beside the bar, which counts `total` rollouts."""
        self._bar.reset(self._task, total=total, description=what)
        if not self.console.is_terminal:
            self.console.print(f"{what}: {total} rollouts", highlight=False)

    def on_event(self, event: TrainEvent) -> None:
        match event.kind:
            case "rollout":
                self._bar.advance(self._task)
            case "step":
                self._line(event, _summary(event))
                self._next_step(event)
            case "skip":
                self._line(event, f"[yellow]no update:[/yellow] {event.message}")
                self._next_step(event)
            case "evaluation":
                self.console.print(f"{event.message}: pass@1 {event.metrics['pass_at_1']:.1%}", highlight=False)

    def _line(self, event: TrainEvent, text: str) -> None:
        of = f"/{self._max_steps}" if self._max_steps else ""
        self.console.print(f"step {event.step}{of}  {text}", highlight=False, soft_wrap=True)

    def _next_step(self, event: TrainEvent) -> None:
        self._bar.reset(self._task, total=self._rollouts or None, description=f"step {event.step + 1}")


def _summary(event: TrainEvent) -> str:
    metrics = event.metrics
    parts = [
        f"reward {metrics.get('train/avg_reward', float('nan')):.3f}",
        f"solved {metrics.get('train/code_acc', float('nan')):.0%}",
        f"tokens {metrics.get('train/completion_length', 0):.0f}",
        f"entropy {metrics.get('train/entropy', float('nan')):.3f}",
        f"rollout {metrics.get('time/rollout', 0):.1f} s",
        f"train {metrics.get('time/train', 0):.1f} s",
    ]
    if metrics.get("train/masked"):
        parts.append(f"[yellow]masked {metrics['train/masked']:.0f}[/yellow]")
    return "  ".join(parts)


def comparison_table(comparison: Comparison) -> Table:
    """The before/after table by family, for the console."""
    table = Table(title=f"pass@1, {comparison.label}", title_justify="left")
    table.add_column("family")
    for name in ("tasks", "before", "after"):
        table.add_column(name, justify="right")
    rows = family_rows(comparison)
    for family, before, after in rows:
        score = after or before
        if family == "all":
            table.add_section()
        table.add_row(family or "no family", str(score.tasks if score else 0), percent(before), percent(after))
    return table
