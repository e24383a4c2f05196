"""Where whole objects are kept under names: a directory, S3-compatible storage, or memory for tests."""

from __future__ import annotations

from sandyard.store.blobs.base import (
    BlobDamaged,
    BlobError,
    BlobFull,
    BlobInfo,
    BlobMissing,
    BlobRefused,
    BlobStore,
    BlobUnreachable,
    Content,
)
from sandyard.store.blobs.opening import open_blobs

__all__ = [
    "BlobDamaged",
    "BlobError",
    "BlobFull",
    "BlobInfo",
    "BlobMissing",
    "BlobRefused",
    "BlobStore",
    "BlobUnreachable",
    "Content",
    "open_blobs",
]
