"""What a VMM, or a tool that works on its disk, can do where it runs, seen from there."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sandyard.config import PathSettings, Settings
from sandyard.errors import SandboxError
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime, commits, disk
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.launch import VmStart, run_confined, start_vmm
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.qcow2 import Image, nested
from sandyard.runtimes.microvm.users import make_home
from tests.yard import needs_qemu, node_home

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
MOST = 1 << 20
SPEC = SandboxSpec("box", Rootfs([]), Resources(disk_mb=16))


@pytest.fixture
def host() -> Iterator[Host]:
    with node_home() as home:
        made = Host(Settings(paths=PathSettings(state=home / "state", run=home / "run")))
        made.layout.prepare()
        yield made


@pytest.fixture
def layout(host: Host) -> Layout:
    return host.layout


@pytest.fixture
def plan(layout: Layout) -> VmStart:
    own = layout.disk("box")
    return VmStart(own, make_home(layout, own), [], {}, layout.run / "log", file_bytes=MOST)


def said_by(plan: VmStart, script: str) -> Sequence[str]:
    """Where it ends well; what it wrote."""
    run_confined(plan, ["sh", "-c", script], 60)
    for _ in range(100):  # what it said is on its way to the file
        if (lines := plan.log.read_text().splitlines())[-1:] == ["end"]:
            return lines[:-1]
        time.sleep(0.05)
    raise AssertionError(plan.log.read_text())


def numbers_of(pid: int) -> list[int]:
    """That a process has in each PID namespace, from here inwards."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [int(each) for each in next(line for line in lines if line.startswith("NSpid")).split()[1:]]


def test_it_is_alone(plan: VmStart) -> None:
    """It is the first of its processes, and none of the host's has a number there, or a directory."""
    with subprocess.Popen(["sleep", "60"]) as other:
        asks = f"kill -0 {other.pid} 2>&1; kill -0 {os.getpid()} 2>&1; ls -d /proc 2>&1; ls /proc/* 2>&1"
        lines = [line for line in said_by(plan, f"echo $$ $(id -u) $(id -G); {asks}; echo end") if line]
        other.kill()
    assert lines[0] == f"1 {plan.uid} {plan.uid}"
    assert len(lines) == 5
    assert all("No such" in line for line in lines[1:])


def test_its_pid_is_its_own_and_so_is_its_end(plan: VmStart) -> None:
    """Not that of something between: what ends it, ends what the pid is of, and how it ended is told."""
    wait = "sleep 60"
    for number, ends in ((signal.SIGKILL, wait), (signal.SIGSEGV, "use POSIX; abort()")):
        pid = start_vmm(plan, ["perl", "-e", ends], ())
        pidfd = os.pidfd_open(pid)
        try:
            if ends == wait:
                deadline = time.monotonic() + 30
                while Path(f"/proc/{pid}/comm").read_text() != "perl\n":
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                assert numbers_of(pid) == [pid, 1]
                signal.pidfd_send_signal(pidfd, number)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            assert poll.poll(30_000)
        finally:
            os.close(pidfd)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == number


def test_it_writes_only_to_its_files_and_those_are_bounded(plan: VmStart, layout: Layout) -> None:
    disk.to_be_written(plan.own, "file")
    theirs = plan.own / "theirs"
    theirs.write_bytes(b"root's")
    tries = ["touch /vm/new", "mkdir /vm/new", "ln -s x /vm/new", "mkfifo /vm/new", "chmod 777 /vm", "rm /vm/file"]
    tries += ["mv /vm/file /vm/new", "ln /vm/file /vm/new", "sh -c 'echo x >> /vm/theirs'", "touch /tmp/x"]
    script = "; ".join(f"{each} 2>/dev/null && echo '{each.partition(' ')[0]} was done'" for each in tries)
    lines = said_by(plan, f"{script}; head -c 3M /dev/zero 2>&1 > /vm/file; echo end")
    assert lines == ["head: error writing 'standard output': File too large"]  # an error, and no end of the program
    assert sorted(os.listdir(plan.own)) == ["file", "theirs"]
    assert ((plan.own / "file").stat().st_size, theirs.read_bytes()) == (MOST, b"root's")
    bounds = said_by(plan, "ulimit -Hf; ulimit -Sf; ulimit -Hn; ulimit -Hc; ulimit -Hp || ulimit -Hu; echo end")
    assert bounds == ["2048", "2048", "1024", "0", "128"]


def test_memory_without_a_name_is_bounded_too(plan: VmStart) -> None:
    """As a guest's RAM is: 319 is memfd_create(2)."""
    ask = 'my $n = "x"; open my $f, "+<&=", syscall(319, $n, 0) or die; truncate $f, $ARGV[0] or die "$!\n"'
    run_confined(plan, ["perl", "-e", ask, str(MOST)], 60)
    with pytest.raises(SandboxError, match="File too large"):
        run_confined(plan, ["perl", "-e", ask, str(MOST + 1)], 60)


@needs_qemu
async def test_a_tool_is_another_user_in_a_place_of_its_own(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the disk of a sandbox that is halted lies in the directory of its VMM."""
    plans: list[VmStart] = []

    def run(plan: VmStart, command: Sequence[str], timeout: float) -> None:
        plans.append(plan)
        run_confined(plan, command, timeout)

    monkeypatch.setattr(commits, "run_confined", run)
    disks, target = Disks(host.layout, SPEC), host.layout.state / "layer"
    uid = make_home(host.layout, disks.own)
    disks.prepare()
    image = disks.add()
    chain = nested([Image(path, "qcow2" if path == image else "raw") for path in disks.chain()])
    disk.run(["qemu-io", "-c", "write -P 7 1M 64k", chain])
    try:
        await commits.commit_halted(host, SPEC, target)
    finally:
        host.cgroups.remove_parent()
    (plan,) = plans
    assert plan.uid not in (0, uid)
    assert plan.own != disks.own
    assert disks.own not in plan.shared.values()
    assert plan.file_bytes == disks.most
    assert os.listdir(host.layout.disks) == ["box"]
    assert image.stat().st_uid == uid
    assert (target.stat().st_uid, stat.S_IMODE(target.stat().st_mode)) == (0, 0o444)
    check = ["qemu-io", "-r", "-f", "qcow2", "-c", "read -P 7 1M 64k", str(target)]
    assert "verification failed" not in disk.run(check)


def test_what_a_killed_server_left_of_a_tool_goes(host: Host) -> None:
    make_home(host.layout, host.layout.disk("box-tool"))
    host.end_tools("box")
    assert os.listdir(host.layout.disks) == []


async def test_a_guest_sees_an_error_where_its_vmm_may_write_no_more(runtime: MicroVMRuntime, base: Rootfs) -> None:
    spec = SandboxSpec("bounded", base, Resources(memory_mb=128, disk_mb=64, pids=64))
    instance = await runtime.create(spec)
    assert isinstance(instance, MicroVMInstance)
    disks, kit = Disks(runtime.host.layout, spec), Kit(runtime, base, instance)
    bounds = await asyncio.to_thread(Path(f"/proc/{instance.pid}/limits").read_text)
    found = {line[:26].strip(): line[26:].split()[:2] for line in bounds.splitlines()}
    assert found["Max file size"] == [str(max(runtime.host.starter.memory_mb(spec) << 20, disks.most))] * 2
    assert found["Max core file size"] == ["0", "0"]
    assert await asyncio.to_thread(numbers_of, instance.pid) == [instance.pid, 1]
    most = max(path.stat().st_size for path in disks.own.iterdir()) + MOST
    user = runtime.host.layout.uid("bounded")
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]  # it may lower what it has
    await asyncio.to_thread(disk.run, [*as_user, "prlimit", f"--pid={instance.pid}", f"--fsize={most}"])
    fill = "head -c 8M /dev/urandom | dd of=/big bs=1M conv=fsync 2>/dev/null"
    assert await kit.output(f"{fill}; echo $?") == "1"
    assert max(path.stat().st_size for path in disks.own.iterdir()) <= most
    assert await kit.output("echo lives") == "lives"  # and its VMM does
    assert not instance.stall.lasts
    await runtime.destroy("bounded")
