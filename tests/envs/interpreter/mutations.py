"""Wrong solutions out of right ones: one small change each, as a policy's mistakes are."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable

from sandyard.envs.interpreter.guard import parse

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.FloorDiv,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitAnd,
}


def mutate(source: str, seed: int) -> str:
    """`source` with one change; the same text where nothing can be changed."""
    tree = parse(source)
    chance = random.Random(seed)
    changes: list[Callable[[], None]] = []
    for node in ast.walk(tree):
        changes += _changes(node)
    if not changes:
        return source
    chance.choice(changes)()
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _changes(node: ast.AST) -> list[Callable[[], None]]:
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _SWAPS:
        swapped = _SWAPS[type(node.op)]()
        return [lambda: setattr(node, "op", swapped)]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        compare = _SWAPS[type(node.ops[0])]()
        return [lambda: setattr(node, "ops", [compare, *node.ops[1:]])]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
        return [lambda: setattr(node, "value", value + 1), lambda: setattr(node, "value", value - 1)]
    if isinstance(node, ast.Constant) and type(node.value) is str:
        return [lambda: setattr(node, "value", "")]
    if isinstance(node, ast.Return) and node.value is not None:
        return [lambda: setattr(node, "value", None), lambda: setattr(node, "value", ast.Constant(0))]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return [lambda: setattr(node, "id", node.id + "_")]
    if isinstance(node, ast.Attribute):
        return [lambda: setattr(node, "attr", node.attr + "_")]
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        return [lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), test))]
    if isinstance(node, ast.Call) and node.args:
        return [lambda: setattr(node, "args", node.args[:-1])]
    return []
