"""The entries of a tar archive that a stranger packed, one at a time, in memory that is bounded."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from itertools import count

from sandyard.errors import BadRequest

_HEADER_LIMIT = 1 << 20
_HEADERS = 16
_GLOBAL = 256  # values that all entries share
_BEFORE = "sandyard_headers"  # of an open archive: sizes of what came before the entry that is read
_PER_ENTRY = 64 << 10  # what headers may take on average
_LONG = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


class StrangeEntry(tarfile.TarInfo):
    """One whose headers fit in memory, whatever a stranger wrote: `_proc_member` is there to be overridden. To be
    given to `tarfile.open` as `tarinfo`."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _LONG:  # what comes before an entry is read within one another
            before = vars(tar).setdefault(_BEFORE, [])
            before.append(self.size)
            if sum(before) > _HEADER_LIMIT or len(before) > _HEADERS:
                raise tarfile.ReadError(f"{len(before)} header(s) of {sum(before)} bytes before one entry")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("a sparse file: pack it without --sparse")
        made: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc] # typeshed leaves it out
        return made

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError("a sparse file: pack it without --sparse")


def entries(tar: tarfile.TarFile, most: int) -> Iterator[tarfile.TarInfo]:
    """Each entry, none of which the archive still holds afterwards. `tar` is open as a stream.

    Raises `BadRequest` for more than `most` entries, or headers without end, and what `tarfile` raises."""
    sizes = 0
    for number in count():
        member = tar.next()
        if member is None:
            return
        tar.members.clear()  # type: ignore[attr-defined] # it would hold every one of them
        vars(tar).pop(_BEFORE, None)
        sizes += member.size
        if len(tar.pax_headers) > _GLOBAL:
            raise BadRequest(f"the archive has more than {_GLOBAL} values for all its entries")
        if number >= most or tar.offset > _PER_ENTRY * (number + 1) + sizes:
            raise BadRequest(f"the archive has more than {most} entries, or empty ones without end")
        yield member
