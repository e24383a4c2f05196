"""What the instructions of a Dockerfile come to, with every variable replaced: work for a sandbox, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandyard.images.dockerfile.config import ImageSettings

Origin = int | str | None
"""Where files come from: a stage by its index, an image by its name, None for the build context."""


@dataclass(frozen=True, slots=True)
class Put:
    """COPY and ADD. `target` is absolute, with a slash at its end where it must be a directory. `owner` as
    `--chown` has it; `inline` are heredocs, by name. `unpack`: archives of the context are taken apart."""

    sources: tuple[str, ...]
    target: str
    origin: Origin = None
    inline: tuple[tuple[str, str], ...] = ()
    owner: str | None = None
    mode: int | None = None
    exclude: tuple[str, ...] = ()
    unpack: bool = False


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory, or file, that is there for one RUN. `kind`: bind, cache or tmpfs."""

    kind: str
    target: str
    origin: Origin = None
    source: str = ""
    owner: tuple[int, int] = (0, 0)
    mode: int = 0o755

    def put(self) -> Put:
        """The copy that a bind is."""
        return Put((self.source,), self.target, self.origin)


@dataclass(frozen=True, slots=True)
class Run:
    """`user` as USER has it; `script` is a heredoc that names its own interpreter."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    user: str
    mounts: Sequence[Mount] = ()
    script: str | None = None


@dataclass(frozen=True, slots=True)
class MakeFolder:
    path: str
    user: str


@dataclass(frozen=True, slots=True)
class MakeUser:
    name: str


Action = Run | Put | MakeFolder | MakeUser


@dataclass(frozen=True, slots=True)
class Work:
    """One instruction. `number` counts those of the whole build from 1; `key` is of all up to and with this one."""

    number: int
    line: int
    title: str
    action: Action | None
    key: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A stage, worked out. `base`: the stage below, or the image."""

    index: int
    label: str
    base: int | str
    works: Sequence[Work]
    settings: ImageSettings
    key: str
