"""Comprehensions, and functions in them that outlive a turn."""

from __future__ import annotations

import ast

from sandyard.envs.interpreter.calls import parameter_names
from sandyard.envs.interpreter.refusal import Refused
from sandyard.envs.interpreter.rules.names import Rules, targets_of
from sandyard.envs.interpreter.shapes import EAGER

_DEFERRED = (ast.Lambda, ast.GeneratorExp)


class ComprehensionRules(Rules):
    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node, [node.elt])

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node, [node.elt])

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node, [node.elt])

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, [node.key, node.value])

    def _comprehension(self, node: ast.expr, elements: list[ast.expr]) -> None:
        clauses: list[ast.comprehension] = getattr(node, "generators")  # noqa: B009 - four classes have it, no base
        targets: set[str] = set()
        for clause in clauses:
            if clause.is_async:
                raise Refused("async comprehension", node)
            self._target(clause.target)
            targets |= {part.id for part in ast.walk(clause.target) if isinstance(part, ast.Name)}
            if any(
                not isinstance(part, ast.Name | ast.Tuple | ast.List | ast.Starred | ast.expr_context)
                for part in ast.walk(clause.target)
            ):
                raise Refused("comprehension that assigns to an item or attribute", clause.target)
        inner = [*elements, *(part for clause in clauses for part in (*clause.ifs, clause.iter))]
        for part in inner:
            self._no_capture(part, targets)
            self.visit(part)

    def _no_capture(self, node: ast.AST, targets: set[str]) -> None:
        """CPython has one variable for all turns of a comprehension, the interpreter one for each: what
        is deferred must be used up within its turn."""
        if isinstance(node, _DEFERRED):
            captured = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & targets
            own = set(parameter_names(node.args)) if isinstance(node, ast.Lambda) else targets_of(node)
            if captured - own:
                raise Refused("function in a comprehension that keeps its variable", node)
        eager = isinstance(node, ast.Call) and self._is_eager(node)
        for part in ast.iter_child_nodes(node):
            if eager and isinstance(part, ast.GeneratorExp):
                self._no_capture_in(part, targets)
            elif eager and isinstance(part, ast.keyword) and part.arg == "key" and isinstance(part.value, ast.Lambda):
                self._no_capture_in(part.value, targets)
            else:
                self._no_capture(part, targets)

    def _no_capture_in(self, node: ast.AST, targets: set[str]) -> None:
        for part in ast.iter_child_nodes(node):
            self._no_capture(part, targets)

    def _is_eager(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Name):
            return call.func.id in EAGER and call.func.id not in self._bound
        return isinstance(call.func, ast.Attribute) and call.func.attr == "join"
