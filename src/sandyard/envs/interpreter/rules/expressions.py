"""Which expressions are accepted, comprehensions aside."""

from __future__ import annotations

import ast
import builtins

from sandyard.envs.interpreter.refusal import Refused
from sandyard.envs.interpreter.rules.names import Rules
from sandyard.envs.interpreter.shapes import ANNOTATION_TYPES, BUILTINS, CONSTANT_NAMES, INNER_ATTRIBUTES


class ExpressionRules(Rules):
    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._binding(node.id, node)
            return
        name = node.id
        if name in CONSTANT_NAMES and name not in self._bound:
            return
        if name.startswith("__"):
            raise Refused(f"name {name}", node)
        if name == "print":
            raise Refused("print that is not called at once", node)
        if hasattr(builtins, name) and name not in BUILTINS and name not in self._bound:
            raise Refused(f"builtin {name}", node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr.startswith("__") or node.attr in INNER_ATTRIBUTES:
            raise Refused(f"attribute {node.attr}", node)
        self._parts(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and "__" in node.value and ("{" in node.value or node.value == "__spec__"):
            raise Refused("text that may read an inner attribute", node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for index, kind in enumerate(node.ops):
            if isinstance(kind, ast.Is | ast.IsNot) and not any(map(self._is_single, operands[index : index + 2])):
                raise Refused("identity of values", node)
        self._parts(node)

    def _is_single(self, node: ast.expr) -> bool:
        """Whether a value has one identity: None, a bool, a builtin type."""
        if isinstance(node, ast.Name):
            return node.id in ANNOTATION_TYPES and node.id not in self._bound
        return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))

    def visit_Set(self, node: ast.Set) -> None:
        if any(isinstance(part, ast.Starred) for part in node.elts):
            raise Refused("starred value in a set display", node)  # the order of its items would be another
        self._parts(node)

    def visit_Call(self, node: ast.Call) -> None:
        if any(keyword.arg is None for keyword in node.keywords):
            raise Refused("double-starred argument", node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "type" and name not in self._bound and (len(node.args) != 1 or node.keywords):
            raise Refused("type() that makes a class", node)
        parts = [*node.args, *node.keywords]
        for part in parts if name == "print" else [node.func, *parts]:
            self.visit(part)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._arguments(node.args)
        self._function_depth += 1
        self.visit(node.body)
        self._function_depth -= 1
