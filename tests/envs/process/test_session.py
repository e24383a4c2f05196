"""A session: names that stay, output, and every way in which a program can end it."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandyard.envs.base import StepStatus
from sandyard.envs.process.limits import SessionLimits
from sandyard.envs.process.server import SessionServer
from sandyard.envs.process.session import ProcessSession
from sandyard.errors import ConfigError, DeathReason, SandboxDied

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

SRC = Path(__file__).parents[3] / "src"
STUBBORN = "while True:\n    try:\n        while True:\n            n = 1\n    except KeyboardInterrupt:\n        n = 2"


async def said(session: ProcessSession, code: str, **options: bool) -> str:
    """What a program prints; it must end well."""
    result = await session.run(code, 30, **options)
    assert (result.status, result.exit_code, result.stderr) == (StepStatus.OK, 0, ""), result
    return result.stdout


async def test_names_stay(session: ProcessSession) -> None:
    assert await said(session, "import math\nx = 2\ndef f(y): return x * y") == ""
    assert await said(session, "print(f(math.floor(3.5)))") == "6\n"
    assert await said(session, "class A: pass\nprint(A.__module__, __name__)") == "__main__ __main__\n"
    assert await said(session, "import sys; print(sys.modules['__main__'].x, sys.argv)") == "2 ['']\n"


async def test_channels_apart_and_from_below_python(session: ProcessSession) -> None:
    code = "import os, sys\nprint('a')\nprint('b', file=sys.stderr)\nos.write(1, b'c\\n')\nos.write(2, b'd\\n')"
    result = await session.run(code)
    assert (result.stdout, result.stderr) == ("a\nc\n", "b\nd\n")
    child = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(5)'])"
    assert await said(session, child) == "5\n"
    assert (await session.run("import os; os.write(1, b'\\xff\\xc3')")).stdout == "��"


async def test_a_traceback_is_the_programs_own(session: ProcessSession) -> None:
    result = await session.run("def f():\n    return 1 / 0\n\nf()")
    assert (result.status, result.exit_code) == (StepStatus.TASK_FAILED, 1)
    assert result.stderr.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<run 1>", line 4, in <module>',
        "    f()",
        '  File "<run 1>", line 2, in f',
        "    return 1 / 0",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]
    assert "SyntaxError" in (await session.run("def")).stderr
    assert "RecursionError" in (await session.run("def g(): return g()\ng()")).stderr
    assert "null bytes" in (await session.run("x = '\0'")).stderr
    assert "surrogates not allowed" in (await session.run("x = '\ud800'")).stderr
    broken = await session.run("class E(Exception):\n    def __str__(self): raise KeyError\nraise E")
    assert "E" in broken.stderr
    assert session.alive


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [("()", 0, ""), ("(3)", 3, ""), ("(True)", 1, ""), ("(None)", 0, ""), ("('why')", 1, "why\n"), ("(259)", 3, "")],
)
async def test_an_exit_ends_the_step_only(session: ProcessSession, ending: str, code: int, message: str) -> None:
    await said(session, "x = 1")
    for name in ("SystemExit", "exit"):
        result = await session.run(f"raise {name}{ending}" if name[0] == "S" else f"{name}{ending}")
        assert (result.exit_code, result.stderr, result.state_lost) == (code, message, False)
    assert await said(session, "print(x)") == "1\n"


async def test_input_is_empty(session: ProcessSession) -> None:
    assert "EOFError" in (await session.run("input()")).stderr
    assert await said(session, "import sys; print(repr(sys.stdin.read()))") == "''\n"


async def test_an_endless_loop_is_interrupted_and_names_stay(session: ProcessSession) -> None:
    await said(session, "x = 1")
    result = await session.run("print('first')\nwhile True: pass", 0.3)
    assert (result.status, result.exit_code, result.state_lost) == (StepStatus.TIMEOUT, None, False)
    assert result.stdout == "first\n"
    assert result.ending == "stopped after 0.3 s"
    assert result.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "driver" not in result.stderr
    assert (await session.run("import time; time.sleep(60)", 0.3)).status is StepStatus.TIMEOUT
    assert await said(session, "print(x)") == "1\n"


async def test_what_does_not_stop_is_killed_and_said_to_be_lost(session: ProcessSession) -> None:
    result = await session.run(STUBBORN, 0.3)
    assert (result.status, result.state_lost) == (StepStatus.TIMEOUT, True)
    assert not session.alive
    with pytest.raises(SandboxDied, match="restart it"):
        await session.run("1")
    await session.restart()
    assert "NameError" in (await session.run("print(n)")).stderr


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("import os; os._exit(4)", "the session ended with exit code 4"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import signal; signal.raise_signal(signal.SIGTERM)", "killed by SIGTERM"),
        ("import os; os.closerange(3, 256)", "the session ended"),  # by itself, or by whoever misses its link
    ],
)
async def test_a_program_that_ends_its_session(session: ProcessSession, code: str, ending: str) -> None:
    result = await session.run(f"print('before', flush=True)\n{code}", 30)
    assert (result.status, result.exit_code, result.state_lost) == (StepStatus.TASK_FAILED, None, True)
    assert ending in result.ending
    assert result.stdout == "before\n"
    with pytest.raises(SandboxDied) as died:
        await session.run("1")
    assert died.value.reason is DeathReason.CRASHED
    await session.restart()
    assert await said(session, "print(1)") == "1\n"


async def test_memory_ends_in_an_exception_or_a_death_by_name(session: ProcessSession) -> None:
    assert "MemoryError" in (await session.run("x = bytearray(1 << 30)", 30)).stderr
    # Each process is within its bound, all together are not.
    hog = (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = b'1' * (100 << 20); time.sleep(20)\n"
    )
    result = await session.run(hog + "y = b'1' * (100 << 20)\ntime.sleep(20)", 15)
    if result.state_lost and result.status is StepStatus.TASK_FAILED:
        assert "out of memory" in result.ending
    else:  # a child was chosen, and the session went on
        assert result.status is StepStatus.TIMEOUT


async def test_a_flood_is_cut_and_ended(session: ProcessSession) -> None:
    result = await session.run("while True: print('x' * 1000)", 30)
    assert (result.status, result.state_lost) == (StepStatus.TASK_FAILED, False)
    assert result.ending == "it printed without end"
    assert len(result.stdout) < 70_000
    assert "more characters were not kept" in result.stdout
    assert (await said(session, "print('y' * 100_000)")).startswith("y" * 65_536)


async def test_the_session_answers_once_whoever_forks(session: ProcessSession) -> None:
    fork = "import os\npid = os.fork()\nprint('parent' if pid else 'child', flush=True)\nif pid: os.waitpid(pid, 0)"
    assert sorted((await said(session, fork)).split()) == ["child", "parent"]
    pool = "import multiprocessing\nwith multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, 2]))"
    assert await said(session, pool) == "[1, 2]\n"
    left = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert await said(session, left) == ""
    assert await said(session, "print(3)") == "3\n"


async def test_threads_go_on_and_their_output_is_a_later_runs(session: ProcessSession) -> None:
    code = "import threading, time\nn = 0\ndef count():\n  global n\n  while True:\n    n += 1; time.sleep(0.001)\n"
    await said(session, code + "threading.Thread(target=count, daemon=True).start()")
    await said(session, "start = n\nwhile n == start: time.sleep(0.001)")


async def test_asyncio_and_interrupts_of_the_programs_own(session: ProcessSession) -> None:
    assert await said(session, "import asyncio\nasync def f(): return 4\nprint(asyncio.run(f()))") == "4\n"
    own = "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('rang'))\n"
    own += "signal.setitimer(0, 0.01)\nsignal.pause()"
    assert await said(session, own) == "rang\n"


async def test_a_program_that_breaks_what_the_driver_uses(session: ProcessSession) -> None:
    breaking = (
        "import os, sys, socket, struct, traceback, builtins\n"
        "os.write = os._exit = os.dup2 = os.close = os.open = None\n"
        "struct.Struct = struct.unpack = None\nsocket.socket.sendall = socket.socket.recv = None\n"
    )
    await session.run(breaking)
    if not session.alive:
        await session.restart()
    assert (await session.run("print(1)")).stdout == "1\n"
    await session.run("import sys\nsys.stdout.close()\nsys.stderr = None")
    assert (await session.run("print(2)")).stdout == "2\n"


async def test_a_forged_answer_is_no_answer(session: ProcessSession) -> None:
    forge = (
        "import os, struct, time\n"
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, struct.pack('!BIi', 3, 77, 0))\n"
        "    except OSError: pass\n"
        "time.sleep(30)\n"
    )
    result = await session.run(forge, 20)
    assert (result.status, result.state_lost) == (StepStatus.TASK_FAILED, True)


async def test_fresh_runs_share_files_and_nothing_else(session: ProcessSession) -> None:
    assert await said(session, "x = 1\nopen('kept', 'w').write('here')\nimport json", fresh=True) == ""
    assert "NameError" in (await session.run("print(x)", fresh=True)).stderr
    assert "NameError" in (await session.run("print(json)", fresh=True)).stderr
    assert await said(session, "print(open('kept').read())", fresh=True) == "here\n"
    ending = "import atexit, threading, time\natexit.register(print, 'last')\n"
    ending += "def late():\n    time.sleep(0.05); print('thread')\nthreading.Thread(target=late).start()"
    assert await said(session, ending, fresh=True) == "thread\nlast\n"
    assert (await session.run("import sys; sys.exit(5)", fresh=True)).exit_code == 5
    killed = await session.run("import ctypes; ctypes.string_at(0)", fresh=True)
    assert (killed.exit_code, killed.ending, killed.state_lost) == (None, "killed by SIGSEGV", False)
    stubborn = await session.run(STUBBORN, 0.3, fresh=True)
    assert (stubborn.status, stubborn.state_lost) == (StepStatus.TIMEOUT, False)
    left = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nelse:\n    print(1)"
    assert await said(session, left, fresh=True) == "1\n"
    alone = "import os; print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit())[:2] == [1, 2])"
    assert await said(session, alone, fresh=True) == "True\n"


async def test_calls_at_the_same_time_take_turns(session: ProcessSession) -> None:
    await said(session, "n = 0")
    await asyncio.gather(*(said(session, "n += 1") for _ in range(20)))
    assert await said(session, "print(n)") == "20\n"


async def test_two_sessions_do_not_see_each_other(server: SessionServer) -> None:
    first, second = await server.open(), await server.open()
    await said(first, "x = 1\nopen('/tmp/mine', 'w').close()\nimport json\njson.dumps = None")
    await said(first, "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 5000)); s.listen()")
    await said(first, "a = socket.socket(socket.AF_UNIX); a.bind('\\0mine'); a.listen()")
    assert await said(second, "import os, json; print(os.listdir('/tmp'), json.dumps(1))") == "[] 1\n"
    assert "NameError" in (await second.run("x")).stderr
    assert "refused" in (await second.run("import socket; socket.create_connection(('127.0.0.1', 5000))")).stderr
    assert "refused" in (await second.run("socket.socket(socket.AF_UNIX).connect('\\0mine')")).stderr
    assert await said(second, "print([p for p in os.listdir('/proc') if p.isdigit()])") == "['1', '2']\n"


async def test_a_cancelled_run_ends_the_session(session: ProcessSession) -> None:
    running = asyncio.ensure_future(session.run("while True: pass", 60))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not session.alive
    await session.restart()
    assert await said(session, "print(1)") == "1\n"


async def test_large_programs_and_too_large_ones(session: ProcessSession) -> None:
    assert await said(session, "x = '" + "é" * (2 << 20) + "'\nprint(len(x))") == f"{2 << 20}\n"
    result = await session.run("#" * (17 << 20))
    assert (result.status, session.alive) == (StepStatus.TASK_FAILED, True)


async def test_the_fork_server_dies(server: SessionServer) -> None:
    sessions = [await server.open() for _ in range(3)]
    running = asyncio.ensure_future(sessions[0].run("import time; time.sleep(60)", 60))
    await asyncio.sleep(0.2)
    assert server._process is not None
    server._process._process.kill()
    with pytest.raises(SandboxDied) as died:
        await running
    assert died.value.reason is DeathReason.HOST
    assert not any(session.alive for session in sessions)
    await sessions[1].restart()
    assert await said(sessions[1], "print(1)") == "1\n"


async def test_only_named_packages_are_there() -> None:
    async with SessionServer(packages=("idna",)) as server, await server.open() as session:
        assert await said(session, "import idna; print(idna.encode('ä.de'))") == "b'xn--4ca.de'\n"
        assert "ModuleNotFoundError" in (await session.run("import sandyard")).stderr
        assert "ModuleNotFoundError" in (await session.run("import pydantic")).stderr
    async with SessionServer(packages=("no_such_package",)) as server:
        with pytest.raises(ConfigError, match="no_such_package"):
            await server.open()


@pytest.mark.parametrize("cycles", [60, pytest.param(2000, marks=pytest.mark.full)])
async def test_nothing_stays(cycles: int) -> None:
    """Descriptors, processes, mounts, control groups and namespaces are flat over many sessions."""
    async with SessionServer(SessionLimits(memory_mb=256)) as server:
        await _cycle(server, 8)
        assert server._process is not None
        groups = server._process.groups.directories
        before = _held(groups)
        assert groups
        assert len(groups) == before["groups"]
        await _cycle(server, cycles)
        assert _held(groups) == before
    gc.collect()
    assert not any(group.exists() for group in groups)


async def _cycle(server: SessionServer, count: int) -> None:
    for start in range(0, count, 4):
        sessions = await asyncio.gather(*(server.open() for _ in range(4)))
        await asyncio.gather(*(session.run("import os\nx = 1", 30) for session in sessions))
        if start % 8:
            await asyncio.gather(*(session.run("os._exit(1)", 30) for session in sessions))
        await asyncio.gather(*(session.close() for session in sessions))
    assert server.live == 0


def _held(groups: Sequence[Path]) -> dict[str, object]:
    """What this process and its descendants hold."""
    parents, gone = {}, set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            parents[int(name)] = int(parent)
            gone |= {int(name)} if state == "Z" else set()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it went meanwhile
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    held = family - gone  # what only waits to be reaped has nothing but its number
    return {
        "family": sorted(family),
        "descriptors": {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in held},
        "mounts": {pid: len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()) for pid in held},
        "namespaces": {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in held for kind in ("mnt", "net", "pid")},
        "groups": sum(1 for group in groups for _ in os.walk(group)),
    }


def test_without_root_too(tmp_path: Path) -> None:
    """As nobody, with the system's Python: user namespaces do what root did, and what is missing is said."""
    program = (
        "import asyncio\nfrom sandyard.envs.process.server import SessionServer\n"
        "async def main():\n"
        "    async with SessionServer() as server:\n"
        "        print(await server.start())\n"
        "        async with await server.open() as session:\n"
        "            await session.run('x = 1')\n"
        "            print((await session.run('import os; print(x, os.getuid())')).stdout)\n"
        "asyncio.run(main())\n"
    )
    python = "/usr/bin/python3"
    if not all(folder.stat().st_mode & 0o001 for folder in (SRC, *SRC.parents)):
        pytest.skip(f"{SRC} is below a directory that other users cannot enter")
    if not os.path.exists(python) or sys.version_info[:2] < (3, 11):
        pytest.skip("no Python that other users can read")
    command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", python, "-B", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SRC), "PATH": os.defpath})
    assert done.stdout.splitlines()[:2] == ["no control groups without root", "1 1000"], done.stderr
