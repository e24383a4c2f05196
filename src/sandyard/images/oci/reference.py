"""Names of images: `[registry[:port]/]path[:tag][@digest]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sandyard.errors import BadRequest

_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """`registry` None: a short name, to be looked for in the search registries."""

    registry: str | None
    path: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Raises `BadRequest` saying what is wrong with the name."""
        rest, at, digest = text.strip().partition("@")
        if at and not _DIGEST.fullmatch(digest):
            raise BadRequest(f"image '{text}': '{digest}' is not a sha256 digest", field="image")
        head, slash, tail = rest.partition("/")
        # As everywhere: the first part is a registry if it could not be part of a path.
        registry = head if slash and ("." in head or ":" in head or head == "localhost") else None
        path = tail if registry else rest
        path, colon, tag = path.partition(":")
        if colon and not _TAG.fullmatch(tag):
            raise BadRequest(f"image '{text}': '{tag}' is not a tag", field="image")
        if not _PATH.fullmatch(path):
            raise BadRequest(f"image '{text}': '{path}' is not a name in lower case", field="image")
        return cls(registry, path, tag or None, digest or None)

    @property
    def version(self) -> str:
        """What a registry is asked for: the digest where one is pinned, else the tag."""
        return self.digest or self.tag or "latest"

    def within(self, registry: str) -> Reference:
        """This name in a search registry, which may end in a path (`host/library`)."""
        host, _, prefix = registry.partition("/")
        return Reference(host, f"{prefix}/{self.path}" if prefix else self.path, self.tag, self.digest)

    def __str__(self) -> str:
        name = f"{self.registry}/{self.path}" if self.registry else self.path
        tag = f":{self.tag}" if self.tag else ""
        return f"{name}{tag}@{self.digest}" if self.digest else f"{name}{tag}"
