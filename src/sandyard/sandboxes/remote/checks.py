"""What is checked of layers that are in the storage too: that they still are what was sent, or fetched."""

from __future__ import annotations

from sandyard.config import Settings
from sandyard.errors import SandboxError
from sandyard.images.garbage.base import Checkup, Finding
from sandyard.sandboxes.remote.known import Known, Record, manifest_of, stamp_of
from sandyard.sandboxes.remote.source import LayerGone, stored_in


class SharedLayers:
    """Deeply, each layer is cut into its chunks again, whose digests must come to the digest of its manifest. One that
    was merged with others since is `unknown`."""

    kind = "layers sent and fetched"

    def __init__(self, settings: Settings) -> None:
        self._known = Known(settings.paths.state.absolute() / "blobs" / "layers")
        self._uid_base = settings.container.uid_base

    def check(self, *, deep: bool) -> Checkup:
        found = Checkup(self.kind)
        for record in self._known.all():
            found.count += 1
            if stamp_of(record.layer) != record.stamp:
                found.unknown += 1
                continue
            if deep and (problem := self._problem(record)) is not None:
                found.damaged.append(Finding(record.layer.name, problem, stored_in(record.layer)))
        return found

    def _problem(self, record: Record) -> str | None:
        try:
            made = manifest_of(record.layer, record, self._uid_base)
        except LayerGone:
            return None
        except (SandboxError, OSError) as error:
            return str(error)
        return None if made.digest() == record.manifest else "it is not what was sent, or fetched"
