"""Finding a template by what a caller typed."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sandyard.errors import NotFound
from sandyard.runtimes.base import Rootfs


@dataclass(frozen=True, slots=True)
class TemplateView:
    """What the server needs of a template. `created_at` in seconds since the epoch."""

    name: str
    template_id: str
    rootfs: Rootfs
    created_at: float
    size_bytes: int


class TemplateSource(Protocol):
    """Where templates come from; the image store is one."""

    def views(self) -> Sequence[TemplateView]: ...


class FixedTemplates:
    """Templates given as a list: for tests and for the memory runtime."""

    def __init__(self, templates: Sequence[TemplateView]) -> None:
        self._templates = tuple(templates)

    def views(self) -> Sequence[TemplateView]:
        return self._templates


class Templates:
    """Looks templates up by name, `name:default` or id, reading the source at most once a second."""

    def __init__(self, source: TemplateSource) -> None:
        self._source = source
        self._known: Sequence[TemplateView] = ()
        self._read_at = -1e9

    def all(self) -> Sequence[TemplateView]:
        if time.monotonic() - self._read_at > 1.0:
            self._read()
        return self._known

    def get(self, name: str) -> TemplateView:
        """Raises `NotFound` naming what was asked for and near names."""
        found = self._find(name)
        if found is None:
            self._read()  # it may have been made within the last second
            found = self._find(name)
        if found is None:
            raise NotFound(f"template '{name}' not found", remedy=self._hint(name))
        return found

    def _read(self) -> None:
        self._known = self._source.views()
        self._read_at = time.monotonic()

    def _find(self, name: str) -> TemplateView | None:
        wanted = name.removesuffix(":default")
        return next((t for t in self.all() if wanted in (t.name, t.template_id)), None)

    def _hint(self, name: str) -> str:
        names = sorted(t.name for t in self._known)
        if not names:
            return "there is none yet: run 'sandyard setup'"
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        return f"did you mean {', '.join(near)}?" if near else f"there are: {', '.join(names[:8])}"
