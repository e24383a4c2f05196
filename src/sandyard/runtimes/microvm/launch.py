"""Start one VMM: in namespaces, control groups and a root of its own, as a user of its own.

Its root holds the system's programs, read-only, the images every guest shares, and the one directory
that is its own at `/vm`, in which it may write to the files that are its user's. It has no network but what it is
given, and is the only process that it could see.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandyard.errors import CreateFailed, SandboxError
from sandyard.runtimes.microvm.cgroup import THREADS
from sandyard.runtimes.microvm.machine import TAP
from sandyard.runtimes.microvm.said import printable

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NEWPID = 0x20000000  # CLONE_NEWPID
_FILES = 1024  # open at a time: images of its disk and of layers, parts of its memory
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
# $1 the VMM's directory, $2 one to be /shared or nothing, $3 user, $4 bytes of the biggest file, $5 the device of the
# accelerator or nothing, $6 the address of the host's end of its interface or nothing, then groups up to `--`, then
# pairs of a host's file or directory and its name below /shared up to `--`, then the command.
_SCRIPT = """
set -e
own=$1 given=$2 user=$3 most=$4 device=$5 gate=$6
shift 6
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
trap '' XFSZ  # what is too big is an error of the write
ulimit -f $(( (most + 511) / 512 ))
ulimit -c 0
ulimit -n FILES
ulimit -p THREADS 2>/dev/null || ulimit -u THREADS
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


_libc = ctypes.CDLL(None, use_errno=True)


def _filled(script: str) -> str:
    texts = {"CLEAR": _CLEAR, "SET_UP": _SET_UP, "LATER": LATER, "TAP": TAP}
    for name, text in {**texts, "FILES": str(_FILES), "THREADS": str(THREADS)}.items():
        script = script.replace(name, text)
    return script


@dataclass(frozen=True, slots=True)
class VmStart:
    """`shared` maps names below `/shared` to files and directories of the host; what lies in the directory `given` it
    can read there too, also what comes later; `file_bytes`: of the biggest file it may write, also in memory; `network`
    is a namespace to be in."""

    own: Path
    uid: int
    groups: Sequence[Path]
    shared: dict[str, Path]
    log: Path
    file_bytes: int
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
    options = [str(plan.uid), str(plan.file_bytes), plan.device, plan.gate]
    arguments = [*directories, *options, *groups, "--", *shared, "--", *command]
    try:
        with _bounded(plan.log) as log:
            return _first_of_its_own([*spaces, "sh", "-c", _filled(_SCRIPT), "vmm", *arguments], log, descriptors)
    except OSError as error:
        raise CreateFailed("vmm", str(error)) from error


def _first_of_its_own(words: Sequence[str], log: IO[bytes], descriptors: Sequence[int]) -> int:
    """Start a process as the first of a PID namespace; its pid here. Raises `OSError`.

    A namespace is for the children of a thread to come. One that ends after it had one child needs no process between
    the VMM and this one, which has its pid and reaps it."""

    def start() -> int:
        if _libc.unshare(_NEWPID):
            code = ctypes.get_errno()
            raise OSError(code, f"no PID namespace of its own: {os.strerror(code)}")
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=descriptors,
            start_new_session=True,  # it outlives its server
            cwd="/",
            env={"PATH": _PATH},
        )
        process.returncode = 0  # whoever holds its pidfd reaps it; this object is not to warn that it runs
        return process.pid

    with ThreadPoolExecutor(1, "vmm") as thread:
        return thread.submit(start).result()


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
        raise SandboxError(f"{command[0]}: {printable(last_lines(plan.log))}")


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
