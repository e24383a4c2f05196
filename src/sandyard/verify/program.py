"""What a verifier sends to the runner and what it believes of the answer."""

from __future__ import annotations

import ast
import json
import marshal
import secrets
import struct
import sys
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from sandyard.errors import TaskError, VerifierError
from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome, TestResult

_PACKAGE = "sandyard.verify.runner"
_MODULES = ("values", "link", "peer", "box", "confine", "zygote", "judge", "main")


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Seconds of one test (CPU time, which a busy machine does not shorten, and wall clock), of all
    together (wall clock), and MiB of address space of one process."""

    cpu_timeout: int = 5
    test_timeout: float = 30.0
    total_timeout: float = 90.0
    memory_mb: int = 320


@dataclass(frozen=True, slots=True)
class RunnerJob:
    """One verification: the bytes for the runner's stdin, and the nonce that its answer must bear."""

    nonce: str
    total: int
    stdin: bytes


def make_job(task: Task, solution: str, limits: RunnerLimits, *, uid_base: int, require_root: bool) -> RunnerJob:
    """Raises `TaskError` when the task's own setup or tests do not parse, or there are none."""
    if not task.tests:
        raise TaskError(f"task {task.task_id} has no tests")
    nonce = secrets.token_hex(32)
    job = {
        "nonce": nonce,
        "solution": solution,
        "setup": task.setup_code,
        "imports": _reference_imports(task),
        "entry_names": _entry_names(task),
        "tests": list(task.tests),
        "cpu_timeout": limits.cpu_timeout,
        "test_timeout": limits.test_timeout,
        "total_timeout": limits.total_timeout,
        "memory_mb": limits.memory_mb,
        "uid_base": uid_base,
        "require_root": require_root,
    }
    return RunnerJob(nonce, len(task.tests), _program() + _framed(job))


@cache
def start_source() -> str:
    """The argument of `python3 -I -c`."""
    return (resources.files(_PACKAGE) / "start.py").read_text()


def read_results(job: RunnerJob, output: str) -> list[TestResult]:
    """The results in the runner's output, checked: the nonce, one result a test, the count.

    Raises `VerifierError` for anything else, `TaskError` for a test that cannot be judged.
    """
    lines = [line for line in output.splitlines() if line.startswith(job.nonce + " ")]
    if len(lines) != 2:
        raise VerifierError(f"the runner gave no verdict ({len(lines)} lines of it)")
    body, count = (line[len(job.nonce) + 1 :] for line in lines)
    try:
        entries = [(int(number), str(outcome), str(detail)) for number, outcome, detail in json.loads(body)["results"]]
    except (ValueError, KeyError, TypeError) as error:
        raise VerifierError(f"the runner's verdict does not parse: {error}") from error
    results = [_one_result(index, *entry) for index, entry in enumerate(entries)]
    passed = sum(result.outcome is TestOutcome.PASSED for result in results)
    if len(results) != job.total or count != f"TESTS_PASSED {passed} {job.total}":
        raise VerifierError(f"the runner's verdict contradicts itself: {count!r} for {job.total} tests")
    return results


def _one_result(index: int, number: int, outcome: str, detail: str) -> TestResult:
    if outcome == "setup":
        raise TaskError(f"the task's own setup code fails: {detail}")
    if outcome == "unsupported":
        raise TaskError(f"test {index} cannot be judged: {detail}")
    if number != index or outcome not in set(TestOutcome):
        raise VerifierError(f"test {index}: the runner says {number} {outcome}: {detail}")
    return TestResult(index, TestOutcome(outcome), detail[:500])


@cache
def _program() -> bytes:
    """The runner's modules, compiled (spares the sandbox a third of its time where the Python is of
    the same kind) and as source."""
    package = resources.files(_PACKAGE)
    sources = {f"{_PACKAGE}.{name}": (package / f"{name}.py").read_text() for name in _MODULES}
    parents: list[tuple[str, None]] = [("sandyard", None), ("sandyard.verify", None), (_PACKAGE, None)]
    compiled = [(name, compile(text, name, "exec", dont_inherit=True, optimize=2)) for name, text in sources.items()]
    blobs = [
        str(sys.implementation.cache_tag).encode(),
        zlib.compress(marshal.dumps([*parents, *compiled])),
        zlib.compress(marshal.dumps([*parents, *sources.items()])),
    ]
    return struct.pack(">III", *(len(blob) for blob in blobs)) + b"".join(blobs)


def _framed(message: object) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body


def _parse(source: str, what: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TaskError(f"{what} does not parse: {error}") from error


def _test_names(task: Task) -> set[str]:
    sources = [(f"task {task.task_id}: test {i}", test) for i, test in enumerate(task.tests)]
    sources.append((f"task {task.task_id}: its setup code", task.setup_code))
    trees = [_parse(source, what) for what, source in sources]
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _entry_names(task: Task) -> list[str]:
    """Names of builtins that the tests take from the solution, since the reference defines them (a
    task may ask for a function called `sum`); all other builtins in a test are Python's own."""
    defined = {
        name
        for statement in _reference(task)
        for name in _bound_names(statement)
        if not isinstance(statement, ast.Import | ast.ImportFrom)
    }
    declared = task.metadata.get("entry_point")
    return sorted((defined | ({declared} if isinstance(declared, str) else set())) & _test_names(task))


def _reference_imports(task: Task) -> str:
    """Imports of the reference that the tests rely on: a test's `math` is never the solution's."""
    names = _test_names(task)
    return "\n".join(
        ast.unparse(statement)
        for statement in _reference(task)
        if isinstance(statement, ast.Import | ast.ImportFrom) and names & set(_bound_names(statement))
    )


def _reference(task: Task) -> Sequence[ast.stmt]:
    try:
        return _parse(task.reference, "the reference").body if task.reference else ()
    except TaskError:
        return ()  # a reference that does not parse tells nothing about names; `eval` reports it


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def summary(results: Sequence[TestResult]) -> Mapping[str, int]:
    """How many tests ended in each way."""
    return {str(outcome): sum(r.outcome is outcome for r in results) for outcome in TestOutcome}
