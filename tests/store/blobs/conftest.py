"""One S3 server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store.blobs.peers import s3_server, with_credentials

__all__ = ["with_credentials"]


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found
