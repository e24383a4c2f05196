"""The guard: what the interpreter would not execute exactly as CPython does is refused before it runs.

An allow-list: a shape of program that is neither in `shapes` nor in a `visit_` method of `rules` is refused,
whatever it is. What only shows while the program runs is a `Trap` then, with the same outcome.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Collection, Iterable

from sandyard.envs.interpreter.modules import DEFAULT_IMPORTS
from sandyard.envs.interpreter.refusal import Refusal, Refused
from sandyard.envs.interpreter.rules.comprehensions import ComprehensionRules
from sandyard.envs.interpreter.rules.expressions import ExpressionRules
from sandyard.envs.interpreter.rules.names import all_bound
from sandyard.envs.interpreter.rules.statements import StatementRules


class Guard(StatementRules, ComprehensionRules, ExpressionRules):
    """`visit` raises `Refused`."""


def check(source: str, *, imports: Collection[str] = DEFAULT_IMPORTS) -> Refusal | None:
    """The first thing in `source` that the interpreter would not execute as CPython does, if any.

    A program that does not compile is not refused: it is a `SyntaxError` everywhere.
    """
    try:
        tree = parse(source)
    except (SyntaxError, ValueError):
        return None
    except (RecursionError, MemoryError):
        return Refusal("too deep a nesting", 0, 0)
    return check_tree(tree, imports)


def parse(source: str) -> ast.Module:
    """The tree of a program that compiles; raises what `compile` raises. Its warnings are nobody's here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(source, "<program>", "exec", dont_inherit=True)
        return ast.parse(source)


def check_tree(tree: ast.Module, imports: Collection[str], bound: Iterable[str] = ()) -> Refusal | None:
    """As `check`, of a tree; `bound` are names that earlier programs of the session have bound."""
    try:
        Guard(imports, frozenset({*all_bound(tree), *bound})).visit(tree)
    except Refused as refused:
        return refused.refusal
    except RecursionError:
        return Refusal("too deep a nesting", 0, 0)
    return None
