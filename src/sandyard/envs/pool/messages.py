"""What goes to a slot and comes back, as bytes: the same in this process and across to another."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandyard.envs.base import Execution, StepResult, ToolSpec
from sandyard.tasks.base import Task


@dataclass(frozen=True, slots=True)
class Reset:
    task: Task


@dataclass(frozen=True, slots=True)
class Step:
    tool_name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Execute:
    code: str
    timeout: float | None


Request = Reset | Step | Execute


@dataclass(frozen=True, slots=True)
class Reply:
    """`value` or `error`, and how the slot's env stands after it."""

    value: StepResult | Execution | None = None
    error: Exception | None = None
    specs: Sequence[ToolSpec] = ()
    submission: str | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """What a worker says of itself and of its envs."""

    pid: int
    specs: Sequence[ToolSpec] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    error: Exception | None = None


def pack_request(request: Request) -> bytes:
    """Raises `TypeError` naming the request whose arguments cannot leave this process."""
    try:
        return pickle.dumps(request)
    except Exception as error:
        raise TypeError(f"a {type(request).__name__.lower()} cannot be sent to a worker: {error}") from error


def pack_reply(reply: Reply) -> bytes:
    """An answer that cannot leave its process becomes an error that says so."""
    try:
        return pickle.dumps(reply)
    except Exception as error:  # noqa: BLE001 - pickle raises whatever the objects of an env raise
        text = f"the env's answer cannot leave its process: {type(error).__name__}: {error}"
        return pickle.dumps(Reply(error=TypeError(text)))


def pack_opened(opened: Opened) -> bytes:
    return pickle.dumps(opened)


def unpack(data: bytes) -> Any:
    """Only what the other side of a worker of ours packed."""
    return pickle.loads(data)


def portable(error: BaseException) -> Exception:
    """`error` as another process can have it: itself, else a `RuntimeError` that tells its type and text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - that it does not travel is all there is to know
        copy = None
    if isinstance(copy, Exception) and type(copy) is type(error) and str(copy) == str(error):
        return copy
    return RuntimeError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
