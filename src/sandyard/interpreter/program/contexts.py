"""Contexts: a language, a working directory, and a kernel that is replaced when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass

from . import languages
from .environment import given
from .kernel import Kernel, KernelDied, KernelStuck, Message
from .languages import Language
from .output import Output

log = logging.getLogger("sandyard.interpreter")

INTERRUPT_SECONDS = 6.0  # a kernel that is not idle so long after an interrupt is replaced
INTERRUPT_AGAIN = 2.0
AT_MOST = 64  # contexts, each with a process of its own

_RESTARTED = "Context was restarted"
_REMOVED = "Context was removed"
_LOST = "[the kernel of this context had ended ({}) and was started again: what it knew is gone]\n"


class UnknownContext(LookupError):
    """There is no such context."""


class Refused(ValueError):
    """The request cannot be fulfilled; the message says why."""


@dataclass(frozen=True, slots=True)
class ContextInfo:
    id: str
    language: str
    cwd: str


class Context:
    """Executions queue on `_turn`; whoever has it may use or replace the kernel."""

    def __init__(self, language_name: str, cwd: str) -> None:
        self.info = ContextInfo(str(uuid.uuid4()), language_name, cwd)
        self._language: Language = languages.find(language_name)
        self._turn = asyncio.Lock()
        self._kernel: Kernel | None = None
        self._told: Mapping[str, str] = {}
        self._ended = ""  # how the kernel ended, if nobody was told yet
        self._restarting = False
        self._closed = False

    async def ready(self) -> None:
        """Have a kernel. Raises `KernelDied`, `KernelStuck`, `OSError`."""
        async with self._turn:
            await self._have()

    async def execute(self, code: str, variables: Mapping[str, str], output: Output) -> None:
        """Run code and end `output`. Cancelled, it interrupts the code before it lets the next one run."""
        async with self._turn:
            try:
                if self._restarting:
                    raise KernelDied(-9)
                kernel = await self._have()
                if self._ended:
                    output.text("stderr", _LOST.format(self._ended))
                    self._ended = ""
                await self._tell(kernel)
                await self._run(kernel, code, variables, output)
            except KernelDied as death:
                self._died(death, output)
            except (KernelStuck, OSError) as error:
                output.error("KernelError", f"{self.info.language} kernel: {error}", [])
                await self._drop()
            finally:
                output.end()

    async def restart(self) -> None:
        """A fresh kernel. What runs is told that the context was restarted. Raises like `ready`."""
        self._restarting = True
        if self._kernel is not None:
            await self._kernel.stop()
        async with self._turn:
            self._restarting = False
            await self._drop()
            await self._have()
            self._ended = ""

    async def close(self) -> None:
        """End the kernel; what runs or waits here is told. Idempotent."""
        self._closed = True
        self._restarting = True
        if self._kernel is not None:
            await self._kernel.stop()

    async def _have(self) -> Kernel:
        if self._closed:
            raise KernelStuck(_REMOVED)
        if self._kernel is not None and self._kernel.dead.done():
            self._ended = self._ended or str(KernelDied(self._kernel.dead.result()))
            await self._drop()
        if self._kernel is None:
            self._told = given()
            kernel = await Kernel.start(self._language, self.info.cwd, self._told)
            if self._closed:
                await kernel.stop()
                raise KernelStuck(_REMOVED)
            self._kernel = kernel
        return self._kernel

    async def _tell(self, kernel: Kernel) -> None:
        """Set the sandbox's variables that came after the kernel."""
        variables = given()
        if variables != self._told:
            await kernel.run_silently(self._language.enter(variables))
            self._told = variables

    async def _run(self, kernel: Kernel, code: str, variables: Mapping[str, str], output: Output) -> None:
        if variables:
            await kernel.run_silently(self._language.enter(variables))
        work = asyncio.ensure_future(kernel.run(code, output.heard))
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError:
            await _whole(self._calm(kernel, work))
            raise
        finally:
            if variables and not kernel.dead.done() and work.done():
                await _whole(kernel.run_silently(self._language.leave))
        output.replied(work.result())

    async def _calm(self, kernel: Kernel, work: asyncio.Future[Message]) -> None:
        """Interrupt what runs, and end the kernel if that does not help."""
        for attempt in range(int(INTERRUPT_SECONDS / INTERRUPT_AGAIN)):
            kernel.interrupt(again=attempt > 0)
            await asyncio.wait((work,), timeout=INTERRUPT_AGAIN)
            if work.done():
                break
        else:
            log.warning("kernel of context %s did not heed interrupts and is replaced", self.info.id)
            await kernel.stop()
            await asyncio.wait((work,))
        if isinstance(work.exception(), KernelDied):
            self._ended = "ended by the interrupt of a client that went away"

    def _died(self, death: KernelDied, output: Output) -> None:
        if self._restarting:
            name, value = ("ContextRemoved", _REMOVED) if self._closed else ("ContextRestarting", _RESTARTED)
            output.error(name, value, [])
            return
        hint = "; the sandbox may have run out of memory" if death.status == -9 else ""
        lost = "it is started again with the next execution, and what it knew is gone"
        output.error("KernelDied", f"the {self.info.language} kernel was {death}{hint}; {lost}", [])

    async def _drop(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await kernel.stop()


class Contexts:
    """All contexts by id; the default ones have an id too. A default context's kernel starts when it is needed."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._all: dict[str, Context] = {}
        self._defaults: dict[str, str] = {}
        for language in languages.available():
            if language != "typescript":
                self._defaults[language] = self._add(language, home).info.id

    def list(self) -> list[dict[str, str]]:
        return [asdict(context.info) for context in self._all.values()]

    def get(self, context_id: str) -> Context:
        """Raises `UnknownContext`."""
        context = self._all.get(context_id)
        if context is None:
            raise UnknownContext(f"Context {context_id} not found")
        return context

    def default(self, language: str | None = None) -> Context:
        """The context that code without one runs in; made again if it was removed. Raises `UnknownLanguage`."""
        name = languages.normal(language)
        context = self._all.get(self._defaults.get(name, ""))
        if context is None:
            context = self._add(name, self._home)
            self._defaults[name] = context.info.id
        return context

    async def create(self, language: str | None, cwd: str | None) -> Context:
        """A new context with its kernel running. Raises `UnknownLanguage`, `Refused`, and like `Context.ready`."""
        context = self._add(languages.normal(language), self._place(cwd))
        try:
            await context.ready()
        except BaseException:
            self._all.pop(context.info.id, None)
            await context.close()
            raise
        return context

    async def remove(self, context_id: str) -> None:
        """Raises `UnknownContext`."""
        context = self.get(context_id)
        del self._all[context_id]
        await context.close()

    def _place(self, cwd: str | None) -> str:
        place = os.path.normpath(os.path.join(self._home, os.path.expanduser(cwd or "")))
        if not os.path.isdir(place):
            raise Refused(f"cwd {cwd!r} is no directory")
        return place

    def _add(self, language: str, cwd: str) -> Context:
        if len(self._all) >= AT_MOST:
            raise Refused(f"there are {AT_MOST} contexts already: remove one first")
        context = Context(language, cwd)
        self._all[context.info.id] = context
        return context


async def _whole(work: Awaitable[None]) -> None:
    """Do `work` to its end, whatever is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
        except Exception:  # noqa: BLE001 - it is read below
            break
    error = task.exception()
    if error is not None and not isinstance(error, KernelDied | KernelStuck):
        raise error
    if cancelled:
        raise asyncio.CancelledError
