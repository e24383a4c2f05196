"""A storage that cannot be asked: what this node knows by itself stays what it is."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from sandyard.errors import NotFound
from sandyard.sandboxes.model import new_id
from sandyard.store.blobs import BlobError, BlobInfo, BlobRefused, BlobUnreachable
from sandyard.store.blobs.memory import MemoryBlobs
from tests.sandboxes.remote.conftest import remote_of, start
from tests.store.blobs.peers import bucket, free_port

if TYPE_CHECKING:
    from tests.sandboxes.remote.conftest import OpenNode


class Away(MemoryBlobs):
    """Fails with `error`, where one is set, and counts the questions."""

    name = "s3://far"

    def __init__(self) -> None:
        super().__init__()
        self.error: BlobError | None = None
        self.asked = 0

    def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return super().list(prefix)


@pytest.mark.parametrize("kind", [BlobUnreachable, BlobRefused])
async def test_an_unknown_name_is_unknown(open_node: OpenNode, kind: type[BlobError]) -> None:
    blobs = Away()
    blobs.error = kind("s3://far does not answer")
    async with open_node("a", blobs) as node:
        with pytest.raises(NotFound, match="no-such-thing"):
            await start(node, "no-such-thing")
        asked = blobs.asked
        with pytest.raises(NotFound):
            await start(node, "nor-such-thing:v2")
        assert blobs.asked == asked, "it was asked again at once"
        await start(node, "base")


async def test_what_only_the_storage_can_have_is_its_failure(open_node: OpenNode) -> None:
    blobs = Away()
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await a.copying.snapshot(await start(a), "team/state:v1")
        await remote_of(a).push(made)
        assert len(await remote_of(b).list("t")) == 1
        blobs.error = BlobUnreachable("s3://far does not answer")
        for reference in (made.template.id, f"{new_id()}:default", "state:v1"):
            with pytest.raises(BlobUnreachable, match="s3://far") as caught:
                await start(b, reference)
            assert caught.value.http_status == 503
        with pytest.raises(NotFound):  # what it was seen to have for another tenant says nothing
            await start(b, "state:v1", tenant="other")
        blobs.error = None
        await start(b, "state:v1")


async def test_templates_of_this_node_are_not_looked_for(open_node: OpenNode) -> None:
    blobs = Away()
    blobs.error = BlobUnreachable("s3://far does not answer")
    async with open_node("a", blobs) as node:
        with pytest.raises(NotFound, match="tag 'none'"):
            await start(node, "base:none")
        assert blobs.asked == 0


@pytest.mark.usefixtures("with_credentials")
async def test_nobody_waits_long_for_a_name(open_node: OpenNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandyard.sandboxes.remote.listing._NAME_SECONDS", 0.5)
    nobody = bucket(f"http://127.0.0.1:{free_port()}", timeout=60.0)
    async with open_node("a", nobody) as node:
        began = time.monotonic()
        with pytest.raises(NotFound):
            await start(node, "no-such-thing")
        assert time.monotonic() - began < 10
