"""What all rules share: names, annotations, and the refusal of every shape that no rule knows."""

from __future__ import annotations

import ast
from collections.abc import Collection

from sandyard.envs.interpreter.calls import parameter_names
from sandyard.envs.interpreter.refusal import Refused
from sandyard.envs.interpreter.scope import bound_names
from sandyard.envs.interpreter.shapes import ANNOTATION_TYPES, GENERIC_TYPES, PLAIN, WORDS

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Rules(ast.NodeVisitor):
    """`imports` are the modules that may be imported, `bound` every name that the program binds anywhere."""

    def __init__(self, imports: Collection[str], bound: frozenset[str]) -> None:
        self._imports = imports
        self._bound = bound
        self._function_depth = 0
        self._imported: dict[str, int] = {}  # name: line

    def generic_visit(self, node: ast.AST) -> None:
        if type(node) not in PLAIN:
            name = type(node).__name__
            raise Refused(WORDS.get(name, name), node)
        super().generic_visit(node)

    def _parts(self, node: ast.AST) -> None:
        super().generic_visit(node)

    def _arguments(self, arguments: ast.arguments) -> None:
        stars = [star for star in (arguments.vararg, arguments.kwarg) if star]
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars):
            self._binding(argument.arg, argument)
            self._annotation(argument.annotation)
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self.visit(default)

    def _target(self, target: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._target(part.value if isinstance(part, ast.Starred) else part)
        else:
            self.visit(target)

    def _definition(self, name: str, node: ast.AST) -> None:
        if name == "print":
            raise Refused("a definition of print", node)
        self._binding(name, node)

    def _binding(self, name: str, node: ast.AST) -> None:
        if name.startswith("__") or name in ("print", "super", "_print_outputs", "_operations_count"):
            raise Refused(f"a value for the name {name}", node)

    def _annotation(self, node: ast.expr | None) -> None:
        """Annotations are not evaluated: only what cannot fail or do anything may stand there."""
        if node is None or (isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str))):
            return
        base = node.value if isinstance(node, ast.Subscript) else node
        known = isinstance(base, ast.Name) and (base.id in ANNOTATION_TYPES and base.id not in self._bound)
        imported = isinstance(base, ast.Name) and self._imported.get(base.id, node.lineno) < node.lineno
        if not known and not imported:
            raise Refused("annotation", node)
        if isinstance(node, ast.Subscript):
            if isinstance(base, ast.Name) and known and base.id not in GENERIC_TYPES:
                raise Refused("annotation", node)
            for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
                self._annotation(part)


def all_bound(tree: ast.Module) -> set[str]:
    names = set(bound_names(tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names |= set(bound_names(node.body)) | {node.name}
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            names |= set(parameter_names(node.args))
        if isinstance(node, _COMPREHENSIONS):
            names |= targets_of(node)
    return names


def targets_of(node: ast.AST) -> set[str]:
    clauses: list[ast.comprehension] = getattr(node, "generators", [])
    parts = (part for clause in clauses for part in ast.walk(clause.target))
    return {part.id for part in parts if isinstance(part, ast.Name)}
