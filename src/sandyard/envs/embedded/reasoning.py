"""The procedural puzzles of reasoning-gym, each an episode of one answer. Needs the extra `games`."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from types import ModuleType
from typing import Any

from sandyard.envs.base import StepResult, ToolSpec
from sandyard.envs.embedded.base import GameEnv
from sandyard.errors import BadRequest, ConfigError, VerifierError

ANSWER = ToolSpec(
    "answer",
    "Give the final answer. Ends the episode.",
    {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "the answer alone, as the question asks for it"}},
        "required": ["answer"],
        "additionalProperties": False,
    },
)
# Of a scorer that does more with an answer than to compare it: these run what the policy wrote, here.
_EVALUATES = re.compile(r"\b(parse_expr|sympify|eval|exec)\(")


class ReasoningEnv(GameEnv):
    """`answer(answer)`, once: the reward is the data set's own score, in [0, 1], and 0 for an answer that the
    scorer chokes on; `VerifierError` where it chokes on the data set's own answer too.

    `options` are those of the data set (sizes, ranges). The seed of the task is that of its entry. Raises
    `ConfigError` where reasoning-gym is not installed, `BadRequest` for a data set or options that it does not
    know, and for a data set whose scorer evaluates answers as code, unless `trust_scorer`: then the policy runs
    programs in this process."""

    def __init__(self, dataset: str, *, trust_scorer: bool = False, **options: Any) -> None:
        super().__init__()
        self._gym = _reasoning_gym()
        self.dataset, self._options = dataset, options
        self._puzzles = self._create(0)
        if not trust_scorer and _evaluates(type(self._puzzles)):
            raise BadRequest(
                f"data set {dataset!r} scores an answer by evaluating it as code in this process",
                remedy="take another, or say trust_scorer=True where the policy may run programs here",
            )
        self._entry: dict[str, Any] = {}
        self.register_tool(ANSWER, lambda env, arguments: self._answer(arguments["answer"]))

    def deal(self) -> None:
        self._puzzles = self._create(self.random.getrandbits(32))
        self._entry = self._puzzles[0]

    def opening(self) -> str:
        return str(self._entry["question"])

    def _create(self, seed: int) -> Any:
        try:
            return self._gym.create_dataset(self.dataset, size=1, seed=seed, **self._options)
        except (ValueError, TypeError, AssertionError) as error:
            raise BadRequest(f"reasoning-gym data set {self.dataset!r}: {error}", field="dataset") from error

    def _answer(self, text: str) -> StepResult:
        score = self._score(text)
        if score is None and self._score(self._entry["answer"]) is None:
            raise VerifierError(f"the scorer of data set {self.dataset!r} fails on the data set's own answer")
        self.submit(text)
        return StepResult("Answered.", reward=min(1.0, max(0.0, score or 0.0)), terminated=True)

    def _score(self, text: object) -> float | None:
        """None where the scorer fails: many do so on an answer that is not of the form they expect."""
        try:
            score = float(self._puzzles.score_answer(text, self._entry))
        except Exception:  # noqa: BLE001 - of any kind; whose fault it is shows the data set's own answer
            return None
        return score if math.isfinite(score) else None


def _reasoning_gym() -> ModuleType:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"reasoning-gym is not installed ({error})", remedy="pip install 'sandyard[games]'"
        ) from error


def _evaluates(kind: type[Any]) -> bool:
    """Whether a data set's scorer, or a helper beside it, may do that; the composite ones do as their parts."""
    own = next(cls for cls in kind.__mro__ if "score_answer" in vars(cls))
    module = sys.modules[own.__module__]
    return own.__name__.startswith("Composite") or (own is kind and bool(_EVALUATES.search(inspect.getsource(module))))
