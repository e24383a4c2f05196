"""One Jupyter kernel: its process, its sockets, and what it says about one piece of code."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import queue
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import write_connection_file

from .languages import Language

START_SECONDS = 60.0
START_TRIES = 3
SILENT_SECONDS = 20.0
QUIET_SECONDS = 2.0  # how long after its reply a kernel may still say what belongs to it
MESSAGES = 100_000  # that wait to be heard; beyond the 1,000 that ZeroMQ keeps by itself it drops them
LAST_WORDS_SECONDS = 0.5  # how long what a kernel said before its death may take to arrive
KERNELS_FIRST = 300  # added to the kernel's badness, so that memory running out ends it, not the server

Message = dict[str, Any]


class KernelDied(Exception):
    """The kernel's process ended. `status` is as in `asyncio`: a negative number is a signal's."""

    def __init__(self, status: int) -> None:
        self.status = status
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        super().__init__(how)


class KernelStuck(Exception):
    """The kernel lives and does not answer."""


class Kernel:
    """Owns the process. One `run` at a time: the caller sees to it."""

    def __init__(self, language: Language, process: asyncio.subprocess.Process, connection: Path) -> None:
        self.language = language
        self.process = process
        self._connection = connection
        self._client = AsyncKernelClient(context=_context())
        self._heard = 0  # messages, whatever they are about
        self._exit = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, language: Language, cwd: str, environment: Mapping[str, str]) -> Kernel:
        """Raises `KernelDied` or `KernelStuck` when none of the tries came up, `OSError` when it cannot run."""
        for attempt in range(START_TRIES):
            kernel = await cls._launch(language, cwd, environment)
            try:
                await kernel._until_ready()
                return kernel
            except (KernelDied, KernelStuck):
                # Its ports were free when they were chosen; another may have taken one since.
                await kernel.stop()
                if attempt + 1 == START_TRIES:
                    raise
            except BaseException:
                await kernel.stop()
                raise
        raise AssertionError

    @property
    def dead(self) -> asyncio.Future[int]:
        """Done when the process has ended."""
        return self._exit

    async def run(self, code: str, on_message: Callable[[Message], None], *, silent: bool = False) -> Message:
        """Run code; hand on every message about it in order, then return the reply's content.

        Raises `KernelDied`. `on_message` must not wait."""
        asked = self._client.execute(code, silent=silent, allow_stdin=False, stop_on_error=False)
        listening = asyncio.create_task(self._listen(asked, asked, on_message))
        replying = asyncio.create_task(self._reply(asked))
        try:
            try:
                await self._first(replying)
            except KernelDied:
                await asyncio.wait((listening,), timeout=LAST_WORDS_SECONDS)
                raise
            await self._until_quiet(listening)
            await self._settle(asked, on_message)
            return replying.result()
        finally:
            for task in (listening, replying):
                task.cancel()
            await asyncio.gather(listening, replying, return_exceptions=True)

    async def run_silently(self, code: str) -> None:
        """Run code of our own. Raises `KernelDied`, and `KernelStuck` when it takes too long."""
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                await self.run(code, lambda _: None, silent=True)
        except TimeoutError as error:
            raise KernelStuck("the kernel does not answer") from error

    def interrupt(self, *, again: bool = False) -> None:
        """Ask for an end of what runs. Asked `again`, a kernel that takes messages for it may end as a whole."""
        if self.language.interrupt == "message" and not again:
            self._client.control_channel.send(self._client.session.msg("interrupt_request"))
        else:
            self._signal(signal.SIGINT)

    async def stop(self) -> None:
        """End the process and what it started in its group. Idempotent."""
        self._signal(signal.SIGKILL)
        await asyncio.shield(self._exit)
        self._client.stop_channels()
        _forget(self._connection)

    @classmethod
    async def _launch(cls, language: Language, cwd: str, environment: Mapping[str, str]) -> Kernel:
        name = _connection_file(language.sockets)
        try:
            process = await asyncio.create_subprocess_exec(
                *language.argv(name),
                cwd=cwd,
                env={**os.environ, **environment, "NO_COLOR": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except BaseException:
            _forget(Path(name))
            raise
        _offer_first(process.pid)
        return cls(language, process, Path(name))

    async def _until_ready(self) -> None:
        client = self._client
        client.load_connection_file(str(self._connection))
        client.start_channels(shell=True, iopub=True, stdin=False, hb=False, control=True)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            client.kernel_info()
            with contextlib.suppress(queue.Empty):
                # Both must be heard: what is said before the subscription has arrived is lost.
                await self._first(asyncio.ensure_future(client.get_shell_msg(timeout=1.0)))
                await self._first(asyncio.ensure_future(client.get_iopub_msg(timeout=0.5)))
                return
        raise KernelStuck(f"the {self.language.name} kernel did not answer in {START_SECONDS:g} s")

    async def _listen(self, asked: str, last: str, on_message: Callable[[Message], None]) -> int:
        """Hand on what is about `asked` until the kernel is idle again after `last`; how much that was."""
        heard = 0
        while True:
            message = await self._client.get_iopub_msg(timeout=None)
            self._heard += 1
            about = message["parent_header"].get("msg_id")
            if about == asked:
                heard += 1
                on_message(message)
            if about == last and message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return heard

    async def _settle(self, asked: str, on_message: Callable[[Message], None]) -> None:
        """Ask for something else until nothing more about `asked` comes before its answer."""
        heard = int(self.language.late)
        while heard:
            listening = asyncio.ensure_future(self._listen(asked, self._client.kernel_info(), on_message))
            heard = await self._first(listening)

    async def _until_quiet(self, listening: asyncio.Task[int]) -> None:
        """Wait for the end of `listening`, or until nothing is heard: the last message may be lost in a flood."""
        while not listening.done():
            before = self._heard
            await asyncio.wait((listening, self._exit), timeout=QUIET_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if self._heard == before:
                return
        listening.result()

    async def _reply(self, asked: str) -> Message:
        while True:
            message: Message = await self._client.get_shell_msg(timeout=None)
            if message["parent_header"].get("msg_id") == asked:
                content: Message = message["content"]
                return content

    async def _first(self, work: asyncio.Future[Any]) -> Any:
        """The result of `work`, unless the process ends before it."""
        try:
            await asyncio.wait((work, self._exit), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise KernelDied(self._exit.result())
            return work.result()
        finally:
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@functools.cache
def _context() -> zmq.asyncio.Context:
    context = zmq.asyncio.Context()
    context.rcvhwm = MESSAGES
    return context


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _connection_file(sockets: str) -> str:
    place = tempfile.mkdtemp(prefix="kernel-")
    address = "127.0.0.1" if sockets == "tcp" else f"{place}/socket"
    key = os.urandom(24).hex().encode()
    name, _ = write_connection_file(f"{place}/connection.json", ip=address, key=key, transport=sockets)
    return name


def _forget(connection: Path) -> None:
    shutil.rmtree(connection.parent, ignore_errors=True)  # the kernel may have made its sockets there


def _offer_first(pid: int) -> None:
    with contextlib.suppress(OSError):  # it may have ended already
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(KERNELS_FIRST))
