"""Functions of a program: arguments are bound by CPython itself, the body is interpreted.

smolagents drops arguments that are too many, takes missing ones from globals, evaluates defaults at
every call and gives the last statement's value when nothing is returned. Here a function of CPython
with the same signature binds the arguments (its errors are CPython's), and the body has a scope.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any

from sandyard.envs.interpreter.scope import Scope, bound_names
from sandyard.envs.interpreter.traps import ReturnValue, Trap

MAX_DEPTH = 250  # calls within calls: CPython's own limit (1000 frames) is never met below this
Evaluate = Callable[[ast.AST, Scope], Any]
_depth = [0]


def make_function(node: ast.FunctionDef, state: Scope, evaluate: Evaluate) -> FunctionType:
    """The function that `node` defines in `state`."""
    bind, names = _binder(node, node.name, node.args, state, evaluate)
    unbound = frozenset(bound_names(node.body)) - set(names)

    def function(*args: Any, **kwargs: Any) -> Any:
        scope = Scope(state, unbound, function=True)
        scope.update(zip(names, bind(*args, **kwargs), strict=True))
        _enter()
        try:
            for statement in node.body:
                evaluate(statement, scope)
        except ReturnValue as returned:
            return returned.value
        finally:
            _depth[0] -= 1
        return None

    function.__doc__ = ast.get_docstring(node, clean=False)
    return _named(function, bind)


def make_lambda(node: ast.Lambda, state: Scope, evaluate: Evaluate) -> FunctionType:
    """The function of the lambda `node` in `state`."""
    bind, names = _binder(node, "<lambda>", node.args, state, evaluate)

    def function(*args: Any, **kwargs: Any) -> Any:
        scope = Scope(state, function=True)
        scope.update(zip(names, bind(*args, **kwargs), strict=True))
        _enter()
        try:
            return evaluate(node.body, scope)
        finally:
            _depth[0] -= 1

    return _named(function, bind)


def reset_depth() -> None:
    _depth[0] = 0


def _enter() -> None:
    if _depth[0] >= MAX_DEPTH:
        raise Trap(f"recursion deeper than {MAX_DEPTH} calls")
    _depth[0] += 1


def _named(function: Any, bind: FunctionType) -> FunctionType:
    function.__name__, function.__qualname__ = bind.__name__, bind.__qualname__
    function.__module__ = "__main__"
    made: FunctionType = function
    return made


def _binder(
    node: ast.AST, name: str, arguments: ast.arguments, state: Scope, evaluate: Evaluate
) -> tuple[FunctionType, Sequence[str]]:
    """A function of CPython that returns the values of its parameters, and their names."""
    names = parameter_names(arguments)
    code: CodeType | None = getattr(node, "binder_code", None)
    if code is None:
        code = _binder_code(arguments, names)
        node.binder_code = code  # type: ignore[attr-defined]  # compiled once for each place in the program
    defaults = tuple(evaluate(default, state) for default in arguments.defaults)
    bind = FunctionType(code.replace(co_name=name), {}, name, defaults)
    bind.__kwdefaults__ = _keyword_defaults(arguments, state, evaluate)
    bind.__qualname__ = getattr(node, "qualname", name)
    return bind, names


def _keyword_defaults(arguments: ast.arguments, state: Scope, evaluate: Evaluate) -> dict[str, Any]:
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {argument.arg: evaluate(default, state) for argument, default in pairs if default is not None}


def parameter_names(arguments: ast.arguments) -> Sequence[str]:
    stars = [star for star in (arguments.vararg, arguments.kwarg) if star is not None]
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars]
    return [argument.arg for argument in every]


def _binder_code(arguments: ast.arguments, names: Sequence[str]) -> CodeType:
    bare = _without_values(arguments)
    values = ast.Tuple([ast.Name(name, ast.Load()) for name in names], ast.Load())
    module = ast.Expression(ast.Lambda(bare, values))
    outer = compile(ast.fix_missing_locations(module), "<arguments>", "eval", dont_inherit=True)
    return next(constant for constant in outer.co_consts if isinstance(constant, CodeType))


def _without_values(arguments: ast.arguments) -> ast.arguments:
    """The same parameters, without annotations, with None for every default."""

    def bare(parts: Sequence[ast.arg]) -> list[ast.arg]:
        return [ast.arg(part.arg) for part in parts]

    return ast.arguments(
        posonlyargs=bare(arguments.posonlyargs),
        args=bare(arguments.args),
        vararg=ast.arg(arguments.vararg.arg) if arguments.vararg else None,
        kwonlyargs=bare(arguments.kwonlyargs),
        kw_defaults=[default and ast.Constant(None) for default in arguments.kw_defaults],
        kwarg=ast.arg(arguments.kwarg.arg) if arguments.kwarg else None,
        defaults=[ast.Constant(None) for _ in arguments.defaults],
    )
