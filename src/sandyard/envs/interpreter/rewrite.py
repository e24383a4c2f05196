"""A checked program in the form that the interpreter executes right. CPython sees no difference.

What smolagents has no evaluation for, or a wrong one, becomes a call of a helper whose name no program
can write (it begins with a space): conversions in f-strings, starred displays, `print`, set displays of
constants (CPython builds those in another order than one by one), assertions.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

from sandyard.envs.interpreter.traps import Trap

_CONVERSIONS = {ord("r"): " repr", ord("s"): " str", ord("a"): " ascii"}


def rewrite(tree: ast.Module) -> ast.Module:
    """`tree`, changed in place. It must have passed the guard."""
    changed = _Rewriter().visit(tree)
    assert isinstance(changed, ast.Module)
    return ast.fix_missing_locations(changed)


def helpers(print_out: Callable[..., None]) -> dict[str, Any]:
    """The helpers by name; `print` becomes `print_out`."""
    return {
        " print": print_out,
        " repr": repr,
        " str": str,
        " ascii": ascii,
        " star": _star,
        " list": lambda *items: list(items),
        " tuple": lambda *items: items,
        " merge": _merge,
        " constant": _constant,
        " AssertionError": AssertionError,
    }


def _star(value: Any) -> Any:
    if not hasattr(type(value), "__iter__"):
        raise Trap("a starred value that cannot be iterated over")
    return value


def _merge(*parts: Mapping[Any, Any]) -> dict[Any, Any]:
    merged: dict[Any, Any] = {}
    for part in parts:
        if not isinstance(part, Mapping):
            raise Trap("a double-starred value that is no mapping")
        merged.update(part)
    return merged


def _constant(code: CodeType) -> Any:
    return eval(code, {"__builtins__": {}})


def _helper(name: str, arguments: Iterable[ast.expr], at: ast.AST) -> ast.Call:
    call = ast.Call(ast.Name(f" {name}", ast.Load()), list(arguments), [])
    return ast.copy_location(call, at)


class _Rewriter(ast.NodeTransformer):
    def __init__(self) -> None:
        self._path: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.qualname = "".join([*self._path, node.name])  # type: ignore[attr-defined]  # read by `calls`
        node.is_method = bool(self._path) and self._path[-1].endswith(".") and "<" not in self._path[-1]  # type: ignore[attr-defined]
        self._path.append(f"{node.name}.<locals>.")
        self.generic_visit(node)
        self._path.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.qualname = "".join([*self._path, "<lambda>"])  # type: ignore[attr-defined]  # read by `calls`
        self._path.append("<lambda>.<locals>.")
        self.generic_visit(node)
        self._path.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._path.append(f"{node.name}.")
        self.generic_visit(node)
        self._path.pop()
        module = ast.Assign([ast.Name("__module__", ast.Store())], ast.Constant("__main__"))
        place = 1 if ast.get_docstring(node, clean=False) is not None else 0
        node.body.insert(place, ast.copy_location(module, node.body[0]))
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        error = _helper("AssertionError", [node.msg] if node.msg else [], node)
        fails = ast.UnaryOp(ast.Not(), node.test)
        return ast.copy_location(ast.If(fails, [ast.copy_location(ast.Raise(error), node)], []), node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(" print", node.ctx), node) if node.id == "print" else node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        if node.conversion in _CONVERSIONS:
            node.value = _helper(_CONVERSIONS[node.conversion].strip(), [node.value], node.value)
            node.conversion = -1
        return node

    def visit_Starred(self, node: ast.Starred) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        node.value = _helper("star", [node.value], node.value)
        return node

    def visit_List(self, node: ast.List) -> ast.AST:
        return self._display(node, node.elts, "list")

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        return self._display(node, node.elts, "tuple")

    def visit_Set(self, node: ast.Set) -> ast.AST:
        code = compile(ast.Expression(node), "<set>", "eval", dont_inherit=True)
        if not code.co_names:
            return _helper("constant", [ast.Constant(code)], node)  # type: ignore[arg-type]  # any object will do
        self.generic_visit(node)
        return node

    def _display(self, node: ast.expr, elements: list[ast.expr], name: str) -> ast.AST:
        loaded = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        starred = loaded and any(isinstance(element, ast.Starred) for element in elements)
        self.generic_visit(node)
        return _helper(name, elements, node) if starred else node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self.generic_visit(node)
        if None not in node.keys:
            return node
        parts: list[ast.expr] = []
        for key, value in zip(node.keys, node.values, strict=True):
            parts.append(value if key is None else ast.copy_location(ast.Dict([key], [value]), value))
        return _helper("merge", parts, node)
