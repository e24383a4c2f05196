"""Scoring on the back end process: the same numbers as elsewhere, and nothing is left."""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest

from sandyard.envs.backends import load_backend
from sandyard.errors import HostError
from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome
from sandyard.verify.local import local_verifier
from sandyard.verify.process import ProcessVerifier
from sandyard.verify.program import RunnerLimits
from sandyard.verify.shaping import score
from tests.envs.interpreter.test_rewards import chosen_tasks, different, mbpp_tasks, rewards, wrong_solutions
from tests.verify.test_cheats import CHEATS, LIMITS, TASK

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


async def test_right_and_wrong_solutions_score_as_elsewhere() -> None:
    tasks = chosen_tasks()
    pairs = [(task, source) for task in tasks for source in (task.reference, wrong_solutions([task])[0]) if source]
    found = await rewards(ProcessVerifier(), pairs)
    assert different(pairs, found, await rewards(local_verifier(), pairs)) == []
    assert None not in found
    assert found.count(1.0) == len(tasks)


async def test_every_cheat_gets_what_it_deserves() -> None:
    verifier = ProcessVerifier(limits=LIMITS)
    try:
        found = [await score(verifier, TASK, cheat.code) for cheat in CHEATS]
    finally:
        await verifier.close()
    wrong = {c.name: got for c, got in zip(CHEATS, found, strict=True) if got != pytest.approx(c.deserves)}
    assert wrong == {}


async def test_solutions_find_neither_network_nor_files_nor_each_other() -> None:
    looking = (
        "import os, socket\n"
        "def seen():\n"
        "    found = [p for p in ('/root', '/etc/shadow', '/work', '/bin/sh', '/var') if os.path.isfile(p)]\n"
        "    try: socket.create_connection(('127.0.0.1', 22), 1); found.append('network')\n"
        "    except OSError: pass\n"
        "    found += [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 60]\n"
        "    return found\n"
    )
    verifier = ProcessVerifier()
    try:
        verdict = await verifier.verify(Task("t", "", tests=("assert seen() == []",)), looking)
        assert verdict.passed == 1, verdict
        ending = "import os, signal\ndef seen():\n    os.kill(-1, signal.SIGKILL)\n    os.kill(os.getppid(), 9)"
        verdict = await verifier.verify(Task("t", "", tests=("assert seen() == []",)), ending)
        assert verdict.results[0].outcome is TestOutcome.CRASHED, verdict
        assert verifier._processes._server.live == 0
    finally:
        await verifier.close()


async def test_many_verifications_at_once_and_one_given_up() -> None:
    verifier = ProcessVerifier()
    try:
        task = Task("t", "", tests=("assert f(2) == 4", "assert f(3) == 6"))
        slow = asyncio.ensure_future(verifier.verify(task, "def f(x):\n    while True: pass"))
        found = await asyncio.gather(*(verifier.verify(task, "def f(x): return x * 2") for _ in range(12)))
        assert [verdict.passed for verdict in found] == [2] * 12
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert verifier._processes._server.live == 0
    finally:
        await verifier.close()


def test_without_root_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostError, match="run as root, or verify on the back end sandbox"):
        ProcessVerifier()


@pytest.mark.full
@pytest.mark.timeout(3000)
async def test_three_hundred_right_and_wrong_solutions_of_mbpp() -> None:
    tasks = mbpp_tasks()
    right = [(task, task.reference or "") for task in tasks[:300]]
    mutated = [wrong_solutions(tasks, seed) for seed in (1, 2)]
    wrong = [(task, source) for found in mutated for task, source in zip(tasks, found, strict=True) if source][:300]
    limits = RunnerLimits(cpu_timeout=20)
    for name, pairs in (("right", right), ("wrong", wrong)):
        assert len(pairs) == 300
        found = await rewards(ProcessVerifier(limits=limits), pairs)
        print(name, dict(Counter(found)))
        assert None not in found
        assert different(pairs, found, await rewards(local_verifier(limits), pairs)) == []


def test_the_back_end_is_known() -> None:
    assert load_backend("process").NAME == "process"
