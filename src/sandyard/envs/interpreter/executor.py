"""`Interpreter`: programs in smolagents' interpreter, under the guard, in a worker process of their own.

A thread that runs an endless loop cannot be stopped; a process can. The price: a worker takes 0.4 s of CPU to
start and 54 MB, a session is a fork of it, a small program takes 1 ms there and back, and loops run some two
hundred times slower than in CPython. After a timeout there is a new worker, without the session's names.

NOT a sandbox: the guard keeps programs from files, processes and the network by what it accepts,
nothing else does. Untrusted code belongs into the back ends `process` or `sandbox`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import sandyard
from sandyard.envs.base import StepStatus
from sandyard.envs.interpreter import frames
from sandyard.envs.interpreter.guard import check
from sandyard.envs.interpreter.modules import DEFAULT_IMPORTS
from sandyard.envs.interpreter.refusal import ADVICE, Refusal
from sandyard.envs.interpreter.result import InterpreterResult
from sandyard.errors import HostError

_START_TIMEOUT = 60.0


class WorkerLost(Exception):
    """The worker ended by itself; `code` is its exit code, negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"signal {-code}" if code < 0 else f"exit code {code}")
        self.code = code


class Interpreter:
    """One session: names that a run binds are there in the next.

    `imports` are the modules that programs may import; of those beyond `DEFAULT_IMPORTS`, which nobody proved
    to be safe, every public member. `time_limit` is in seconds, `output_limit` in characters.
    """

    def __init__(
        self,
        *,
        imports: Collection[str] = DEFAULT_IMPORTS,
        time_limit: float = 10.0,
        output_limit: int = 64 << 10,
        memory_mb: int = 1024,
        hash_seed: int | None = None,
    ) -> None:
        self.imports = frozenset(imports)
        self.time_limit = time_limit
        self._settings = {"imports": sorted(imports), "output_limit": output_limit, "memory_mb": memory_mb}
        self._hash_seed = hash_seed
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def run(self, source: str, *, timeout: float | None = None) -> InterpreterResult:
        """Run one program; calls at the same time wait for each other.

        Raises `HostError` when smolagents is not installed, or not in a release that was proven.
        """
        async with self._turn:
            started = time.monotonic()
            refusal = check(source, imports=self.imports)
            if refusal is not None:
                return _refused(refusal, time.monotonic() - started)
            return await self._run(source, timeout or self.time_limit)

    async def reset(self) -> None:
        """Forget the names of the session."""
        async with self._turn:
            if self._process is not None:
                try:
                    await self._ask(self._process, {"reset": True}, self.time_limit)
                except (TimeoutError, WorkerLost):
                    await self._end()  # without a worker there are no names

    async def close(self) -> None:
        """End the worker. The interpreter may be used again, as a new session."""
        async with self._turn:
            await self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, source: str, timeout: float) -> InterpreterResult:
        process = self._process or await self._start()
        started = time.monotonic()
        try:
            answer = await self._ask(process, {"source": source}, timeout)
        except TimeoutError:
            await self._end()
            took = time.monotonic() - started
            return InterpreterResult(
                StepStatus.TIMEOUT, error=f"stopped after {timeout:g} s", state_lost=True, duration=took
            )
        except WorkerLost as lost:
            return _lost(lost, time.monotonic() - started)
        return _result(answer, time.monotonic() - started)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *worker_command("sandyard.envs.interpreter.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd="/",
            env=worker_environment(self._hash_seed),
            start_new_session=True,
        )
        self._process = process
        try:
            answer = await self._ask(process, self._settings, _START_TIMEOUT)
        except (TimeoutError, WorkerLost) as error:
            await self._end()
            raise HostError(f"the interpreter's worker did not start: {error}") from error
        if "missing" in answer:
            await self._end()
            raise HostError(answer["missing"], remedy=answer["remedy"])
        return process

    async def _ask(self, process: asyncio.subprocess.Process, message: Any, timeout: float) -> Any:
        """The worker's answer. Whatever else happens, the worker is ended: no later call gets this answer."""
        assert process.stdin
        assert process.stdout
        answered = False
        try:
            async with asyncio.timeout(timeout):
                process.stdin.write(frames.encode(message))
                await process.stdin.drain()
                header = await process.stdout.readexactly(frames.HEADER.size)
                answer = json.loads(await process.stdout.readexactly(frames.HEADER.unpack(header)[0]))
            answered = True
            return answer
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            code = await process.wait()
            raise WorkerLost(code) from error
        finally:
            if not answered:
                await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # nothing of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()


def worker_command(module: str) -> list[str]:
    """Run a module of ours with this Python; the working directory is no place to import from."""
    return [sys.executable, "-P", "-s", "-m", module]


def worker_environment(hash_seed: int | None = None) -> dict[str, str]:
    """Nothing of this process's own: it may hold keys."""
    root = str(Path(sandyard.__file__).parent.parent) if sandyard.__file__ else ""
    seed = "random" if hash_seed is None else str(hash_seed)
    return {"PATH": os.defpath, "PYTHONPATH": root, "LANG": "C.UTF-8", "PYTHONHASHSEED": seed}


def _refused(refusal: Refusal, took: float) -> InterpreterResult:
    return InterpreterResult(StepStatus.UNSUPPORTED, error=str(refusal), refusal=refusal, duration=took)


def _lost(lost: WorkerLost, took: float) -> InterpreterResult:
    """A kill from outside is the machine's doing; any other end is a program that the worker cannot hold."""
    if lost.code == -signal.SIGKILL:
        return InterpreterResult(
            StepStatus.INFRA_ERROR, error=f"the worker was killed ({lost})", state_lost=True, duration=took
        )
    error = f"unsupported: a program that ends the worker ({lost}): {ADVICE}"
    return InterpreterResult(StepStatus.UNSUPPORTED, error=error, state_lost=True, duration=took)


def _result(answer: dict[str, Any], took: float) -> InterpreterResult:
    if answer["refusal"] is not None:
        refusal = Refusal(*answer["refusal"])
        return InterpreterResult(StepStatus.UNSUPPORTED, answer["stdout"], str(refusal), refusal, duration=took)
    status = StepStatus.TASK_FAILED if answer["error"] else StepStatus.OK
    return InterpreterResult(status, answer["stdout"], answer["error"], duration=took)
