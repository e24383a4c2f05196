"""Names while a program runs: CPython's lexical scopes, as the dictionary that smolagents expects.

smolagents copies the dictionary of the definition for every call, so that a closure sees old values
and an argument that was left out takes a global's. Here `copy` opens a scope inside the other
instead; reads go up the chain, writes stay in the scope.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from sandyard.envs.interpreter.traps import Trap

UNBOUND = object()  # a local that has no value yet: what hides a global of its name
_SHARED = ("_operations_count",)  # what smolagents reads at every node


class Scope(dict[str, Any]):
    """The scope of a module, a function call, a lambda call or one turn of a comprehension."""

    def __init__(self, parent: Scope | None = None, unbound: Iterable[str] = (), *, function: bool = False) -> None:
        super().__init__()
        self.parent = parent
        self.is_function = function
        if parent is not None:
            for name in _SHARED:
                super().__setitem__(name, dict.__getitem__(parent, name))
        for name in unbound:
            super().__setitem__(name, UNBOUND)

    def copy(self) -> Scope:
        return Scope(self)

    def __contains__(self, name: object) -> bool:
        scope: Scope | None = self
        while scope is not None:
            if dict.__contains__(scope, name):
                return True
            scope = scope.parent
        return False

    def __missing__(self, name: str) -> Any:
        scope = self.parent
        while scope is not None:
            if dict.__contains__(scope, name):
                return dict.__getitem__(scope, name)
            scope = scope.parent
        raise KeyError(name)

    def read(self, name: str) -> Any:
        """The value of `name`, or `UNBOUND` when no scope has it.

        Raises `UnboundLocalError` as CPython does; `Trap` where its words differ between versions.
        """
        if dict.__contains__(self, name):
            value = dict.__getitem__(self, name)
            if value is UNBOUND:
                raise UnboundLocalError(
                    f"cannot access local variable '{name}' where it is not associated with a value"
                )
            return value
        try:
            value = self[name]
        except KeyError:
            return UNBOUND
        if value is UNBOUND:
            raise Trap(f"the free variable {name!r}, read before it has a value")
        return value

    def unbind(self, name: str) -> None:
        """End of `except … as name`: the name has no value any more."""
        if self.is_function:
            self[name] = UNBOUND
        else:
            self.pop(name, None)


def bound_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that statements bind in their own scope (not in functions, lambdas, comprehensions)."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
            continue
        elif isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        pending.extend(ast.iter_child_nodes(node))
