"""The evaluators that take the place of smolagents' own, where those differ from CPython.

Each has smolagents' signature. `engine` installs them in its module.
"""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from sandyard.envs.interpreter.calls import make_function, make_lambda
from sandyard.envs.interpreter.modules import allows, guarded
from sandyard.envs.interpreter.scope import UNBOUND, Scope
from sandyard.envs.interpreter.traps import Trap

Tools = Mapping[str, Any]
EvaluateNode = Callable[..., Any]
_IN_PLACE: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.iadd,
    ast.Sub: operator.isub,
    ast.Mult: operator.imul,
    ast.Div: operator.itruediv,
    ast.FloorDiv: operator.ifloordiv,
    ast.Mod: operator.imod,
    ast.Pow: operator.ipow,
    ast.BitAnd: operator.iand,
    ast.BitOr: operator.ior,
    ast.BitXor: operator.ixor,
    ast.LShift: operator.ilshift,
    ast.RShift: operator.irshift,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}


class Evaluators:
    """The replacements, bound to smolagents' `evaluate_ast` and `set_value`."""

    def __init__(self, evaluate_ast: EvaluateNode, set_value: EvaluateNode) -> None:
        self._ast = evaluate_ast
        self._set_one = set_value

    def set_value(self, target: ast.expr, value: Any, state: Scope, *context: Any) -> None:
        if not isinstance(target, ast.Tuple | ast.List):
            self._set_one(target, value, state, *context)
            return
        stars = [index for index, part in enumerate(target.elts) if isinstance(part, ast.Starred)]
        values = _unpacker(len(target.elts), stars[0] if stars else None)(value)
        for part, item in zip(target.elts, values, strict=True):
            self.set_value(part.value if isinstance(part, ast.Starred) else part, item, state, *context)

    def evaluate_name(self, name: ast.Name, state: Scope, *context: Any) -> Any:
        value = state.read(name.id)
        if value is not UNBOUND:
            return value
        known = context[1]
        if name.id in known:
            return known[name.id]
        if hasattr(builtins, name.id):
            raise Trap(f"builtin {name.id}")
        raise NameError(f"name {name.id!r} is not defined")

    def evaluate_call(self, call: ast.Call, state: Scope, *context: Any) -> Any:
        function = self._ast(call.func, state, *context)
        arguments: list[Any] = []
        for argument in call.args:
            value = self._ast(argument, state, *context)
            if isinstance(argument, ast.Starred):
                arguments.extend(value)
            else:
                arguments.append(value)
        keywords = {str(keyword.arg): self._ast(keyword.value, state, *context) for keyword in call.keywords}
        return function(*arguments, **keywords)

    def evaluate_subscript(self, node: ast.Subscript, state: Scope, *context: Any) -> Any:
        value = self._ast(node.value, state, *context)
        return value[self._ast(node.slice, state, *context)]

    def evaluate_condition(self, node: ast.Compare, state: Scope, *context: Any) -> Any:
        left = self._ast(node.left, state, *context)
        result: Any = True
        for index, (kind, comparator) in enumerate(zip(node.ops, node.comparators, strict=True)):
            if index and not result:
                return result
            right = self._ast(comparator, state, *context)
            result = _COMPARE[type(kind)](left, right)
            left = right
        return result

    def evaluate_unaryop(self, node: ast.UnaryOp, state: Scope, *context: Any) -> Any:
        return _UNARY[type(node.op)](self._ast(node.operand, state, *context))

    def evaluate_augassign(self, node: ast.AugAssign, state: Scope, *context: Any) -> None:
        change = _IN_PLACE[type(node.op)]
        target = node.target
        if isinstance(target, ast.Name):
            current = self.evaluate_name(ast.Name(target.id, ast.Load()), state, *context)
            state[target.id] = change(current, self._ast(node.value, state, *context))
            return
        owner = self._ast(target.value, state, *context)
        if isinstance(target, ast.Attribute):
            current = getattr(owner, target.attr)
            setattr(owner, target.attr, change(current, self._ast(node.value, state, *context)))
            return
        key = self._ast(target.slice, state, *context)
        current = owner[key]
        owner[key] = change(current, self._ast(node.value, state, *context))

    def evaluate_generatorexp(self, node: ast.GeneratorExp, state: Scope, *context: Any) -> Iterator[Any]:
        """The outermost iterable is evaluated at once, the rest when an item is asked for."""
        items = iter(self._ast(node.generators[0].iter, state, *context))
        generator: Any = self._items(node, items, state, context)
        generator.__name__ = generator.__qualname__ = "<genexpr>"
        made: Iterator[Any] = generator
        return made

    def _items(self, node: ast.GeneratorExp, items: Iterator[Any], state: Scope, context: tuple[Any, ...]) -> Any:
        for item in items:
            yield from self._nested(node, 0, item, state, context)

    def _nested(self, node: ast.GeneratorExp, level: int, item: Any, state: Scope, context: tuple[Any, ...]) -> Any:
        clause = node.generators[level]
        scope = state.copy()
        self.set_value(clause.target, item, scope, *context)
        if not all(self._ast(condition, scope, *context) for condition in clause.ifs):
            return
        if level + 1 == len(node.generators):
            yield self._ast(node.elt, scope, *context)
            return
        for inner in self._ast(node.generators[level + 1].iter, scope, *context):
            yield from self._nested(node, level + 1, inner, scope, context)

    def evaluate_lambda(self, node: ast.Lambda, state: Scope, *context: Any) -> Any:
        return make_lambda(node, state, lambda part, scope: self._ast(part, scope, *context))

    def evaluate_function_def(self, node: ast.FunctionDef, state: Scope, *context: Any) -> Any:
        made = make_function(node, state, lambda part, scope: self._ast(part, scope, *context))
        if not getattr(node, "is_method", False):
            state[node.name] = made
        return made

    def evaluate_import(self, node: ast.Import | ast.ImportFrom, state: Scope, imports: list[str]) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                state[alias.asname or alias.name] = guarded(alias.name, imports)
            return
        module = guarded(node.module or "", imports)
        for alias in node.names:
            if not allows(module.__name__, alias.name) or not hasattr(module, alias.name):
                raise Trap(f"import of {alias.name} from {module.__name__}")
            state[alias.asname or alias.name] = getattr(module, alias.name)

    def evaluate_try(self, node: ast.Try, state: Scope, *context: Any) -> None:
        try:
            try:
                self._block(node.body, state, context)
            except BaseException as error:
                if not _is_of_the_program(error):
                    raise
                handler = self._handler(node, error, state, context)
                if handler is None:
                    raise
                self._handle(handler, error, state, context)
            else:
                self._block(node.orelse, state, context)
        finally:
            self._block(node.finalbody, state, context)

    def _handler(
        self, node: ast.Try, error: BaseException, state: Scope, context: tuple[Any, ...]
    ) -> ast.ExceptHandler | None:
        for handler in node.handlers:
            if handler.type is None or _matches(error, self._ast(handler.type, state, *context)):
                return handler
        return None

    def _handle(self, handler: ast.ExceptHandler, error: BaseException, state: Scope, context: tuple[Any, ...]) -> None:
        if handler.name is None:
            self._block(handler.body, state, context)
            return
        state[handler.name] = error
        try:
            self._block(handler.body, state, context)
        finally:
            state.unbind(handler.name)

    def _block(self, body: list[ast.stmt], state: Scope, context: tuple[Any, ...]) -> None:
        for statement in body:
            self._ast(statement, state, *context)


def _matches(error: BaseException, kinds: Any) -> bool:
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    return isinstance(error, kinds)


def _is_of_the_program(error: BaseException) -> bool:
    """Whether the program's `except` may see it: not the interpreter's own signals."""
    return not type(error).__module__.startswith("sandyard.")


@cache
def _unpacker(count: int, star: int | None) -> Callable[[Any], tuple[Any, ...]]:
    """A function of CPython that unpacks a value into `count` targets: its errors are CPython's."""
    names = [f"{'*' if index == star else ''}v{index}" for index in range(count)]
    targets = f"[{', '.join(names)}]"
    values = "".join(f"v{index}, " for index in range(count))
    namespace: dict[str, Any] = {}
    exec(f"def unpack(value):\n    {targets} = value\n    return ({values})", namespace)
    unpack: Callable[[Any], tuple[Any, ...]] = namespace["unpack"]
    return unpack
