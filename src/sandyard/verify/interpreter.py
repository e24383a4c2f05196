"""The verifier of code tasks on the back end `interpreter`: a number that CPython would give, or none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection

from sandyard.envs.base import Execution
from sandyard.envs.interpreter.executor import worker_command, worker_environment
from sandyard.envs.interpreter.guard import check
from sandyard.envs.interpreter.modules import DEFAULT_IMPORTS
from sandyard.errors import HostError, Unsupported, VerifierError
from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome, Verdict
from sandyard.verify.code import CodeVerifier, RunnerLauncher
from sandyard.verify.interpreted import PID
from sandyard.verify.program import RunnerLimits

INTERPRETER_LIMITS = RunnerLimits(cpu_timeout=20, memory_mb=1024)
_ADVICE = "score it on back end 'process' or 'sandbox'"
_START_TIMEOUT = 60.0
_ENDED = "the solution's process ended"


class InterpreterLauncher(RunnerLauncher):
    """Runners whose box is the interpreter, forked from one process of this machine. NOT a sandbox."""

    uid_base = 0
    require_root = False

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def launch(self, stdin: bytes, timeout: float) -> Execution:
        started = time.monotonic()
        (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
        try:
            pid = await self._fork(their_in, their_out)
        except BaseException:
            os.close(our_in)
            os.close(our_out)
            raise
        finally:
            os.close(their_in)
            os.close(their_out)
        exchange = asyncio.get_running_loop().run_in_executor(None, _exchange, our_in, our_out, stdin)
        try:
            output = await asyncio.wait_for(asyncio.shield(exchange), timeout)
        except TimeoutError:
            return Execution("", "", None, timed_out=True, duration=time.monotonic() - started)
        finally:
            if not exchange.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)  # the runner ends its box and judge, and with them its output
        return Execution(output.decode(), "", 0, duration=time.monotonic() - started)

    async def close(self) -> None:
        """End the process that runners are forked from; the next launch starts another."""
        async with self._turn:
            self._end()

    async def _fork(self, stdin: int, stdout: int) -> int:
        """The process id of a new runner. Raises `VerifierError` when there is none."""
        async with self._turn:
            if self._control is None:
                await asyncio.to_thread(self._start)
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"j"], [stdin, stdout])
                return await asyncio.to_thread(_receive_pid, self._control)
            except OSError as error:
                self._end()
                raise VerifierError(f"the interpreter's runner did not start: {error}") from error

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._control.settimeout(_START_TIMEOUT)
            command = [*worker_command("sandyard.verify.interpreted"), str(theirs.fileno())]
            self._server = subprocess.Popen(command, env=worker_environment(), pass_fds=[theirs.fileno()])
        try:
            _receive_pid(self._control)
        except OSError as error:
            self._end()
            raise HostError(
                f"the interpreter did not start: {error}", remedy="pip install 'sandyard[interpreter]'"
            ) from error

    def _end(self) -> None:
        control, self._control = self._control, None
        server, self._server = self._server, None
        if control is not None:
            control.close()
        if server is not None:
            server.kill()
            server.wait()


def _receive_pid(control: socket.socket) -> int:
    message = control.recv(PID.size)
    if len(message) != PID.size:
        raise ConnectionError("its process has ended")
    return int(PID.unpack(message)[0])


def _exchange(stdin: int, stdout: int, data: bytes) -> bytes:
    """Write all of `data`, then read to the end."""
    with os.fdopen(stdout, "rb") as reader:
        with contextlib.suppress(BrokenPipeError), os.fdopen(stdin, "wb") as writer:
            writer.write(data)
        return reader.read()


class InterpreterVerifier(CodeVerifier):
    """Scores what the interpreter executes as CPython does.

    `verify` raises `Unsupported` for everything else: what the guard refuses, what shows only while the
    solution runs, and a solution that is not done in time, since CPython might be.
    """

    def __init__(
        self, *, limits: RunnerLimits = INTERPRETER_LIMITS, imports: Collection[str] = DEFAULT_IMPORTS
    ) -> None:
        self._interpreters = InterpreterLauncher()
        super().__init__(self._interpreters, limits=limits)
        self._imports = frozenset(imports)

    async def verify(self, task: Task, solution: str | None) -> Verdict:
        for source in (task.setup_code, solution or ""):
            refusal = check(source, imports=self._imports)
            if refusal is not None:
                raise Unsupported(f"task {task.task_id}: {refusal}")
        verdict = await super().verify(task, solution)
        for result in verdict.results:
            what = f"task {task.task_id}: test {result.index}"
            if result.outcome is TestOutcome.TIMEOUT:
                raise Unsupported(f"{what}: too slow in the interpreter", remedy=_ADVICE)
            if result.outcome is TestOutcome.CRASHED and result.detail.startswith(_ENDED):
                raise Unsupported(f"{what}: what the interpreter executes otherwise than CPython", remedy=_ADVICE)
        return verdict

    async def close(self) -> None:
        """End the process that runners are forked from."""
        await self._interpreters.close()
