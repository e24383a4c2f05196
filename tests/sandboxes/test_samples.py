"""What sandboxes use, sampled: one that keeps silent is its own affair."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from sandyard.runtimes.base import Usage
from sandyard.runtimes.memory import MemoryInstance, MemoryRuntime
from sandyard.server import usage

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Until, Wanted


async def test_one_that_keeps_silent_holds_up_no_other(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "SAMPLE_SECONDS", 0.05)
    monkeypatch.setattr(usage, "FRESH_SECONDS", 0.0)
    used = MemoryInstance.usage

    async def never(instance: MemoryInstance) -> Usage:
        if instance.spec.sandbox_id == silent.id:
            await asyncio.Event().wait()
        return await used(instance)

    monkeypatch.setattr(MemoryInstance, "usage", never)
    async with open_yard(MemoryRuntime()) as yard:
        silent, other = await yard.create(wanted()), await yard.create(wanted())
        history = usage.UsageHistory(yard)
        history.start()
        try:
            await until(lambda: len(history._samples.get(other.id, ())) > 2)
        finally:
            await history.stop()
        assert not history._samples[silent.id]
