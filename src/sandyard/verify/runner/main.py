"""The runner: reads one job from stdin, runs every test of it, prints one verdict.

Job (JSON): `nonce`, `solution`, `setup`, `imports`, `entry_names`, `tests`, `cpu_timeout`,
`test_timeout`, `total_timeout` (seconds), `memory_mb`, `uid_base`, `require_root`. Output, two lines:
`<nonce> {"results": [[index, outcome, detail], …]}` and `<nonce> TESTS_PASSED <n> <total>`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

from sandyard.verify.runner import judge
from sandyard.verify.runner.confine import Limits, confine
from sandyard.verify.runner.zygote import Zygote

TIMEOUT, BROKEN = "timeout", "broken"
_MAX_VERDICT = 64 << 10
_MAX_DETAIL = 1000


def main() -> None:
    # A runner that is told to stop still ends its box and judge.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"stopped by signal {number}"))
    # The zygote is forked before the job is read: no box ever holds tests or the nonce.
    zygote = Zygote()
    job = _read_job()
    if job["require_root"] and os.geteuid() != 0:
        raise SystemExit("the runner must be root to confine solutions")
    zygote.prepare({key: job[key] for key in ("setup", "solution", "memory_mb", "cpu_timeout", "uid_base")})
    deadline = time.monotonic() + job["total_timeout"]
    results = []
    for index, test in enumerate(job["tests"]):
        left = deadline - time.monotonic()
        if left <= 0:
            results.append([index, TIMEOUT, "no time was left for it"])
        else:
            results.append([index, *_run_test(zygote, job, index, test, min(left, job["test_timeout"]))])
    passed = sum(1 for result in results if result[1] == judge.PASSED)
    nonce = job["nonce"]
    print(f"{nonce} {json.dumps({'results': results})}\n{nonce} TESTS_PASSED {passed} {len(results)}", flush=True)


def _read_job() -> dict[str, Any]:
    (length,) = struct.unpack(">I", _read_exactly(4))
    job: dict[str, Any] = json.loads(_read_exactly(length))
    return job


def _read_exactly(length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = os.read(0, length - len(data))
        if not chunk:
            raise SystemExit("stdin ended before the job was complete")
        data += chunk
    return bytes(data)


def _run_test(zygote: Zygote, job: Mapping[str, Any], index: int, test: str, timeout: float) -> tuple[str, str]:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        zygote.spawn(index, theirs.fileno())
        theirs.close()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _judge_process(job, test, mine.fileno(), writer)
        os.close(writer)
        mine.close()
        try:
            verdict = _read_verdict(reader, time.monotonic() + timeout)
        finally:
            os.close(reader)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            box_status = zygote.reap()
    return _outcome(verdict, status, box_status, timeout, job["cpu_timeout"])


def _outcome(verdict: bytes | None, status: int, box_status: int, timeout: float, cpu_timeout: int) -> tuple[str, str]:
    if verdict is None:
        return TIMEOUT, f"longer than {timeout:.3g} s"
    if not verdict:
        ended = os.waitstatus_to_exitcode(status)
        if ended == -signal.SIGXCPU:
            return TIMEOUT, "judging the answer took too long"
        return BROKEN, f"the judge ended with {ended}"
    outcome, detail = json.loads(verdict)
    if outcome != judge.ENDED:
        return outcome, detail
    ended = os.waitstatus_to_exitcode(box_status)
    if ended == -signal.SIGXCPU:
        return TIMEOUT, f"longer than {cpu_timeout} s of CPU time"
    how = f"exit code {ended}" if ended >= 0 else f"signal {-ended}"
    return judge.CRASHED, f"the solution's process ended: {how}"


def _read_verdict(reader: int, deadline: float) -> bytes | None:
    """All that the judge wrote, or None when it took too long."""
    data = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return None
        chunk = os.read(reader, _MAX_VERDICT)
        if not chunk or len(data) > _MAX_VERDICT:
            return bytes(data)
        data += chunk


def _judge_process(job: Mapping[str, Any], test: str, descriptor: int, writer: int) -> None:
    try:
        keep = (descriptor, writer)
        confine(Limits(job["memory_mb"], job["cpu_timeout"]), job["uid_base"], keep)
        outcome, detail = judge.judge_test(descriptor, job, test)
        # What the solution says may stand in it: too long a verdict would be none.
        os.write(writer, json.dumps([outcome, detail[:_MAX_DETAIL]]).encode())
    finally:
        os._exit(0)
