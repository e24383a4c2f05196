"""smolagents' interpreter with what it does wrong replaced or trapped, in this process.

For a worker process only: it changes smolagents' module, and a run cannot be stopped.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from sandyard.envs.interpreter.calls import reset_depth
from sandyard.envs.interpreter.evaluators import Evaluators
from sandyard.envs.interpreter.guard import check_tree, parse
from sandyard.envs.interpreter.modules import DEFAULT_IMPORTS
from sandyard.envs.interpreter.refusal import Refusal
from sandyard.envs.interpreter.rewrite import helpers, rewrite
from sandyard.envs.interpreter.scope import Scope
from sandyard.envs.interpreter.shapes import BUILTINS, CONSTANT_NAMES
from sandyard.envs.interpreter.traps import BreakLoop, ContinueLoop, ReturnValue, Trap
from sandyard.errors import HostError

_MODULE = "smolagents.local_python_executor"
PROVEN = frozenset(
    {"41859e622bae8ad85ed861b7abef12b02f9106133a273c2f4d8a1e37a743d1ca"}
)  # SHA-256 of the sources that the differential test has run against
_GENERATED = (ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp)
RECURSION_LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: nothing set when it ran through."""

    error: BaseException | None = None  # what it raised
    refusal: Refusal | None = None

    @property
    def failed(self) -> bool:
        """Whether it raised; `SystemExit` without a code, or with 0, is no failure."""
        clean = isinstance(self.error, SystemExit) and self.error.code in (None, 0)
        return self.error is not None and not clean


class Engine:
    """One session's names. `print_out` gets the arguments of every `print`, `on_trap` what no check saw before.

    Raises `HostError` when smolagents is missing or not a release that was proven.
    """

    def __init__(
        self,
        print_out: Callable[..., None],
        *,
        imports: Collection[str] = DEFAULT_IMPORTS,
        on_trap: Callable[[Trap], None] | None = None,
    ) -> None:
        self._on_trap = on_trap
        self._smolagents = _installed()
        self._imports = sorted(imports)
        functions = {name: getattr(builtins, name) for name in BUILTINS - {"print"}}
        constants = {"NotImplemented": NotImplemented, "Ellipsis": Ellipsis}
        self._builtins = {**functions, **constants, **helpers(print_out)}
        self.names = _module_scope()
        self.trap: Trap | None = None

    def namespace(self) -> dict[str, Any]:
        """The names that programs have bound."""
        return {name: value for name, value in self.names.items() if name not in _OWN_NAMES}

    def run(self, source: str) -> Ended:
        """Check and run `source` on the names of earlier runs. What it raises is in the answer."""
        try:
            tree = parse(source)
        except (SyntaxError, ValueError) as error:
            return Ended(error=error)
        except (RecursionError, MemoryError):
            return Ended(refusal=Refusal("too deep a nesting", 0, 0))
        refusal = check_tree(tree, self._imports, self.namespace())
        return Ended(refusal=refusal) if refusal else self._run(rewrite(tree))

    def _run(self, tree: ast.Module) -> Ended:
        self.trap = None
        Trap.on_trap = self._note
        reset_depth()
        error: BaseException | None = None
        try:
            for statement in tree.body:
                self._smolagents.evaluate_ast(statement, self.names, {}, self._builtins, self._imports)
        except BaseException as raised:  # noqa: BLE001 - whatever the program raised is its outcome
            error = raised
        if self.trap is not None:  # whatever came after it: a `finally` may have hidden it
            return Ended(refusal=Refusal(self.trap.construct, self.trap.line, self.trap.column))
        return Ended(error=error)

    def _note(self, trap: Trap) -> None:
        if self._on_trap is not None:
            self._on_trap(trap)
        if self.trap is None:
            self.trap = trap


_OWN_NAMES = frozenset({"_operations_count", "__name__"}) | CONSTANT_NAMES


def _module_scope() -> Scope:
    scope = Scope()
    scope.update({"_operations_count": {"counter": 0}, "__name__": "__main__"})
    return scope


def last_line(error: BaseException) -> str:
    """The last line of the error's traceback."""
    try:
        text = str(error)
    except Exception as inner:  # noqa: BLE001 - a program's __str__ may raise anything
        text = f"<no text: {type(inner).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _installed() -> Any:
    """smolagents' module with the evaluators in place."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        raise HostError(
            f"the interpreter needs smolagents: {error}", remedy="pip install 'sandyard[interpreter]'"
        ) from error
    if not hasattr(module, "sandyard_evaluators"):
        digest = hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
        if digest not in PROVEN:
            raise HostError(
                "this release of smolagents was not proven against CPython", remedy="install smolagents 1.26.0"
            )
        _install(module)
    return module


def _install(module: ModuleType) -> None:
    smolagents: Any = module
    smolagents.InterpreterError = Trap
    smolagents.BreakException, smolagents.ContinueException = BreakLoop, ContinueLoop
    smolagents.ReturnException = ReturnValue
    smolagents.MAX_OPERATIONS = smolagents.MAX_WHILE_ITERATIONS = sys.maxsize  # time is the limit
    smolagents.evaluate_ast = evaluate = _guarded_ast(smolagents)
    evaluators = Evaluators(evaluate, smolagents.set_value)
    for name in dir(evaluators):
        if name.startswith("evaluate_") or name == "set_value":
            getattr(smolagents, name)  # a name that smolagents does not have would replace nothing
            setattr(smolagents, name, getattr(evaluators, name))
    smolagents.sandyard_evaluators = evaluators


def _guarded_ast(smolagents: Any) -> Callable[..., Any]:
    inner, is_safe = smolagents.evaluate_ast.__wrapped__, smolagents.check_safer_result

    def evaluate_ast(
        node: ast.AST, state: Scope, tools: Any, builtin_names: Any, authorized_imports: Collection[str] = ()
    ) -> Any:
        try:
            result = inner(node, state, tools, builtin_names, authorized_imports)
        except Trap as trap:
            if not trap.line:
                trap.line, trap.column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
            raise
        except (RecursionError, MemoryError) as error:
            raise Trap(f"a program that meets a limit of the interpreter ({type(error).__name__})") from error
        except RuntimeError as error:
            # smolagents builds these with a generator, through which StopIteration does not pass.
            if isinstance(node, _GENERATED) and isinstance(error.__cause__, StopIteration):
                raise Trap("StopIteration in a display or comprehension") from error
            raise
        if isinstance(result, ModuleType | FunctionType | BuiltinFunctionType):
            is_safe(result, tools, authorized_imports)
        return result

    return evaluate_ast
