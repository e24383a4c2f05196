"""What a sandbox can be started from, as the lifecycle sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sandyard.runtimes.base import Resources, Rootfs


@dataclass(frozen=True, slots=True)
class TemplateView:
    """One usable build of a template. `created_at` in seconds since the epoch.

    `name` is what people call it, its id where it has no name. `build_id` is a UUID. `resources` None:
    the node's default. The start command runs in every sandbox made from it; a sandbox is ready when
    the ready command succeeds. `memory`: the topmost layer was committed with its memory, in which it runs already."""

    name: str
    template_id: str
    rootfs: Rootfs
    created_at: float
    size_bytes: int
    build_id: str = ""
    start_cmd: str | None = None
    ready_cmd: str | None = None
    resources: Resources | None = None
    aliases: Sequence[str] = ()
    memory: bool = False


class TemplateSource(Protocol):
    """Templates that belong to the node and to nobody; the image store is one."""

    def views(self) -> Sequence[TemplateView]: ...


class FixedTemplates:
    """Templates given as a list: for tests and for the memory runtime."""

    def __init__(self, templates: Sequence[TemplateView]) -> None:
        self._templates = tuple(templates)

    def views(self) -> Sequence[TemplateView]:
        return self._templates
