"""The process that holds the solution, and nothing that the solution must not know."""

from __future__ import annotations

import importlib
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandyard.verify.runner.link import Closed, Link
from sandyard.verify.runner.peer import Peer, last_line
from sandyard.verify.runner.values import Json

_BINARY = ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod")
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": lambda function, arguments, keywords: function(*arguments, **keywords),
    "getattr": getattr,
    "setattr": setattr,
    "isinstance": isinstance,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    **{f.__name__: f for f in (iter, next, len, bool, str, repr, hash, int, float, abs)},
    **{name: getattr(operator, name) for name in _BINARY},
    **{name: getattr(operator, name) for name in ("neg", "pow", "matmul", "and_", "or_", "xor")},
}


class JudgeObject:
    """A function or iterator of the test, as the solution sees it."""

    def __init__(self, box: Box, number: int) -> None:
        self._box = box
        self._number = number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._box.ask("call", self, arguments, keywords)

    def __iter__(self) -> JudgeObject:
        return self

    def __next__(self) -> Any:
        return self._box.ask("next", self)


class Box(Peer):
    def __init__(self, link: Link, namespace: dict[str, Any]) -> None:
        super().__init__(link)
        self.namespace = namespace

    def export(self, value: Any) -> Json:
        if type(value) is JudgeObject:
            return ["your", value._number]
        if type(value) is types.ModuleType:
            return ["module", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", self.describe(value.__new__(value))[:2]]
        return super().export(value)

    def resolve(self, tag: str, payload: Json) -> Any:
        return importlib.import_module(payload) if tag == "module" else super().resolve(tag, payload)

    def stand_in(self, number: int, label: str) -> JudgeObject:
        return JudgeObject(self, number)

    def perform(self, operation: str, operands: Sequence[Any]) -> Any:
        if operation == "names":
            return {name: self.namespace[name] for name in operands[0] if name in self.namespace}
        if operation == "classes":
            found = {name: self.namespace.get(name) for name in operands[0]}
            self.codec.classes = {name: value for name, value in found.items() if isinstance(value, type)}
            return None
        return _OPERATIONS[operation](*operands)


def fresh_main() -> dict[str, Any]:
    """The namespace of a `__main__` as a fresh interpreter has it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sandyard"]:
        del sys.modules[name]
    module = types.ModuleType("__main__")
    module.__dict__.update({"__builtins__": sys.modules["builtins"], "__annotations__": {}})
    sys.modules["__main__"] = module
    sys.argv = [""]
    return module.__dict__


def serve(descriptor: int, setup: str, solution: str) -> None:
    """Run the solution, then answer the judge until it goes. A solution that fails to load answers
    everything with that failure."""
    link = Link(descriptor)
    namespace = fresh_main()
    sys.setrecursionlimit(sys.getrecursionlimit() + _depth() + 8)
    failure = _load(setup, solution, namespace)
    box = Box(link, namespace)
    try:
        while True:
            message = link.receive()
            if failure is not None:
                link.send(["fatal", failure])
            else:
                box.answer(message)
    except Closed:
        return


def _load(setup: str, solution: str, namespace: dict[str, Any]) -> str | None:
    if setup:
        try:  # noqa: SIM105 - contextlib would be one more import in every sandbox
            exec(compile(setup, "<setup>", "exec", dont_inherit=True), namespace)
        except Exception:  # noqa: BLE001 - the judge runs the setup too and reports what is wrong with it
            pass
    try:
        exec(compile(solution, "<solution>", "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 - the solution may raise anything
        return last_line(error)
    return None


def _depth() -> int:
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth
