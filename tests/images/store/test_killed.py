"""kill -9 at random moments of pulls and collections: the store is whole, and the next try succeeds."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.images.garbage.base import Checkup, check_all
from sandyard.images.garbage.checks import LayersOfImages, NodeTemplates
from sandyard.images.garbage.collect import collect, node_templates
from sandyard.images.templates import TemplateStore
from tests.images.store.conftest import MIB, MakeSettings, layout, random_layer

pytestmark = pytest.mark.root

# What a command does once it is loaded, without the second that loading takes.
_PULL = """
import asyncio, sys
from pathlib import Path
from sandyard.config import ImageSettings, PathSettings, Settings
from sandyard.images.garbage.collect import collect, node_templates
from sandyard.images.pulled import pull_template
from sandyard.images.templates import TemplateStore
state, source, work = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
settings = Settings(paths=PathSettings(state=state, run=state), images=ImageSettings(store_high_mb=24, store_low_mb=12))
def room(count): collect(settings, lambda: node_templates(settings), free=count)
print("begin", flush=True)
if work == "pull":
    asyncio.run(pull_template(settings, source, "tool", collect=room))
else:
    collect(settings, lambda: node_templates(settings), free=-1)
print("done", flush=True)
"""


def check(settings: Settings) -> Sequence[Checkup]:
    return check_all([LayersOfImages(settings), NodeTemplates(settings)], deep=True)


def run(settings: Settings, source: str, work: str, kill_after: float | None) -> float | None:
    """Seconds it took, None where it was killed first."""
    child = subprocess.Popen(
        [sys.executable, "-c", _PULL, str(settings.paths.state), source, work], stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"begin\n"
        began = time.monotonic()
        if kill_after is not None:
            time.sleep(kill_after)
            child.kill()
        ended = child.stdout.readline()
        took = time.monotonic() - began
        code = child.wait()
    assert kill_after is not None or code == 0
    return took if ended == b"done\n" else None


def campaign(settings: Settings, home: Path, rounds: int) -> int:
    """How many of them were killed at work."""
    dice = random.Random(5)
    sources = [layout(home / str(n), random_layer("a", 3 * MIB, 40), random_layer("b", 3 * MIB, 200)) for n in range(3)]
    took = {"pull": 0.0, "gc": 0.02}
    for source in sources:
        took["pull"] = max(took["pull"], run(settings, source, "pull", None) or 0.0)
    killed = 0
    for number in range(rounds):
        work = "gc" if number % 4 == 3 else "pull"
        source = sources[number % len(sources)]
        if work == "pull" or number % 8 == 7:  # so that there is something to do
            if TemplateStore(settings).find("tool") is not None:
                TemplateStore(settings).delete("tool")
            if work == "pull":
                collect(settings, dict, free=-1)
        killed += run(settings, source, work, dice.uniform(0, took[work])) is None
        assert [each for checkup in check(settings) for each in checkup.damaged] == [], f"round {number}"
        if number % 5 == 4:
            run(settings, source, "pull", None)
            assert TemplateStore(settings).find("tool") is not None
    run(settings, sources[0], "pull", None)
    collect(settings, lambda: node_templates(settings))
    assert [each for checkup in check(settings) for each in (*checkup.damaged, *checkup.orphans)] == []
    return killed


@pytest.mark.timeout(180)
def test_killed_10_times(make: MakeSettings, tmp_path: Path) -> None:
    assert campaign(make(store_high_mb=24, store_low_mb=12), tmp_path, 10) >= 3


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_killed_200_times(make: MakeSettings, tmp_path: Path) -> None:
    assert campaign(make(store_high_mb=24, store_low_mb=12), tmp_path, 200) >= 60


@pytest.mark.timeout(120)
def test_two_processes_that_pull_the_same_share_one_copy(make: MakeSettings, tmp_path: Path) -> None:
    settings = make(store_high_mb=64)
    source = layout(tmp_path / "image", random_layer("a", 4 * MIB), random_layer("b", 4 * MIB))
    words = [sys.executable, "-c", _PULL.replace("=24", "=64"), str(settings.paths.state), source, "pull"]
    children = [subprocess.Popen(words, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    layers, _ = check(settings)
    assert (layers.count, layers.damaged, layers.orphans) == (2, [], [])
