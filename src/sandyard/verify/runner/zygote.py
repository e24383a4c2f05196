"""The process from which the boxes are forked: it knows the solution, never a test or the nonce."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

from sandyard.verify.runner import box
from sandyard.verify.runner.confine import Limits, confine, no_new_privileges
from sandyard.verify.runner.link import Link


class Zygote:
    """The runner's handle. One box lives at a time."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            try:
                _serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        self._link = Link(self._control.fileno())

    def prepare(self, job: Mapping[str, Any]) -> None:
        self._link.send(dict(job))

    def spawn(self, index: int, descriptor: int) -> None:
        """Fork the box of test `index`; it talks over `descriptor`."""
        socket.send_fds(self._control, [json.dumps({"spawn": index}).encode()], [descriptor])
        self._expect("spawned")

    def reap(self) -> int:
        """End the box and whatever it started; returns its wait status."""
        self._control.send(json.dumps({"reap": True}).encode())
        return int(self._expect("status"))

    def _expect(self, key: str) -> Any:
        message = self._link.receive()
        if key not in message:
            raise SystemExit(f"the zygote failed: {message}")
        return message[key]


def _serve(control: socket.socket) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    no_new_privileges()
    link = Link(control.fileno())
    job = link.receive()
    pid = uid = 0
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1024, 1)
        if not data:
            return
        command = json.loads(data)
        if "spawn" in command:
            uid = job["uid_base"] and job["uid_base"] + 1 + command["spawn"]
            pid = _fork_box(job, uid, descriptors[0])
            os.close(descriptors[0])
            link.send({"spawned": pid})
        else:
            link.send({"status": _end(pid, uid)})


def _fork_box(job: Mapping[str, Any], uid: int, descriptor: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            confine(Limits(job["memory_mb"], job["cpu_timeout"]), uid, (descriptor,))
            box.serve(descriptor, job["setup"], job["solution"])
        finally:
            os._exit(0)
    return pid


def _end(pid: int, uid: int) -> int:
    """Kill the box and everything of its user id: daemons that left its process group too."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not uid:
        _kill_group(pid)
    else:
        killer = os.fork()
        if killer == 0:
            try:
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the box left nothing behind
            finally:
                os._exit(0)
        os.waitpid(killer, 0)
    return status


def _kill_group(pid: int) -> None:
    try:  # noqa: SIM105 - contextlib would be one more import in every sandbox
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing was left in it
