"""A program that ends on an answer ends with its own status, not with an abort of the transport's threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from sandyard.exiting import wait_for_handovers

# Asks a server of its own through the E2B SDK's transport and ends on the answer, while the thread that handed
# it over has yet to come back from the loop's socket: what a busy machine does to one in a hundred.
_ENDS_ON_AN_ANSWER = """
import asyncio, sys, time
{first}
import pyqwest

class SlowLoop(asyncio.SelectorEventLoop):
    def call_soon_threadsafe(self, *args, **kwargs):
        handle = super().call_soon_threadsafe(*args, **kwargs)
        time.sleep({slow})
        return handle

class Last:
    def __del__(self, sleep=time.sleep):
        sleep(1)  # the interpreter's own end takes a while

sys.last = Last()

async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")
    await writer.drain()

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    response = await pyqwest.Client(pyqwest.HTTPTransport()).get(f"http://{{host}}:{{port}}/")
    print(response.status, flush=True)

with asyncio.Runner(loop_factory=SlowLoop) as runner:
    runner.run(main())
"""


def _run(first: str, slow: float) -> subprocess.CompletedProcess[str]:
    code = _ENDS_ON_AN_ANSWER.format(first=first, slow=slow)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_a_program_that_ends_on_an_answer_ends_well() -> None:
    done = _run("import sandyard", 0.3)
    assert (done.returncode, done.stdout, done.stderr) == (0, "200\n", "")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="CPython 3.14 parks such threads itself")
def test_without_the_wait_it_would_abort() -> None:
    assert _run("", 0.3).returncode == -6  # else the transport has mended it, and sandyard.exiting can go


def test_a_thread_that_never_comes_back_is_not_waited_for() -> None:
    began = time.monotonic()
    assert _run("import sandyard", 30).stdout == "200\n"
    assert time.monotonic() - began < 20


async def test_nothing_under_way_is_nothing_to_wait_for() -> None:
    handed = threading.Thread(target=asyncio.get_running_loop().call_soon_threadsafe, args=(lambda: None,))
    handed.start()
    handed.join()
    began = time.monotonic()
    wait_for_handovers()
    assert time.monotonic() - began < 0.5
