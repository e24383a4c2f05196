from __future__ import annotations

import asyncio
from functools import partial

from sandyard.sandboxes.timers import Timers


async def test_they_fire_in_the_order_of_their_deadlines() -> None:
    timers, fired = Timers(), list[str]()
    for name, delay in (("late", 0.2), ("early", 0.01), ("middle", 0.1)):
        timers.set(name, delay, partial(fired.append, name))
    await asyncio.sleep(0.4)
    assert fired == ["early", "middle", "late"]


async def test_setting_again_replaces_and_cancelling_removes() -> None:
    timers, fired = Timers(), list[str]()
    timers.set("a", 0.01, partial(fired.append, "old"))
    timers.set("a", 0.03, partial(fired.append, "new"))
    timers.set("b", 0.01, partial(fired.append, "b"))
    timers.cancel("b")
    await asyncio.sleep(0.1)
    assert fired == ["new"]


async def test_a_callback_may_set_its_own_name_again() -> None:
    timers, fired = Timers(), list[int]()

    def tick() -> None:
        fired.append(1)
        if len(fired) < 3:
            timers.set("tick", 0.005, tick)

    timers.set("tick", 0.0, tick)
    await asyncio.sleep(0.2)
    assert len(fired) == 3


async def test_clear_stops_everything() -> None:
    timers, fired = Timers(), list[int]()
    timers.set("a", 0.01, partial(fired.append, 1))
    timers.clear()
    await asyncio.sleep(0.05)
    assert not fired


async def test_one_that_is_set_again_and_again_takes_no_more_room() -> None:
    timers, fired = Timers(), list[str]()
    timers.set("b", 0.05, partial(fired.append, "b"))
    for _ in range(10_000):
        timers.set("a", 3600, partial(fired.append, "a"))
    assert len(timers._heap) < 100
    timers.set("a", 0.01, partial(fired.append, "a"))
    await asyncio.sleep(0.2)
    assert sorted(fired) == ["a", "b"]
