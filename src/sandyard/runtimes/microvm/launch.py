"""Start one VMM: in namespaces, control groups and a root of its own, as a user of its own.

Its root holds the system's programs, read-only, the images every guest shares, and the one directory
that is its own at `/vm`. It has no network but what it is given.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandyard.errors import CreateFailed, SandboxError
from sandyard.runtimes.microvm.machine import TAP

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOG_MAX = 1 << 20
_LOG_LOOKS, _LOG_PAUSE = 4, 0.01
OWN = Path("/vm")
SHARED = Path("/shared")
LATER = "later"
"""The address of an interface that is made, and moved to where it is to be later."""
_CLEAR = "for link in eth0 TAP; do ! ip link show $link >/dev/null 2>&1 || ip link delete $link; done"
_SET_UP = """
    ip link set TAP address 02:00:0a:c8:00:01  # a restored guest remembers it
    ip address add $gate dev TAP
    ip link set TAP up
    # The listeners behind it are on loopback.
    echo 1 > /proc/sys/net/ipv4/conf/TAP/route_localnet
"""
# $1 the VMM's directory, $2 one to be /shared or nothing, $3 user, $4 the device of the accelerator or nothing, $5 the
# address of the host's end of its interface or nothing, then groups up to `--`, then pairs of a host's file or
# directory and its name below /shared up to `--`, then the command.
_SCRIPT = """
set -e
own=$1 given=$2 user=$3 device=$4 gate=$5
shift 5
if [ -n "$gate" ]; then
    CLEAR
    ip tuntap add dev TAP mode tap user $user
    [ "$gate" = LATER ] || { SET_UP }
    device="$device net/tun"
fi
while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs"; shift; done
shift
root=/mnt
mount -t tmpfs -o mode=755,size=1m,nosuid vmm $root
mkdir $root/usr $root/dev $root/dev/net $root/vm $root/shared $root/tmp
for link in bin sbin lib lib64; do
    if [ -L /$link ]; then ln -s usr/$link $root/$link
    elif [ -d /$link ]; then mkdir $root/$link; mount --bind /$link $root/$link; fi
done
mount --bind /usr $root/usr
mount -o remount,bind,ro,nosuid,nodev $root/usr
for name in null zero urandom; do : > $root/dev/$name; mount --bind /dev/$name $root/dev/$name; done
for name in $device; do  # a node of its own: the host's may be for root only
    mknod -m 600 $root/dev/$name c $(stat -c '0x%t 0x%T' /dev/$name)
    chown $user $root/dev/$name
done
[ -z "$given" ] || mount --bind "$given" $root/shared
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir "$root/shared/$2"; else : > "$root/shared/$2"; fi
    mount --bind "$1" "$root/shared/$2"
    mount -o remount,bind,ro "$root/shared/$2"
    shift 2
done
shift
[ -z "$given" ] || mount -o remount,bind,ro,nosuid,nodev $root/shared
mount --bind "$own" $root/vm
mount -o remount,ro $root
cd /
exec chroot --userspec="$user:$user" --groups="$user" $root "$@"
"""
# $1 the VMM, $2 the namespace that its interface is to be in, $3 its address there.
_MOVE = """
set -e
export gate=$3
nsenter --net="$2" sh -ec 'CLEAR'
nsenter --net="/proc/$1/ns/net" ip link set TAP netns "$2"
nsenter --net="$2" sh -ec 'SET_UP'
"""


def _filled(script: str) -> str:
    for name, text in (("CLEAR", _CLEAR), ("SET_UP", _SET_UP), ("LATER", LATER), ("TAP", TAP)):
        script = script.replace(name, text)
    return script


@dataclass(frozen=True, slots=True)
class VmStart:
    """`shared` maps names below `/shared` to files and directories of the host; what lies in the directory `given` it
    can read there too, also what comes later; `network` is a namespace to be in."""

    own: Path
    uid: int
    groups: Sequence[Path]
    shared: dict[str, Path]
    log: Path
    device: str = ""
    network: Path | None = None
    gate: str = ""  # the address, with its prefix, of the host's end of the interface, or `LATER`
    given: Path | None = None


def start_vmm(plan: VmStart, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start `command` with `descriptors` open; its pid. Blocking, and returns before it has come up.

    The pid is that of the VMM itself: every step on the way is an exec. Raises `CreateFailed("vmm")`."""
    where = ["nsenter", f"--net={plan.network}"] if plan.network else []
    spaces = [*where, "unshare", "--mount", "--ipc", *([] if plan.network else ["--net"])]
    shared = [part for name, path in plan.shared.items() for part in (str(path), name)]
    groups = [str(group) for group in plan.groups]
    directories = [str(plan.own), str(plan.given or "")]
    arguments = [*directories, str(plan.uid), plan.device, plan.gate, *groups, "--", *shared, "--", *command]
    try:
        with _bounded(plan.log) as log:
            process = subprocess.Popen(
                [*spaces, "sh", "-c", _filled(_SCRIPT), "vmm", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=descriptors,
                start_new_session=True,  # it outlives its server
                cwd="/",
                env={"PATH": _PATH},
            )
    except OSError as error:
        raise CreateFailed("vmm", str(error)) from error
    process.returncode = 0  # whoever holds its pidfd reaps it; this object is not to warn that it runs
    return process.pid


def move_tap(pid: int, network: Path, gate: str) -> None:
    """Bring the interface of a VMM that was started to have it `LATER` to the namespace `network`, with the address
    `gate`. Blocking. Raises `SandboxError`."""
    words = ["sh", "-c", _filled(_MOVE), "move", str(pid), str(network), gate]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/", env={"PATH": _PATH})
    if done.returncode:
        raise SandboxError(f"the interface of the VMM {pid} does not go to {network}: {done.stderr.strip()[-300:]}")


def run_confined(plan: VmStart, command: Sequence[str], timeout: float) -> None:
    """Run a tool to its end where the VMM runs: what it reads is what a guest may have written.

    Blocking. Raises `SandboxError`."""
    pid = start_vmm(plan, command, ())
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(timeout * 1000):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            raise SandboxError(f"{command[0]} did not end within {timeout:g} s")
    finally:
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
    if status != 0:
        raise SandboxError(f"{command[0]}: {last_lines(plan.log)}")


def listen(stack: ExitStack, path: Path) -> int:
    """A listening socket at `path`, inheritable by number, closed with `stack`."""
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(4)
    return listener.fileno()


@contextmanager
def _bounded(log: Path) -> Iterator[IO[bytes]]:
    """What is written to it ends in a new file `log`, as far as it may be: a guest can make its VMM complain without
    end. What is beyond is dropped, which a VMM does not mind."""
    script = 'exec 3<&0; head -c "$1" <&3 2>/dev/null &'  # nobody's child when this ends
    words = ["setsid", "sh", "-c", script, "log", str(_LOG_MAX)]
    with (
        open(log, "wb") as file,  # its directory may have another name, or be gone, when the reader begins
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=file, env={"PATH": _PATH}, cwd="/") as reader,
    ):
        assert reader.stdin is not None  # asked for
        yield reader.stdin


def last_lines(log: Path, count: int = 3) -> str:
    """What a VMM said last, in one line."""
    lines: list[str] = []
    for _ in range(_LOG_LOOKS):
        with suppress(FileNotFoundError), open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
        if lines:
            break
        time.sleep(_LOG_PAUSE)  # it may be on its way to the file
    return " | ".join(lines[-count:]) or "it said nothing"
