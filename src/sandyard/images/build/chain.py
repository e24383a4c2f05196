"""Keys of the layer cache: each names a start and every step since, so a change anywhere changes all that follow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from sandyard.images.build.base import Base, Plan, State, Step

_FORMAT = 1  # change when a step comes to do something else


def chain(base: Base, steps: Sequence[Step]) -> list[str]:
    """One key for the start, then one for each step."""
    state = State.of(base.rootfs)
    keys = [_hash([_FORMAT, base.key, sorted(state.env.items()), state.workdir, state.user])]
    for step in steps:
        keys.append(then(keys[-1], step.kind, [*step.args, step.files_hash]))
    return keys


def then(key: str, kind: str, args: Sequence[str | None]) -> str:
    """The key of what one more step comes to."""
    return _hash([key, kind, list(args)])


def reusable(plan: Plan) -> int:
    """How many steps may come from the cache: those before the first that is forced."""
    if plan.force:
        return 0
    return next((number for number, step in enumerate(plan.steps) if step.force), len(plan.steps))


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()
