"""Blob storage as the settings name it."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from sandyard.config import BlobSettings
from sandyard.errors import ConfigError, HostError
from sandyard.store.blobs.base import BlobStore
from sandyard.store.blobs.local import LocalBlobs

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")


def open_blobs(settings: BlobSettings) -> BlobStore | None:
    """None where no storage is set. Nothing is asked of it yet.

    Raises `ConfigError` where credentials are missing, `HostError` without the package for S3."""
    if settings.url is None:
        return None
    url = urlsplit(settings.url)
    if url.scheme == "file":
        return LocalBlobs(Path(url.path))
    if settings.credentials == "environment" and not any(os.environ.get(key) for key in _KEYS):
        raise ConfigError(
            f"blobs.url {settings.url}: there are no credentials in the environment",
            remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or blobs.credentials",
        )
    try:
        from sandyard.store.blobs.s3 import Bucket, S3Blobs
    except ModuleNotFoundError as error:
        raise HostError(f"blobs.url {settings.url}: {error}", remedy="pip install 'sandyard[s3]'") from error
    prefix = url.path.strip("/")
    return S3Blobs(
        Bucket(url.netloc, prefix, settings.endpoint, settings.region, settings.credentials, settings.timeout)
    )
