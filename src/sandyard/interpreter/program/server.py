"""HTTP: contexts as JSON, executions as one line of JSON each."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import asdict
from typing import Any

from tornado.iostream import StreamClosedError
from tornado.web import Application, RequestHandler

from .contexts import Context, Contexts, Refused, UnknownContext
from .environment import checked
from .kernel import KernelDied, KernelStuck
from .languages import UnknownLanguage
from .output import Output

log = logging.getLogger("sandyard.interpreter")

KEEPALIVE_SECONDS = 5.0
AGAIN_SECONDS = 1.0
BODY_LIMIT = 64 << 20  # bytes of a request


class BadBody(ValueError):
    """The body of the request is not what it should be."""


class Service:
    """The contexts, and whether the first of them can run code yet."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts = contexts
        self.ready = False
        self.trouble = "the default kernel is starting"

    async def warm_up(self) -> None:
        """Start the default Python kernel, however often that takes."""
        while not self.ready:
            try:
                await self.contexts.default().ready()
                self.ready = True
            except (KernelDied, KernelStuck, OSError) as error:
                self.trouble = f"the default kernel did not start: {error}"
                log.error("%s", self.trouble)
                await asyncio.sleep(AGAIN_SECONDS)


class Base(RequestHandler):
    service: Service

    def initialize(self, service: Service) -> None:
        self.service = service

    def set_default_headers(self) -> None:
        self.clear_header("Server")

    def body(self) -> dict[str, Any]:
        """Raises `BadBody`."""
        try:
            body = json.loads(self.request.body or b"{}")
        except ValueError as error:
            raise BadBody(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadBody("the body is not a JSON object")
        return body

    def answer(self, value: Any, status: int = 200) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))

    def refuse(self, status: int, message: str) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(message)

    async def fulfil(self, work: Any) -> Any:
        """Await `work`; None if it was refused, which has then been answered."""
        try:
            return await work
        except UnknownContext as error:
            self.refuse(404, str(error.args[0]))
        except (UnknownLanguage, Refused, BadBody) as error:
            self.refuse(400, str(error))
        except (KernelDied, KernelStuck, OSError) as error:
            self.refuse(500, f"the kernel could not be started: {error}")
        return None

    def write_error(self, status_code: int, **_: Any) -> None:
        self.refuse(status_code, self._reason)


class Health(Base):
    def get(self) -> None:
        if self.service.ready:
            self.answer("OK")
        else:
            self.refuse(503, self.service.trouble)


class ContextList(Base):
    def get(self) -> None:
        self.answer(self.service.contexts.list())

    async def post(self) -> None:
        context = await self.fulfil(self._create())
        if context is not None:
            self.answer(asdict(context.info))

    async def _create(self) -> Context:
        body = self.body()
        language, cwd = _text(body, "language"), _text(body, "cwd")
        return await self.service.contexts.create(language, cwd)


class OneContext(Base):
    async def delete(self, context_id: str) -> None:
        await self.fulfil(self._remove(context_id))

    async def _remove(self, context_id: str) -> None:
        await self.service.contexts.remove(context_id)
        self.answer(None)


class Restart(Base):
    async def post(self, context_id: str) -> None:
        await self.fulfil(self._restart(context_id))

    async def _restart(self, context_id: str) -> None:
        await self.service.contexts.get(context_id).restart()
        self.answer(None)


class Execute(Base):
    _work: asyncio.Future[None] | None = None

    def on_connection_close(self) -> None:
        if self._work is not None:
            self._work.cancel()

    async def post(self) -> None:
        asked = await self.fulfil(self._asked())
        if asked is None:
            return
        context, code, variables = asked
        output = Output()
        self.set_header("Content-Type", "application/x-ndjson")
        self._work = asyncio.ensure_future(context.execute(code, variables, output))
        try:
            while (line := await self._next(output)) is not None:
                self.write(line)
                await self.flush()
            await self.finish()
        except StreamClosedError:
            log.info("the client of context %s went away", context.info.id)
        finally:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _next(self, output: Output) -> bytes | None:
        while True:
            try:
                async with asyncio.timeout(KEEPALIVE_SECONDS):
                    return await output.next()
            except TimeoutError:
                output.alive()

    async def _asked(self) -> tuple[Context, str, dict[str, str]]:
        body = self.body()
        code, context_id, language = body.get("code"), _text(body, "context_id"), _text(body, "language")
        if not isinstance(code, str):
            raise BadBody("code is not a string")
        if context_id and language:
            raise BadBody("Only one of context_id or language can be provided")
        try:
            variables = checked(body.get("env_vars"))
        except ValueError as error:
            raise BadBody(str(error)) from error
        contexts = self.service.contexts
        return contexts.get(context_id) if context_id else contexts.default(language), code, variables


def _text(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadBody(f"{name} is not a string")
    return value or None


def application(service: Service) -> Application:
    extra = {"service": service}
    return Application(
        [
            ("/health", Health, extra),
            ("/execute", Execute, extra),
            ("/contexts", ContextList, extra),
            ("/contexts/([^/]+)", OneContext, extra),
            ("/contexts/([^/]+)/restart", Restart, extra),
        ],
        log_function=lambda handler: None,
    )
