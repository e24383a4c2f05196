"""What the guard accepts: the shapes of programs that were proven to run as in CPython."""

from __future__ import annotations

import ast
import builtins


def _words(text: str) -> list[str]:
    return text.split()


# Accepted wherever they stand, whatever their parts are; the parts are checked on their own.
PLAIN: frozenset[type[ast.AST]] = frozenset(
    {
        ast.Module,
        ast.Expr,
        ast.Return,
        ast.If,
        ast.Pass,
        ast.Break,
        ast.Continue,
        ast.Assert,
        ast.BoolOp,
        ast.UnaryOp,
        ast.IfExp,
        ast.Dict,
        ast.JoinedStr,
        ast.FormattedValue,
        ast.Slice,
        ast.List,
        ast.Tuple,
        ast.Subscript,
        ast.keyword,
        ast.And,
        ast.Or,
        ast.Not,
        ast.USub,
        ast.UAdd,
        ast.Invert,
        ast.Add,
        ast.Sub,
        ast.Mult,
        ast.Div,
        ast.FloorDiv,
        ast.Mod,
        ast.Pow,
        ast.LShift,
        ast.RShift,
        ast.BitAnd,
        ast.BitOr,
        ast.BitXor,
        ast.Eq,
        ast.NotEq,
        ast.Lt,
        ast.LtE,
        ast.Gt,
        ast.GtE,
        ast.In,
        ast.NotIn,
        ast.Is,
        ast.IsNot,
        ast.Load,
        ast.Store,
        ast.Del,
        ast.BinOp,
        ast.Starred,
        ast.arg,
    }
)

# The word for what is refused, where the name of the node does not say it.
WORDS: dict[str, str] = {
    "AsyncFunctionDef": "async def",
    "AsyncFor": "async for",
    "AsyncWith": "async with",
    "Await": "await",
    "Global": "global",
    "Nonlocal": "nonlocal",
    "Match": "match",
    "NamedExpr": "assignment expression",
    "Yield": "yield",
    "YieldFrom": "yield from",
    "With": "with",
    "TryStar": "except*",
    "MatMult": "matrix product",
    "TypeAlias": "type alias",
    "TemplateStr": "template string",
}

_FUNCTIONS = (
    "abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter float format "
    "frozenset hasattr hash hex int isinstance issubclass iter len list map max min next object oct ord pow range repr "
    "reversed round set slice sorted str sum tuple type zip print"
)
_NOT_RAISED = frozenset({"StopAsyncIteration", "GeneratorExit", "RecursionError", "MemoryError", "KeyboardInterrupt"})
EXCEPTIONS = frozenset(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException) and name not in _NOT_RAISED
)
BUILTINS = frozenset(_FUNCTIONS.split()) | EXCEPTIONS
CONSTANT_NAMES = frozenset({"NotImplemented", "Ellipsis", "__name__"})

# Methods that the slots of a type call as CPython does. Not __bool__: the interpreter asks twice for one truth.
DUNDER_METHODS = frozenset(
    f"__{name}__"
    for name in _words(
        "init str repr eq ne lt le gt ge hash len getitem setitem delitem contains iter call "
        "add sub mul truediv floordiv mod pow neg abs radd rsub rmul iadd and or xor"
    )
)

# Attributes of functions, generators, frames, code and tracebacks: they would show the interpreter.
INNER_ATTRIBUTES = frozenset(
    _words(
        "gi_frame gi_code gi_running gi_yieldfrom gi_suspended cr_frame f_back f_globals f_locals f_builtins f_code "
        "tb_frame tb_next tb_lineno co_code"
    )
)

# Builtins that use up their iterable before they return: what is deferred in it cannot outlive a turn of a loop.
EAGER = frozenset(_words("all any bool bytearray bytes dict frozenset list max min set sorted sum tuple"))

ANNOTATION_TYPES = frozenset(_words("int float str bool bytes list dict tuple set frozenset object complex type"))
GENERIC_TYPES = frozenset(_words("list dict tuple set frozenset type"))
