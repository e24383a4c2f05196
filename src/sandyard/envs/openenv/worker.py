"""A worker process: gets accepted sockets from the parent and serves their sessions.

`python -m sandyard.envs.openenv.worker FD OPTIONS`: FD is its end of a packet socket pair. It is told
`{"seat", "refused"}` with a socket, or `{"stop": seconds}`; it tells `{"ready"}`, `{"failed"}` and
`{"taken": seat}` and `{"free": seat}`. When the parent is gone, so is the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections import deque
from typing import Any, NoReturn

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from sandyard.envs.openenv.app import App
from sandyard.envs.openenv.catalog import EnvSpec
from sandyard.envs.openenv.seat import Seat, SeatSocket
from sandyard.errors import SandyardError

PACKET = 4096
_PR_SET_PDEATHSIG = 1
_LAST_WORDS = 2.0  # seconds for closing handshakes after the last session


class Worker:
    def __init__(self, control: socket.socket, options: dict[str, Any]) -> None:
        self._control = control
        self._app = App(
            EnvSpec.from_json(options["spec"]),
            idle_timeout=options["idle_timeout"],
            step_timeout=options["step_timeout"],
            max_sessions=options["max_sessions"],
            tell=lambda seat, taken: self._tell({"taken" if taken else "free": seat}),
        )
        self._config = Config(
            self._app,
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="websockets-sansio",
            ws_per_message_deflate=False,
            ws_max_size=options["max_message"],
            ws_ping_interval=options["ping_interval"],
            ws_ping_timeout=options["ping_interval"],
        )
        self._config.load()
        self._state = ServerState()
        self._outbox: deque[bytes] = deque()
        self._stopping = asyncio.Event()
        self._drain = 0.0
        self._opening: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        loop.add_reader(self._control, self._on_control)
        self._tell({"ready": True})
        await self._stopping.wait()
        loop.remove_reader(self._control)
        self._app.stop()
        await self._wait_until_idle(self._drain)
        await self._app.held.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = list(self._state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS)

    async def _wait_until_idle(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._app.wait_idle()

    def _on_control(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                packet, fds, _, _ = socket.recv_fds(self._control, PACKET, 1)
                if not packet:
                    self._stopping.set()
                    return
                self._obey(json.loads(packet), fds)

    def _obey(self, order: dict[str, Any], fds: list[int]) -> None:
        if "stop" in order:
            self._drain = float(order["stop"])
            self._stopping.set()
            return
        number, refused = order["seat"], order["refused"]
        seat = Seat(lambda: self._tell({"free": number}), tuple(refused) if refused else None)
        task = asyncio.get_running_loop().create_task(self._open(fds[0], seat))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, fd: int, seat: Seat) -> None:
        taken = SeatSocket.take(fd, seat)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: HttpToolsProtocol(self._config, self._state, {"seat": seat}), taken
            )
        except OSError:
            taken.close()  # the client is gone again

    def _tell(self, word: dict[str, Any]) -> None:
        self._outbox.append(json.dumps(word).encode())
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._outbox:
                self._control.send(self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            loop.add_writer(self._control, self._flush)
            return
        except OSError:
            self._outbox.clear()  # the parent is gone; the reader learns of it
        loop.remove_writer(self._control)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent says when to stop
    control = socket.socket(fileno=int(sys.argv[1]))
    options = json.loads(sys.argv[2])
    spec = EnvSpec.from_json(options["spec"])
    try:
        spec.make()
    except SandyardError as error:
        _fail(control, str(error))
    except Exception as error:  # noqa: BLE001  whatever a foreign env's constructor raises: the parent tells it
        _fail(control, f"env {spec.name} cannot be made: {type(error).__name__}: {error}")
    asyncio.run(_serve(control, options))
    os._exit(0)  # threads of a foreign env must not keep a stopped worker


def _fail(control: socket.socket, why: str) -> NoReturn:
    control.send(json.dumps({"failed": why[:2000]}).encode())
    sys.exit(1)


async def _serve(control: socket.socket, options: dict[str, Any]) -> None:
    await Worker(control, options).run()


if __name__ == "__main__":
    main()
