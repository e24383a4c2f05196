"""The in-memory twin of the agent, for tests: a dictionary of files, commands that are Python callables.

Covered: users root and user, files, directories, watches, processes with stdin, output, signals and
exit status, ports. Not covered: symlinks, permissions, terminals (output comes as PTY, unedited).
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import (
    Agent,
    Channel,
    ExitStatus,
    FileInfo,
    FileType,
    PortStream,
    Process,
    ProcessSpec,
    PtySize,
    UserInfo,
    Watch,
    WatchEvent,
    WatchEventType,
)

Handler = Callable[[ProcessSpec, bytes], Awaitable[tuple[bytes, bytes, int]]]
_USERS = (UserInfo("root", 0, 0, "/root", "/bin/bash"), UserInfo("user", 1000, 1000, "/home/user", "/bin/bash"))
_SHELLS = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})


@dataclass(slots=True)
class _Node:
    type: FileType
    mode: int
    uid: int
    data: bytes = b""
    mtime_ns: int = field(default_factory=time.time_ns)
    metadata: Mapping[str, str] = field(default_factory=dict)


async def _echo(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
    return os.fsencode(" ".join(spec.argv[1:]) + "\n"), b"", 0


async def _cat(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
    return stdin, b"", 0


async def _sleep(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
    await asyncio.sleep(float(spec.argv[1]))
    return b"", b"", 0


async def _true(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
    return b"", b"", 0


async def _false(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
    return b"", b"", 1


class MemoryProcess(Process):
    def __init__(self, pid: int, spec: ProcessSpec, inner: ProcessSpec, handler: Handler) -> None:
        self.pid = pid
        self.spec = spec
        self._inner = inner  # what a shell would run
        self._stdin = bytearray()
        self._stdin_closed = asyncio.Event()
        if not spec.stdin:
            self._stdin_closed.set()
        self._signal: int | None = None
        self._task = asyncio.create_task(self._run(handler))

    async def _run(self, handler: Handler) -> tuple[bytes, bytes, int]:
        await self._stdin_closed.wait()
        return await handler(self._inner, bytes(self._stdin))

    @property
    def running(self) -> bool:
        return not self._task.done()

    async def output(self) -> AsyncIterator[tuple[Channel, bytes]]:
        await asyncio.wait([self._task])
        if self._signal is not None:
            return
        out, err, _ = self._task.result()
        for channel, data in ((Channel.PTY if self.spec.pty else Channel.STDOUT, out), (Channel.STDERR, err)):
            for at in range(0, len(data), 65536):
                yield channel, data[at : at + 65536]

    async def wait(self) -> ExitStatus:
        await asyncio.wait([self._task])
        if self._signal is not None:
            return ExitStatus(signal=self._signal)
        return ExitStatus(code=self._task.result()[2])

    async def write_stdin(self, data: bytes) -> None:
        if self._stdin_closed.is_set() or not self.running:
            raise GuestError(GuestErrorCode.INVALID, f"stdin of process {self.pid} is closed")
        self._stdin += data

    async def close_stdin(self) -> None:
        self._stdin_closed.set()

    async def resize(self, size: PtySize) -> None:
        if not self.spec.pty:
            raise GuestError(GuestErrorCode.INVALID, f"process {self.pid} has no terminal")

    async def signal(self, number: int, *, group: bool = True) -> None:
        if not self.running:
            raise GuestError(GuestErrorCode.NOT_FOUND, f"process {self.pid} has ended")
        if number:
            self._signal = number
            self._task.cancel()


class _MemoryPort(PortStream):
    def __init__(self, reply: Callable[[bytes], bytes]) -> None:
        self._reply = reply
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._rest = b""

    async def read(self, limit: int = 65536) -> bytes:
        data = self._rest or await self._queue.get()
        self._rest = data[limit:]
        return data[:limit]

    async def write(self, data: bytes) -> None:
        if answer := self._reply(data):
            self._queue.put_nowait(answer)

    async def write_eof(self) -> None:
        self._queue.put_nowait(b"")

    async def close(self) -> None:
        self._queue.put_nowait(b"")


class _MemoryWatch(Watch):
    def __init__(self, root: str, recursive: bool, watches: list[_MemoryWatch]) -> None:
        self._root = root.rstrip("/") + "/"
        self._recursive = recursive
        self._watches = watches
        self._queue: asyncio.Queue[WatchEvent | None] = asyncio.Queue()
        watches.append(self)

    def tell(self, kind: WatchEventType, path: str) -> None:
        name = path.removeprefix(self._root)
        if name != path and name and (self._recursive or "/" not in name):
            self._queue.put_nowait(WatchEvent(kind, name))

    async def __anext__(self) -> WatchEvent:
        event = await self._queue.get()
        if event is None:
            raise StopAsyncIteration
        return event

    def pending(self) -> Sequence[WatchEvent]:
        events = []
        while not self._queue.empty():
            if event := self._queue.get_nowait():
                events.append(event)
        return events

    async def close(self) -> None:
        if self in self._watches:
            self._watches.remove(self)
            self._queue.put_nowait(None)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    sizes = [(len(os.fsencode(name)), len(os.fsencode(value))) for name, value in metadata.items()]
    if any(name == 0 for name, _ in sizes):
        raise GuestError(GuestErrorCode.INVALID, "metadata: a name is empty")
    if any(name > 246 for name, _ in sizes) or sum(9 + name + value for name, value in sizes) > 4096:
        raise GuestError(GuestErrorCode.TOO_BIG, "metadata: a name or all of it is too long")


class MemoryAgent(Agent):
    """`commands[name]` runs for argv[0] (its last part) and for `sh -c "name …"`; `ports[n]` answers
    each write to port n. `close()`, or a test that wants a broken link, sets `closed`."""

    def __init__(self, commands: Mapping[str, Handler] | None = None) -> None:
        built_in: dict[str, Handler] = {"echo": _echo, "cat": _cat, "sleep": _sleep, "true": _true, "false": _false}
        self.commands: dict[str, Handler] = built_in | dict(commands or {})
        self.ports: dict[int, Callable[[bytes], bytes]] = {}
        self.closed = False
        self._processes: dict[int, MemoryProcess] = {}
        self._watches: list[_MemoryWatch] = []
        self._nodes: dict[str, _Node] = {"/": _Node(FileType.DIRECTORY, 0o755, 0)}
        for path, uid in (("/root", 0), ("/home", 0), ("/home/user", 1000), ("/tmp", 0)):
            self._nodes[path] = _Node(FileType.DIRECTORY, 0o755, uid)

    def _check(self) -> None:
        if self.closed:
            raise AgentLinkError("the link to the agent was closed")

    async def hello(self) -> Mapping[str, str]:
        self._check()
        return {"version": "memory", "boot_id": f"{id(self):032x}"}

    async def spawn(self, spec: ProcessSpec) -> Process:
        user = await self.user(spec.user or "root")
        if spec.cwd and self._node(spec.cwd, GuestErrorCode.NO_CWD).type != FileType.DIRECTORY:
            raise GuestError(GuestErrorCode.NO_CWD, f"{spec.cwd} is not a directory")
        argv = list(spec.argv)
        if argv[0] in _SHELLS and "-c" in argv:
            argv = shlex.split(argv[argv.index("-c") + 1]) or ["true"]
        handler = self.commands.get(PurePosixPath(argv[0]).name)
        if handler is None:
            raise GuestError(GuestErrorCode.NOT_FOUND, f"spawn of {argv[0]!r}: no such command")
        env = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name} | dict(spec.env)
        inner = ProcessSpec(argv, env, spec.cwd or user.home, spec.user, spec.stdin, spec.pty)
        process = MemoryProcess(100 + len(self._processes), spec, inner, handler)
        self._processes[process.pid] = process
        return process

    async def processes(self) -> Sequence[int]:
        self._check()
        return [pid for pid, process in self._processes.items() if process.running]

    async def attach(self, pid: int) -> Process:
        if pid not in await self.processes():
            raise GuestError(GuestErrorCode.NOT_FOUND, f"there is no process {pid}")
        return self._processes[pid]

    async def user(self, name: str) -> UserInfo:
        self._check()
        for user in _USERS:
            if name.partition(":")[0] in (user.name, str(user.uid)):
                return user
        raise GuestError(GuestErrorCode.NO_USER, f"there is no user {name!r}")

    def _node(self, path: str, missing: GuestErrorCode = GuestErrorCode.NOT_FOUND) -> _Node:
        self._check()
        node = self._nodes.get(path.rstrip("/") or "/")
        if node is None:
            raise GuestError(missing, f"{path}: no such file or directory")
        return node

    async def stat(self, path: str) -> FileInfo:
        node, path = self._node(path), path.rstrip("/") or "/"
        owner = next((user.name for user in _USERS if user.uid == node.uid), str(node.uid))
        name = PurePosixPath(path).name or "/"
        return FileInfo(
            name=name,
            path=path,
            type=node.type,
            size=len(node.data),
            mode=node.mode,
            uid=node.uid,
            gid=node.uid,
            owner=owner,
            group=owner,
            mtime_ns=node.mtime_ns,
            metadata=node.metadata,
        )

    async def list_dir(self, path: str, depth: int = 1) -> Sequence[FileInfo]:
        if self._node(path).type != FileType.DIRECTORY:
            raise GuestError(GuestErrorCode.NOT_DIRECTORY, f"{path} is not a directory")
        root = PurePosixPath(path)
        below = [PurePosixPath(other) for other in self._nodes if other != "/"]
        found = [other for other in below if root in other.parents and len(other.parts) - len(root.parts) <= depth]
        return [await self.stat(str(other)) for other in sorted(found, key=lambda other: other.parts)]

    async def make_dir(self, path: str, user: str | None = None, mode: int = 0o755) -> None:
        uid = (await self.user(user or "root")).uid
        if path.rstrip("/") in self._nodes or path == "/":
            raise GuestError(GuestErrorCode.EXISTS, f"{path} exists")
        self._parents(path, uid)
        self._put(path.rstrip("/"), _Node(FileType.DIRECTORY, mode, uid))

    def _parents(self, path: str, uid: int) -> None:
        if not path.startswith("/"):
            raise GuestError(GuestErrorCode.INVALID, f"{path} is not absolute")
        for parent in reversed(PurePosixPath(path).parents):
            node = self._nodes.get(str(parent))
            if node is None:
                self._put(str(parent), _Node(FileType.DIRECTORY, 0o755, uid))
            elif node.type != FileType.DIRECTORY:
                raise GuestError(GuestErrorCode.NOT_DIRECTORY, f"{parent} is not a directory")

    def _put(self, path: str, node: _Node) -> None:
        self._nodes[path] = node
        self._tell(WatchEventType.CREATE, path)

    def _tell(self, kind: WatchEventType, path: str) -> None:
        for watch in self._watches:
            watch.tell(kind, path)

    async def move(self, source: str, destination: str, user: str | None = None) -> None:
        self._node(source)
        self._parents(destination, (await self.user(user or "root")).uid)
        for path in [other for other in self._nodes if other == source or other.startswith(source + "/")]:
            self._nodes[destination + path.removeprefix(source)] = self._nodes.pop(path)
        self._tell(WatchEventType.RENAME, source)
        self._tell(WatchEventType.CREATE, destination)

    async def remove(self, path: str) -> None:
        self._check()
        for other in [other for other in self._nodes if other == path or other.startswith(path.rstrip("/") + "/")]:
            del self._nodes[other]
            self._tell(WatchEventType.REMOVE, other)

    async def read_file(self, path: str, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        node = self._node(path)
        if node.type == FileType.DIRECTORY:
            raise GuestError(GuestErrorCode.IS_DIRECTORY, f"{path} is a directory")
        data = node.data[offset : None if length is None else offset + length]
        for at in range(0, len(data), 65536):
            yield data[at : at + 65536]

    async def write_file(
        self,
        path: str,
        data: AsyncIterator[bytes] | bytes,
        user: str | None = None,
        mode: int = 0o644,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        _check_metadata(metadata or {})
        uid = (await self.user(user or "root")).uid
        node = self._nodes.get(path)
        if node and node.type == FileType.DIRECTORY:
            raise GuestError(GuestErrorCode.IS_DIRECTORY, f"{path} is a directory")
        self._parents(path, uid)
        content = data if isinstance(data, bytes) else b"".join([chunk async for chunk in data])
        if node is None:
            node = _Node(FileType.FILE, mode, uid)
            self._put(path, node)
            self._tell(WatchEventType.CHMOD, path)
        node.data, node.mtime_ns, node.metadata = content, time.time_ns(), dict(metadata or {})
        self._tell(WatchEventType.WRITE, path)
        return len(content)

    async def connect_port(self, port: int) -> PortStream:
        self._check()
        if port not in self.ports:
            raise GuestError(GuestErrorCode.REFUSED, f"nothing listens on port {port}")
        return _MemoryPort(self.ports[port])

    async def watch(self, path: str, *, recursive: bool = False) -> Watch:
        if self._node(path).type != FileType.DIRECTORY:
            raise GuestError(GuestErrorCode.NOT_DIRECTORY, f"{path} is not a directory")
        return _MemoryWatch(path, recursive, self._watches)

    async def identify(self, *, hostname: str | None = None, time_ns: int | None = None, seed: bytes = b"") -> None:
        self._check()

    async def close(self) -> None:
        self.closed = True
