"""Info records, one by one or as a listing streams them in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import FileInfo, FileType
from sandyard.guest.wire import Reader, ShortRead

ENTRIES_MAX = 100_000
LIST_BYTES = 32 << 20
RECORD_MAX = 64 << 10
_META_MAX = 1024  # names and values; far more than fit what an agent may tell of one file
_TYPES = tuple(FileType)
_RESOLVES, _HAS_META = 2, 4


def read_info(reader: Reader) -> FileInfo:
    """Raises `AgentLinkError` for anything that is no info record."""
    name, path, kind, size, mode = reader.text(), reader.text(), reader.u8(), reader.u64(), reader.u32()
    uid, gid, owner, group, mtime = reader.u32(), reader.u32(), reader.text(), reader.text(), reader.u64()
    more = reader.u8()
    link = more & ~_HAS_META
    if link > _RESOLVES:
        raise AgentLinkError(f"the agent sent an info record that goes on with {more}")
    target = reader.text() if link else None
    target_kind, target_mode = (reader.u8(), reader.u32()) if link == _RESOLVES else (None, None)
    return FileInfo(
        name=name,
        path=path,
        type=_file_type(kind),
        size=size,
        mode=mode & 0o7777,
        uid=uid,
        gid=gid,
        owner=owner,
        group=group,
        mtime_ns=mtime - 2**64 if mtime >= 2**63 else mtime,
        symlink_target=target,
        target_type=None if target_kind is None else _file_type(target_kind),
        target_mode=None if target_mode is None else target_mode & 0o7777,
        metadata=_metadata(reader) if more & _HAS_META else {},
    )


async def read_listing(chunks: AsyncIterator[bytes], what: str) -> Sequence[FileInfo]:
    """The records of a listing. Holds no more of the stream than one record.

    Raises `GuestError(TOO_BIG)` beyond `ENTRIES_MAX` entries or `LIST_BYTES` bytes."""
    entries: list[FileInfo] = []
    rest, total = b"", 0
    async for chunk in chunks:
        total += len(chunk)
        rest = _take(rest + chunk, entries)
        if len(rest) > RECORD_MAX:
            raise AgentLinkError(f"{what}: the agent sent a record of more than {RECORD_MAX} bytes")
        if len(entries) > ENTRIES_MAX or total > LIST_BYTES:
            limit = f"{ENTRIES_MAX} entries or {LIST_BYTES >> 20} MiB of them"
            raise GuestError(GuestErrorCode.TOO_BIG, f"{what}: more than {limit}")
    if rest:
        raise AgentLinkError(f"{what}: the agent ended within a record")
    return entries


def _take(data: bytes, entries: list[FileInfo]) -> bytes:
    """Append the complete records of `data` to `entries`; returns what is left."""
    reader, done = Reader(data), 0
    try:
        while reader:
            entries.append(read_info(reader))
            done = reader.at
    except ShortRead:
        return data[done:]
    return b""


def _metadata(reader: Reader) -> Mapping[str, str]:
    count = reader.u32()
    if count % 2 or count > _META_MAX:
        raise AgentLinkError(f"the agent sent metadata of {count} texts")
    return {reader.text(): reader.text() for _ in range(count // 2)}


def _file_type(number: int) -> FileType:
    if number >= len(_TYPES):
        raise AgentLinkError(f"the agent sent file type {number}")
    return _TYPES[number]
