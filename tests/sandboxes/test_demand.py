"""What a pool learns from how creates come."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sandyard.sandboxes.demand import BREATH, Demand


def _demand(make_seconds: float = 0.1) -> Demand:
    return Demand(half_life=300.0, make_seconds=make_seconds)


def test_a_burst_is_wanted_whole_however_rare_it_is() -> None:
    demand = _demand()
    for _ in range(40):
        demand.taken(1000.0)
    assert demand.wanted(1000.0) == 40
    assert demand.wanted(1299.0) == 40
    assert [demand.wanted(1000.0 + 300.0 * times) for times in (1, 2, 5, 6)] == [20, 10, 1, 0]


def test_a_steady_trickle_wants_one_however_long_it_lasts() -> None:
    demand = _demand()
    for second in range(3600):
        demand.taken(float(second))
    assert demand.wanted(3600.0) == 1


def test_what_is_slow_to_make_is_kept_in_stock() -> None:
    quick, slow = _demand(0.1), _demand(0.1)
    for _ in range(20):
        slow.made(8.0)
    for take in range(10):
        for demand in (quick, slow):
            demand.taken(take * 4.0)
    assert quick.wanted(40.0) == 1
    assert 4 <= slow.wanted(40.0) <= 6  # one is made in the time of two takes


def test_a_smaller_burst_does_not_keep_a_larger_one_alive() -> None:
    demand = _demand()
    for _ in range(32):
        demand.taken(0.0)
    for at in range(100, 1500, 100):
        demand.taken(float(at))
    assert demand.wanted(1500.0) == 1


def test_one_joins_another_where_it_stood() -> None:
    old, new = _demand(0.5), _demand(1.0)
    for _ in range(7):
        old.taken(50.0)
    new.taken(10.0)
    new.join(old)
    assert (new.wanted(60.0), new.last_take, new.make_seconds) == (7, 50.0, 0.5)
    old.join(new)
    assert old.wanted(60.0) == 7


@settings(max_examples=80, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 5.0]), min_size=1, max_size=60),
    make=st.sampled_from([0.05, 0.5, 3.0]),
)
def test_with_what_is_wanted_in_stock_nobody_would_have_waited(gaps: list[float], make: float) -> None:
    """Played again over a stock of that size, which is filled one by one in the pauses."""
    demand, now = Demand(half_life=1e6, make_seconds=make), 1000.0
    times = []
    for gap in gaps:
        now += gap
        times.append(now)
        demand.taken(now)
    size = demand.wanted(now)
    assert size >= 1
    stock, last = float(size), times[0]
    for at in times:
        stock = min(stock + max(at - last - BREATH, 0.0) / make, size)
        assert stock > 1 - 1e-6, (at, stock)
        stock, last = stock - 1, at
