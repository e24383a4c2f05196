"""Which statements are accepted."""

from __future__ import annotations

import ast
import builtins

from sandyard.envs.interpreter.modules import allows
from sandyard.envs.interpreter.refusal import Refused
from sandyard.envs.interpreter.rules.names import Rules
from sandyard.envs.interpreter.scope import bound_names
from sandyard.envs.interpreter.shapes import BUILTINS, DUNDER_METHODS


class StatementRules(Rules):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._definition(node.name, node)
        if node.decorator_list:
            raise Refused("decorator", node.decorator_list[0])
        if getattr(node, "type_params", None):
            raise Refused("type parameters", node)
        self._annotation(node.returns)
        self._arguments(node.args)
        self._function_depth += 1
        for statement in node.body:
            self.visit(statement)
        self._function_depth -= 1

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._definition(node.name, node)
        if node.decorator_list:
            raise Refused("decorator", node.decorator_list[0])
        if node.keywords or getattr(node, "type_params", None):
            raise Refused("class keyword", node)
        if self._function_depth:
            raise Refused("class in a function", node)
        for base in node.bases:
            if not isinstance(base, ast.Name) or (base.id in BUILTINS and not _is_plain_base(base.id)):
                raise Refused("base class that is no class of the program, object or Exception", base)
            self.visit(base)
        members = set(bound_names(node.body))
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self._no_member(statement.args, members)
            self._class_statement(statement)

    def _no_member(self, arguments: ast.arguments, members: set[str]) -> None:
        """A default of a method may name a member of the class, which the interpreter would not find."""
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None and any(isinstance(p, ast.Name) and p.id in members for p in ast.walk(default)):
                raise Refused("default that names a member of the class", default)

    def _class_statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            self._method(node)
        elif isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            if not _is_literal(node.value):
                raise Refused("class attribute that is no literal", node)
            self._parts(node)
        elif not isinstance(node, ast.Pass) and not _is_docstring(node):
            raise Refused("statement in a class body", node)

    def _method(self, node: ast.FunctionDef) -> None:
        if _is_dunder(node.name) and node.name not in DUNDER_METHODS:
            raise Refused(f"method {node.name}", node)
        if not (node.args.args or node.args.posonlyargs):
            raise Refused("method without self", node)
        returns = [part for part in ast.walk(node) if isinstance(part, ast.Return) and part.value is not None]
        if node.name == "__init__" and returns:
            raise Refused("value returned by __init__", returns[0])
        if node.name == "__len__" and not _is_pure_length(node):
            raise Refused("__len__ that does more than return a length", node)  # it may be asked twice for one truth
        name, node.name = node.name, node.name.strip("_") or "method"
        try:
            self.visit_FunctionDef(node)
        finally:
            node.name = name

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._target(target)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not isinstance(node.target, ast.Name):
            raise Refused("annotation of an attribute or item", node)
        self._annotation(node.annotation)
        self._target(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._parts(node)

    def visit_For(self, node: ast.For) -> None:
        if node.orelse:
            raise Refused("for-else", node.orelse[0])
        self._target(node.target)
        self.visit(node.iter)
        for statement in node.body:
            self.visit(statement)

    def visit_While(self, node: ast.While) -> None:
        if node.orelse:
            raise Refused("while-else", node.orelse[0])
        self._parts(node)

    def visit_Try(self, node: ast.Try) -> None:
        self._parts(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._binding(node.name, node)
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type] if node.type else []
        for kind in kinds:
            if not isinstance(kind, ast.Name):
                raise Refused("except with an expression", kind)
        self._parts(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if node.exc is None:
            raise Refused("raise without an exception", node)
        self._parts(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Subscript):
                raise Refused("del of what is no item", target)
        self._parts(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._module(alias.name, node)
            self._import(alias.asname or alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or "."
        if node.level:
            raise Refused("relative import", node)
        self._module(module, node)
        for alias in node.names:
            if alias.name == "*" or not allows(module, alias.name):
                raise Refused(f"import of {alias.name} from {module}", node)
            self._import(alias.asname or alias.name, node)

    def _module(self, name: str, node: ast.AST) -> None:
        if "." in name or name not in self._imports:
            raise Refused(f"import of {name}", node)

    def _import(self, name: str, node: ast.stmt) -> None:
        self._binding(name, node)
        self._imported.setdefault(name, node.lineno)


def _is_plain_base(name: str) -> bool:
    kind = getattr(builtins, name)
    return kind is object or (isinstance(kind, type) and issubclass(kind, BaseException))


def _is_dunder(name: str) -> bool:
    return name.startswith("__")


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _is_pure_length(node: ast.FunctionDef) -> bool:
    calls = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    only_len = all(isinstance(function, ast.Name) and function.id == "len" for function in calls)
    return len(node.body) == 1 and isinstance(node.body[0], ast.Return) and only_len
