"""The contract of the agent inside a sandbox, as the host sees it.

`link.py` speaks it to the real agent over a byte stream; `memory.py` is the in-memory twin for
tests. Everything that comes back is from a hostile machine: sizes are bounded here, text is bytes
until somebody decodes it, and no answer is awaited without a deadline.

Every method may raise `GuestError` (the operation failed inside the sandbox, with a code) and
`AgentLinkError` (the link is gone); only further errors are named below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class Channel(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"
    PTY = "pty"


@dataclass(frozen=True, slots=True)
class PtySize:
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run.

    `argv[0]` is looked up in the PATH of the resulting environment. `user` is a name, a uid or
    `uid:gid`, None for root. `cwd` None means the user's home, or `/` where that is missing; a
    `cwd` that is given and missing is `GuestError(NO_CWD)`. HOME, USER, LOGNAME, SHELL and PATH are
    filled in by the agent unless `env` has them. With `stdin` false the process reads end of file
    at once. With `pty` set, stdin and output are one terminal of that size.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    stdin: bool = False
    pty: PtySize | None = None


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: exactly one of `code` and `signal` is set."""

    code: int | None = None
    signal: int | None = None


class Process(ABC):
    """A process in a sandbox, in its own session and process group."""

    pid: int
    spec: ProcessSpec

    @abstractmethod
    def output(self) -> AsyncIterator[tuple[Channel, bytes]]:
        """Yield output until every channel is at end of file. One consumer.

        Back-pressure reaches the process: at most 256 KiB are held on the way. Chunks are at most
        64 KiB and may split a character. After the process itself exits, output is drained for at
        most 200 ms more where a background child still holds the pipe (it must not hang a command).
        """

    @abstractmethod
    async def wait(self) -> ExitStatus:
        """Return how the process ended. Does not need `output` to be consumed to its end."""

    @abstractmethod
    async def write_stdin(self, data: bytes) -> None:
        """Write to stdin or the PTY, waiting for room. `GuestError(INVALID)` if stdin is closed."""

    @abstractmethod
    async def close_stdin(self) -> None: ...

    @abstractmethod
    async def resize(self, size: PtySize) -> None: ...

    @abstractmethod
    async def signal(self, number: int, *, group: bool = True) -> None:
        """Send a signal to the process group (or just the process).

        SIGKILL to the group also reaches descendants that made their own session or group: the
        agent walks the tree (children, sub-reaper) so that nothing of the command survives.
        """


class FileType(StrEnum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry. `path` is absolute; for a symlink, `type`, `size` and `mode` are the link's own,
    `symlink_target` is its text and `target_type`/`target_mode` those of what it resolves to (None
    if dangling). `owner` and `group` are names where the sandbox knows them, else numbers.
    `metadata` is what was attached to the file (for a symlink, to what it resolves to)."""

    name: str
    path: str
    type: FileType
    size: int
    mode: int  # permission bits, 0..0o7777
    uid: int
    gid: int
    owner: str
    group: str
    mtime_ns: int
    symlink_target: str | None = None
    target_type: FileType | None = None
    target_mode: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UserInfo:
    name: str
    uid: int
    gid: int
    home: str
    shell: str


class PortStream(ABC):
    """One TCP connection to a port inside the sandbox."""

    @abstractmethod
    async def read(self, limit: int = 65536) -> bytes:
        """At most `limit` bytes; empty at end of stream."""

    @abstractmethod
    async def write(self, data: bytes) -> None: ...

    @abstractmethod
    async def write_eof(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...


class WatchEventType(StrEnum):
    CREATE = "create"
    WRITE = "write"
    REMOVE = "remove"
    RENAME = "rename"
    CHMOD = "chmod"
    OVERFLOW = "overflow"  # events were lost; `name` is empty


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Something happened to `name`, a path relative to the watched directory ("" is the directory itself)."""

    type: WatchEventType
    name: str


class Watch(ABC):
    """A watched directory. Iterate for events; iteration ends when the directory is gone.

    The events an operation of this link caused have arrived when its answer has, so `pending` after
    an awaited write shows it. In a recursive watch a new directory joins, and what was made in it
    before that may be told twice."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> WatchEvent: ...

    @abstractmethod
    def pending(self) -> Sequence[WatchEvent]:
        """Take the events that have arrived, without waiting."""

    @abstractmethod
    async def close(self) -> None:
        """Stop watching. Idempotent."""


class Agent(ABC):
    """PID 1 of a sandbox. One `Agent` object is one link; any number of calls may be in flight."""

    @abstractmethod
    async def hello(self) -> Mapping[str, str]:
        """Ask whether the agent answers: version, boot id. The liveness probe."""

    @abstractmethod
    async def spawn(self, spec: ProcessSpec) -> Process:
        """Start a process. Errors: NO_USER, NO_CWD, NOT_FOUND (command), TOO_BIG (argument), LIMIT."""

    @abstractmethod
    async def processes(self) -> Sequence[int]:
        """Pids of processes started through any link that still run."""

    @abstractmethod
    async def attach(self, pid: int) -> Process:
        """Take over a process started on an earlier link (no replay of past output)."""

    @abstractmethod
    async def user(self, name: str) -> UserInfo:
        """Look a user up (name, uid or uid:gid) in the sandbox. Errors: NO_USER."""

    @abstractmethod
    async def stat(self, path: str) -> FileInfo: ...

    @abstractmethod
    async def list_dir(self, path: str, depth: int = 1) -> Sequence[FileInfo]:
        """Entries below `path` in lexical order, `depth` levels, symlinked directories not entered.

        At most 100,000 entries, else TOO_BIG."""

    @abstractmethod
    async def make_dir(self, path: str, user: str | None = None, mode: int = 0o755) -> None:
        """mkdir -p; made directories belong to `user`. An existing directory is EXISTS, a file
        in the way NOT_DIRECTORY (or EXISTS if it is the last part and not a directory)."""

    @abstractmethod
    async def move(self, source: str, destination: str, user: str | None = None) -> None:
        """rename(2), making the destination's parents, copying across file systems."""

    @abstractmethod
    async def remove(self, path: str) -> None:
        """rm -rf: never follows a symlink; a missing path is not an error."""

    @abstractmethod
    def read_file(self, path: str, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Stream a file to end of file (procfs files work), chunks of at most 64 KiB.

        Errors: NOT_FOUND, IS_DIRECTORY, PERMISSION."""

    @abstractmethod
    async def write_file(
        self,
        path: str,
        data: AsyncIterator[bytes] | bytes,
        user: str | None = None,
        mode: int = 0o644,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        """Create or truncate, making parents; new files and directories belong to `user`. Returns
        the bytes written. A small file is one write(2). Errors: IS_DIRECTORY, NO_SPACE.

        `metadata` is attached to the file in place of what it had (extended attributes
        `user.e2b.NAME`); it survives a move. Names have 1 to 246 bytes, all of it at most 4096 with
        9 more for each name, else TOO_BIG; INVALID where the file system cannot keep it."""

    @abstractmethod
    async def connect_port(self, port: int) -> PortStream:
        """Connect to 127.0.0.1 (else ::1) inside. Errors: REFUSED."""

    @abstractmethod
    async def watch(self, path: str, *, recursive: bool = False) -> Watch:
        """Watch a directory; events from this moment on. Errors: NOT_FOUND, NOT_DIRECTORY, LIMIT."""

    @abstractmethod
    async def identify(self, *, hostname: str | None = None, time_ns: int | None = None, seed: bytes = b"") -> None:
        """Tell the agent who it is now: used after a restore, before any user code runs."""

    @abstractmethod
    async def close(self) -> None:
        """Close the link; processes go on. Idempotent."""
