"""Whole snapshots through a storage that drops, stalls, refuses and is full: S3 over a bad link."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from sandyard.sandboxes.remote.sweeping import sweep, verify
from sandyard.store.blobs import BlobError, BlobFull, BlobRefused, BlobUnreachable
from tests.sandboxes.remote.conftest import read, remote_of, start
from tests.store.blobs.peers import BadLink, bad_link, bucket, s3_server

if TYPE_CHECKING:
    from tests.sandboxes.remote.conftest import OpenNode

pytestmark = pytest.mark.usefixtures("with_credentials")
NOISE = os.urandom(400_000)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
async def link(endpoint: str) -> AsyncIterator[BadLink]:
    async with bad_link(endpoint) as state:
        yield state


async def test_through_a_link_that_drops_and_refuses(open_node: OpenNode, link: BadLink, endpoint: str) -> None:
    prefix = str(uuid.uuid4())
    async with open_node("a", bucket(link.endpoint, prefix)) as a, open_node("b", bucket(link.endpoint, prefix)) as b:
        source = await start(a)
        await source.agent.write_file("/noise", NOISE)
        made = await a.copying.snapshot(source)
        link.answers = [(503, "SlowDown"), (500, "InternalError")]
        link.cut_after = [-200, 20_000, -30_000, 60_000, -200]
        await remote_of(a).push(made)
        link.answers, link.cut_after = [(503, "SlowDown")], [200, 40_000, 1_000, 30_000]
        assert await read(await start(b, made.id), "/noise") == NOISE
    direct = bucket(endpoint, prefix)
    assert (await verify(direct, deep=True)).problems == []
    assert (await sweep(direct, 0)).garbage == 0


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(503, "SlowDown", BlobUnreachable), (403, "AccessDenied", BlobRefused), (507, "InsufficientStorage", BlobFull)],
)
async def test_one_that_says_no_leaves_nothing_half(
    open_node: OpenNode, link: BadLink, status: int, code: str, kind: type[BlobError]
) -> None:
    blobs = bucket(link.endpoint, str(uuid.uuid4()), timeout=1.5)
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        source = await start(a)
        await source.agent.write_file("/noise", NOISE)
        made = await a.copying.snapshot(source)
        link.always, link.only = (status, code), b"PUT"
        with pytest.raises(kind):
            await remote_of(a).push(made)
        link.always = None
        await remote_of(a).push(made)
        if kind is not BlobFull:
            link.always, link.only = (status, code), b"GET"
            with pytest.raises(kind):
                await start(b, made.id)
            assert not b.catalog.layers_home.exists() or not list(b.catalog.layers_home.iterdir())
        link.always = None
        assert await read(await start(b, made.id), "/noise") == NOISE


async def test_a_slow_one_is_asked_several_things_at_a_time(open_node: OpenNode, link: BadLink) -> None:
    link.delay = 0.2
    blobs = bucket(link.endpoint, str(uuid.uuid4()))
    async with open_node("a", blobs, concurrency=8) as a, open_node("b", blobs, concurrency=8) as b:
        source = await start(a)
        await source.agent.write_file("/noise", NOISE)
        made = await a.copying.snapshot(source)
        began, before = time.monotonic(), link.connections
        await remote_of(a).push(made)
        assert time.monotonic() - began < (link.connections - before) * link.delay
        assert await read(await start(b, made.id), "/noise") == NOISE
