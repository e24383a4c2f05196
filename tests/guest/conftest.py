"""A real agent, run natively under AddressSanitizer and UBSan; every test ends with a check of its health."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandyard.guest import LinkAgent, Process, open_agent

GUEST = Path(__file__).parents[2] / "guest"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="switching users needs root")


@pytest.fixture(scope="session")
def checked_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler with sanitizers here")
    binary = tmp_path_factory.mktemp("agent") / "sandyard-agent-checked"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    subprocess.run([compiler, *flags, *sanitize, "-o", binary, *sorted(GUEST.glob("*.c"))], check=True)
    return binary


@dataclass
class RunningAgent:
    """The process, and the socket it listens on."""

    process: subprocess.Popen[bytes]
    path: Path
    log: Path

    async def connect(self) -> LinkAgent:
        return await open_agent(self.path, 10.0)

    def socket(self) -> socket.socket:
        """A raw connection, for hosts that misbehave."""
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(str(self.path))
        raw.settimeout(10)
        return raw

    def status(self, field: str) -> int:
        """A number from /proc/PID/status of the agent."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
        raise KeyError(field)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def open_files(self) -> list[str]:
        """What each descriptor names, for a failure that says what leaked."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        return [f"{entry.name} -> {os.readlink(entry)}" for entry in folder.iterdir()]

    def cpu_ticks(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])


_LIBC = ctypes.CDLL(None)
_IGNORE = (ctypes.c_ulong * 4)(1, 0, 0, 0)  # the kernel's struct sigaction with SIG_IGN
_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}[platform.machine()]


def ignore_signals() -> None:
    """What a careless parent may hand down: one of ours, and one of the C library's own, which it will not reset."""
    for number in (signal.SIGUSR1, 32):
        _LIBC.syscall(_RT_SIGACTION, number, _IGNORE, None, 8)


def start_agent(binary: Path, folder: Path) -> RunningAgent:
    path, log = folder / "a.sock", folder / "agent.log"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(16)
    environ = {
        "ASAN_OPTIONS": "detect_leaks=0:handle_abort=1:quarantine_size_mb=2",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [binary, "--listen-fd", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stderr=out,
            env=environ,
            preexec_fn=ignore_signals,
        )
    listener.close()
    return RunningAgent(process, path, log)


@pytest.fixture
def running(checked_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    agent = start_agent(checked_binary, tmp_path_factory.mktemp("link"))
    try:
        yield agent
        assert agent.process.poll() is None, f"the agent died: {agent.log.read_text()[-4000:]}"
        agent.process.terminate()
        assert agent.process.wait(10) == 0, agent.log.read_text()[-4000:]
        assert agent.log.read_text() == ""
    finally:
        if agent.process.poll() is None:
            agent.process.kill()
            agent.process.wait()


@pytest.fixture
async def agent(running: RunningAgent) -> AsyncIterator[LinkAgent]:
    link = await running.connect()
    yield link
    await link.close()


@asynccontextmanager
async def closing(agent: LinkAgent) -> AsyncIterator[LinkAgent]:
    try:
        yield agent
    finally:
        await agent.close()


async def collect(process: Process) -> dict[str, bytes]:
    """All output by channel."""
    found: dict[str, bytes] = {}
    async for channel, data in process.output():
        found[channel] = found.get(channel, b"") + data
    return found


async def eventually(condition: object, seconds: float = 20.0) -> None:
    """Wait until `condition()` is true."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.02)
