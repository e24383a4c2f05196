"""The process that runs one test against the stand-ins of a solution in its box."""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sandyard.verify.runner.link import Closed, Link
from sandyard.verify.runner.peer import Peer, last_line
from sandyard.verify.runner.values import Json, Malformed

PASSED, FAILED, CRASHED = "passed", "failed", "crashed"
ENDED = "ended"  # the box's process is gone: crashed, and the runner knows how it ended
SETUP = "setup"  # the task's own setup code fails before any solution came in: the task's fault
UNSUPPORTED = "unsupported"  # the test hands over what cannot cross: the task's fault
_MODULES = frozenset(sys.stdlib_module_names) - {"antigravity", "this", "idlelib", "turtle", "tkinter", "test"}


class SolutionFailed(Exception):
    """The solution did not load; the message is its last line."""


class SetupFailed(Exception):
    """The task's setup code does not run."""


class CannotCross(Exception):
    """The test hands the solution an object that is neither plain data nor something to call."""


class Remote:
    """A stand-in for an object of the solution that is not plain data.

    It equals only what is itself of the solution: compared with plain data it is unequal, whatever
    its own `__eq__` would say. Nor does it calculate with plain data: in `abs(f(2) - 5) < 1e-6` the 5 is
    the expected value, which the solution must not be handed.
    """

    def __init__(self, judge: Judge, number: int, label: str) -> None:
        object.__setattr__(self, "_remote", (judge, number, label))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _ask("call", self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return _ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("setattr", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        iterator = _ask("iter", self)
        return iterator if isinstance(iterator, Remote) else iter(iterator)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return bool(_ask("eq", self, other))
        judge, _, label = object.__getattribute__(self, "_remote")
        judge.notes.append(f"a {label} was compared with plain data")
        return False

    def __hash__(self) -> int:
        return int(_ask("hash", self))

    def __bool__(self) -> bool:
        return bool(_ask("bool", self))

    def __str__(self) -> str:
        return str(_ask("str", self))

    def __repr__(self) -> str:
        return str(_ask("repr", self))

    def __len__(self) -> int:
        return int(_ask("len", self))

    def __int__(self) -> int:
        return int(_ask("int", self))

    def __float__(self) -> float:
        return float(_ask("float", self))

    def __contains__(self, item: object) -> bool:
        return any(found is item or found == item for found in self)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and bool(_ask("isinstance", instance, self))


def _ask(operation: str, remote: Remote, *operands: Any) -> Any:
    judge: Judge = object.__getattribute__(remote, "_remote")[0]
    return judge.ask(operation, remote, *operands)


def _forward(name: str) -> None:
    operation = name.strip("_")
    setattr(Remote, name, lambda self, *operands: _ask(operation, self, *operands))


for _name in ("next", "getitem", "setitem", "delitem", "neg", "abs"):
    _forward(f"__{_name}__")


def _among_themselves(name: str) -> None:
    operation = f"{name}_" if name in ("and", "or") else name

    def apply(self: Remote, other: object) -> Any:
        return _ask(operation, self, other) if isinstance(other, Remote) else NotImplemented

    setattr(Remote, f"__{name}__", apply)


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
for _name in ("lt", "le", "gt", "ge", *_ARITHMETIC):
    _among_themselves(_name)


class Judge(Peer):
    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.notes: list[str] = []
        self.raised: BaseException | None = None
        self._exceptions: dict[tuple[str, str], type[BaseException]] = {}

    def export(self, value: Any) -> Json:
        if isinstance(value, Remote):
            return ["your", object.__getattribute__(value, "_remote")[1]]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if callable(value) or hasattr(type(value), "__next__"):
            return super().export(value)
        raise CannotCross(f"the test hands over a {type(value).__name__}")

    def resolve(self, tag: str, payload: Json) -> Any:
        if tag == "module":
            if payload not in _MODULES:
                raise ValueError(f"module {payload!r} is not of the standard library")
            return importlib.import_module(payload)
        if tag == "exception":
            return self.exception_class(str(payload[0]), str(payload[1]))
        return super().resolve(tag, payload)

    def stand_in(self, number: int, label: str) -> Remote:
        return Remote(self, number, label)

    def perform(self, operation: str, operands: Sequence[Any]) -> Any:
        target = operands[0]
        if not any(target is mine for mine in self.owned):
            raise TypeError("not a function of the test")
        if operation == "call":
            return target(*operands[1], **operands[2])
        if operation == "next":
            return next(target)
        raise TypeError(f"{operation} is not offered")

    def exception_class(self, name: str, base: str) -> type[BaseException]:
        found = super().exception_class(name, base)
        if name == found.__name__:
            return found
        key = (name, base)
        if key not in self._exceptions:
            self._exceptions[key] = type(name, (found,), {})
        return self._exceptions[key]

    def rebuild(self, failure: Json) -> BaseException:
        self.raised = super().rebuild(failure)
        return self.raised

    def unexpected(self, message: Sequence[Any]) -> None:
        if message[0] == "fatal":
            raise SolutionFailed(str(message[1]))
        super().unexpected(message)


def judge_test(descriptor: int, job: Mapping[str, Any], test: str) -> tuple[str, str]:
    """Run one test; returns (outcome, detail). `job` gives `setup`, `imports` and `entry_names`."""
    judge = Judge(Link(descriptor))
    try:
        _run(judge, job, test)
    except AssertionError as error:
        if error is not judge.raised:
            notes = f" ({judge.notes[-1]})" if judge.notes else ""
            return FAILED, last_line(error) + notes
        return CRASHED, f"the solution raised {last_line(error)}"
    except SolutionFailed as error:
        return CRASHED, str(error)
    except Closed:
        return ENDED, ""
    except Malformed as error:
        return CRASHED, f"the answer is not a value: {error}"
    except SetupFailed as error:
        return SETUP, str(error)
    except CannotCross as error:
        return UNSUPPORTED, str(error)
    except BaseException as error:  # noqa: BLE001 - the solution may raise anything through its calls
        return CRASHED, last_line(error)
    return PASSED, ""


def _run(judge: Judge, job: Mapping[str, Any], test: str) -> None:
    namespace = _prepare(job)
    code = compile(test, "<test>", "exec", dont_inherit=True)
    wanted = _wanted(code, frozenset(job["entry_names"])) - namespace.keys()
    namespace.update(judge.ask("names", sorted(wanted)))
    helpers = {name: value for name, value in namespace.items() if _is_helper(value)}
    if helpers:
        judge.codec.classes = helpers
        judge.ask("classes", list(helpers))
    exec(code, namespace)


def _prepare(job: Mapping[str, Any]) -> dict[str, Any]:
    """The test's namespace with the task's imports and setup in it, before any name of the solution."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = builtins
    try:
        for source, name in ((job["imports"], "<imports>"), (job["setup"], "<setup>")):
            if source:
                exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        raise SetupFailed(last_line(error)) from error
    return module.__dict__


def _wanted(code: types.CodeType, entry_names: frozenset[str]) -> set[str]:
    """Names that a test may take from the solution: builtins only where they are entry points."""
    names = {n for n in code.co_names if not n.startswith("__") and (n in entry_names or not hasattr(builtins, n))}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _wanted(constant, entry_names)
    return names


def _is_helper(value: object) -> bool:
    return (
        isinstance(value, type)
        and value.__module__ == "__main__"
        and value.__dictoffset__ != 0
        and not issubclass(value, BaseException)
    )
