"""`process.Process`: run commands and terminals, listen to them, feed them, signal them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest.base import Agent, ExitStatus, Process, ProcessSpec, PtySize
from sandyard.guest.shell import spawn_shell
from sandyard.sandboxes.log import Level, SandboxLog
from sandyard.server.envd.call import Aborted, Call, unknown_user
from sandyard.server.envd.connect import Message, RpcError, flag, frame, number, record, text
from sandyard.server.envd.sessions import DEADLINE, KEEPALIVE, Session, Subscriber
from sandyard.server.web import ClientGone, decimal

KEEPALIVE_SECONDS = 90.0
READ_AHEAD = 4  # messages of a stream of input
TAG_LIMIT = 1024
SHOWN_CONFIG = 64 * 1024  # of a process's arguments and environment, in characters
_SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL, "15": 15, "9": 9}


async def start(call: Call, message: Message) -> None:
    config = record(message, "process")
    session = await _spawn(call, config, message)
    await _stream(call, session, owner=True)


async def connect(call: Call, message: Message) -> None:
    session = await call.guest.sessions.find(call.sandbox.agent, *_selector(message))
    await _stream(call, session, owner=False)


async def list_processes(call: Call, _message: Message) -> Message:
    running = set(await call.sandbox.agent.processes())
    known = {session.pid: session for session in call.guest.sessions.running()}
    processes = []
    for pid in sorted(running):
        session = known.get(pid)
        known_config = dict(session.config) if session else {}
        config = known_config if known_config.get("cmd") else await _seen(call.sandbox.agent, pid)
        entry: Message = {"pid": pid, "config": config}
        if session is not None and session.tag:
            entry["tag"] = session.tag
        processes.append(entry)
    return {"processes": processes}


async def _seen(agent: Agent, pid: int) -> Message:
    """What the sandbox says of a process that none of its clients started here: a start command, or one of an
    earlier server. It is what runs now, which may have replaced what was asked for."""
    try:
        chunks = [chunk async for chunk in agent.read_file(f"/proc/{pid}/cmdline", length=SHOWN_CONFIG)]
    except GuestError:
        return {"cmd": ""}  # it ended meanwhile
    command, *arguments = b"".join(chunks).rstrip(b"\0").decode("utf-8", "replace").split("\0")
    return {"cmd": command, "args": arguments}


async def update(call: Call, message: Message) -> Message:
    session = await _running(call, message)
    if message.get("pty"):
        await session.process.resize(_pty(record(message, "pty")))
    return {}


async def send_input(call: Call, message: Message) -> Message:
    session = await _running(call, message)
    await _unless_gone(call, session.process.write_stdin(_input(message)))
    return {}


async def stream_input(call: Call, messages: AsyncIterator[Message]) -> Message:
    """Ends with the stream, or with the client: the stream is read ahead while the process does not read."""
    ahead: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=READ_AHEAD)
    feeding = asyncio.ensure_future(_feed(call, ahead))
    reading = asyncio.ensure_future(_read_ahead(call, messages, ahead))
    try:
        await asyncio.wait((feeding, reading), return_when=asyncio.FIRST_COMPLETED)
    finally:
        feeding.cancel()
        reading.cancel()
        results = await asyncio.gather(reading, feeding, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return {}


async def _read_ahead(call: Call, messages: AsyncIterator[Message], ahead: asyncio.Queue[Message | None]) -> None:
    """Raises what is wrong with the stream, or `ClientGone`; does not return."""
    async for message in messages:
        await ahead.put(message)
    await ahead.put(None)
    await disconnected(call)
    raise ClientGone


async def _feed(call: Call, ahead: asyncio.Queue[Message | None]) -> None:
    session: Session | None = None
    while (message := await ahead.get()) is not None:
        if "start" in message:
            session = await _running(call, record(message, "start"))
        elif "data" in message:
            if session is None:
                raise RpcError("invalid_argument", "the first message of the stream must be 'start'")
            await session.process.write_stdin(_input(record(message, "data")))


async def send_signal(call: Call, message: Message) -> Message:
    wanted = _SIGNALS.get(str(message.get("signal", "")))
    if wanted is None:
        raise RpcError("invalid_argument", f"invalid signal: {message.get('signal')!r}")
    session = await _running(call, message)
    try:
        if wanted == signal.SIGKILL:
            await session.kill()
        else:
            await session.process.signal(wanted)
    except GuestError as error:
        if error.code is GuestErrorCode.NOT_FOUND:
            raise RpcError("not_found", f"process with pid {session.pid} has ended") from error
        raise
    return {}


async def close_stdin(call: Call, message: Message) -> Message:
    session = await _running(call, message)
    await session.process.close_stdin()
    return {}


async def _unless_gone(call: Call, work: Coroutine[None, None, None]) -> None:
    """Give `work` up when the client goes: a process that never reads would hold its request for ever."""
    gone, task = asyncio.ensure_future(disconnected(call)), asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _spawn(call: Call, config: Message, message: Message) -> Session:
    command = text(config, "cmd")
    if not command:
        raise RpcError("invalid_argument", "process.cmd is missing")
    tag = text(message, "tag") or None
    if tag is not None and len(tag) > TAG_LIMIT:
        raise RpcError("invalid_argument", f"tag is longer than {TAG_LIMIT} characters")
    user = call.user_name()
    try:
        spec = ProcessSpec(
            argv=[command, *_strings(config, "args")],
            env=_environment(call, config),
            cwd=await _cwd(call, text(config, "cwd")),
            user=user,
            stdin=flag(message, "stdin", True),
            pty=_pty(record(message, "pty")) if message.get("pty") else None,
        )
        process = await spawn_shell(call.sandbox.agent, spec)
    except GuestError as error:
        raise _spawn_error(error, user, command) from error
    on_exit = _logged(call.sandbox.log, process, user)
    if _size(config) > SHOWN_CONFIG:  # it is kept as long as the process runs
        config = {"cmd": command[:SHOWN_CONFIG], "args": ["..."]}
        process.spec = replace(process.spec, argv=[command[:SHOWN_CONFIG]], env={})
    session = call.guest.sessions.add(process, config, tag)
    session.on_exit = on_exit
    return session


def _size(config: Message) -> int:
    strings = [text(config, "cmd"), text(config, "cwd"), *_strings(config, "args")]
    envs = record(config, "envs")
    return sum(map(len, strings)) + sum(len(name) + len(value) for name, value in envs.items())


def _logged(log: SandboxLog, process: Process, user: str) -> Callable[[ExitStatus], None]:
    """Log a start now; what is returned logs its end. Not the environment, which may hold secrets."""
    pid = str(process.pid)
    log.append(f"process started: {shlex.join(process.spec.argv)}", pid=pid, user=user)

    def ended(status: ExitStatus) -> None:
        how = f"signal {status.signal}" if status.signal is not None else f"exit code {status.code}"
        log.append(f"process ended: {how}", Level.WARN if status.signal or status.code else Level.INFO, pid=pid)

    return ended


def _spawn_error(error: GuestError, user: str, command: str) -> RpcError:
    if error.code is GuestErrorCode.NO_USER:
        return unknown_user(user)
    if error.code is GuestErrorCode.LIMIT:
        return RpcError("resource_exhausted", f"cannot start {command}: {error}")
    return RpcError("invalid_argument", f"cannot start {command}: {error}")


def _environment(call: Call, config: Message) -> dict[str, str]:
    sandbox = call.sandbox
    wanted = record(config, "envs")
    if not all(isinstance(value, str) for value in wanted.values()):
        raise RpcError("invalid_argument", "process.envs must map names to strings")
    return {
        **sandbox.defaults.env,
        **sandbox.envs,
        "E2B_SANDBOX": "true",
        "E2B_SANDBOX_ID": sandbox.id,
        "E2B_TEMPLATE_ID": sandbox.template_id,
        **wanted,
    }


async def _cwd(call: Call, cwd: str) -> str | None:
    if not cwd:
        return call.sandbox.defaults.workdir
    if cwd.startswith("/"):
        return cwd
    return await call.guest.path(await call.user(), cwd)


async def _stream(call: Call, session: Session, *, owner: bool) -> None:
    """Send events until the process ends, the deadline passes, or the client or the sandbox is gone.

    The owner's deadline is the process's own and outlives this request."""
    loop = asyncio.get_running_loop()
    subscriber = session.subscribe()
    seconds = _deadline(call)
    if owner:
        session.start(call.guest.sessions, seconds)
    gone = asyncio.ensure_future(disconnected(call))
    gone.add_done_callback(lambda _: subscriber.close())
    pulse = _Pulse(subscriber, keepalive_interval(call))
    timer = None if owner or seconds is None else loop.call_later(seconds, subscriber.finish, DEADLINE)
    try:
        await call.start(b"application/connect+json")
        await call.write(frame(b'{"event":{"start":{"pid":%d}}}' % session.pid))
        done = False
        while not done:
            data, done = await subscriber.next()
            if subscriber.closed:
                break
            await (call.finish(data) if done else call.write(data))
        if subscriber.aborted:
            raise Aborted
    finally:
        gone.cancel()
        pulse.stop()
        if timer is not None:
            timer.cancel()
        session.unsubscribe(subscriber)


class _Pulse:
    """Pushes a keepalive now and then, so that a silent stream is not taken for a dead one."""

    def __init__(self, subscriber: Subscriber, interval: float) -> None:
        self._subscriber = subscriber
        self._interval = interval
        self._timer = asyncio.get_running_loop().call_later(interval, self._beat)

    def stop(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        self._subscriber.push(KEEPALIVE)
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._beat)


async def disconnected(call: Call) -> None:
    while (await call.receive())["type"] != "http.disconnect":
        pass


def _deadline(call: Call) -> float | None:
    value = decimal(call.headers.get(b"connect-timeout-ms"))
    return value / 1000 if value else None


def keepalive_interval(call: Call) -> float:
    return float(decimal(call.headers.get(b"keepalive-ping-interval")) or KEEPALIVE_SECONDS)


async def _running(call: Call, message: Message) -> Session:
    return await call.guest.sessions.find_running(call.sandbox.agent, *_selector(message))


def _selector(message: Message) -> tuple[int, str]:
    selector = record(message, "process")
    pid, tag = number(selector, "pid"), text(selector, "tag")
    if not pid and not tag:
        raise RpcError("invalid_argument", "process needs a pid or a tag")
    return pid, tag


def _input(message: Message) -> bytes:
    value = record(message, "input")
    data = value.get("stdin") or value.get("pty") or ""
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise RpcError("invalid_argument", "input is not base64") from error


def _strings(message: Message, name: str) -> list[str]:
    values = message.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RpcError("invalid_argument", f"{name} must be a list of strings")
    return values


def _pty(message: Message) -> PtySize:
    size = record(message, "size")
    rows, cols = number(size, "rows", 24), number(size, "cols", 80)
    if not (0 < rows < 65536 and 0 < cols < 65536):
        raise RpcError("invalid_argument", f"pty size {rows}x{cols} is out of range")
    return PtySize(rows=rows, cols=cols)
