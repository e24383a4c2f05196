"""Checks that a sandbox is alone: processes, network, kernel, privileges, its agent."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import time
from pathlib import Path

from sandyard.errors import GuestErrorCode
from sandyard.guest.base import PortStream
from sandyard.runtimes.conformance.kit import Kit, eventually, expect, patience, read_until, refused
from sandyard.runtimes.conformance.runner import check

# Nothing beyond this may be in a sandbox's bounding set (bit numbers of linux/capability.h).
_ALLOWED_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
_SYSCALLS = {
    "x86_64": {"mount": 165, "unshare": 272, "setns": 308, "bpf": 321, "keyctl": 250, "add_key": 248,
               "userfaultfd": 323, "perf_event_open": 298, "io_uring_setup": 425, "kexec_load": 246,
               "init_module": 175, "open_by_handle_at": 304, "fsopen": 430, "pivot_root": 155, "swapon": 167},
    "aarch64": {"mount": 40, "unshare": 97, "setns": 268, "bpf": 280, "keyctl": 219, "add_key": 217,
                "userfaultfd": 282, "perf_event_open": 241, "io_uring_setup": 425, "kexec_load": 104,
                "init_module": 105, "open_by_handle_at": 265, "fsopen": 430, "pivot_root": 41, "swapon": 224},
}  # fmt: skip


@check("the hostname is the sandbox's own")
async def _hostname(kit: Kit) -> None:
    other = await kit.make(hostname="other-name")
    expect(await kit.output("uname -n; cat /etc/hostname") == "sandbox\nsandbox", "wrong name")
    expect(await kit.output("uname -n", agent=other.agent) == "other-name", "wrong name of another")


@check("the agent is PID 1 and no process of the host is seen")
async def _processes(kit: Kit) -> None:
    expect(await kit.output("tr '\\0' ' ' < /proc/1/cmdline | grep -c agent") == "1", "PID 1 is not the agent")
    pids = [int(pid) for pid in (await kit.output("ls /proc | grep '^[0-9]'")).split()]
    if kit.runtime.capabilities.own_kernel:
        return  # its threads have numbers of their own
    expect(len(pids) < 40 and os.getpid() not in pids, f"{len(pids)} processes are seen")


@check("two sandboxes share no processes, files, shared memory or IPC")
async def _two(kit: Kit) -> None:
    other = await kit.make()
    made = "echo secret > /tmp/mine; echo secret > /dev/shm/mine; sleep 7654 & disown"
    await kit.output(made)
    await kit.python("import ctypes; assert ctypes.CDLL(None).shmget(4242, 4096, 0o1666) >= 0")
    script = "cat /proc/[0-9]*/cmdline | grep -c '[7]654'; ls /tmp/mine /dev/shm/mine 2>/dev/null | wc -l"
    expect((await kit.run(script, agent=other.agent)).text.split() == ["0", "0"], "one sees the other's")
    shared = "import ctypes; print(ctypes.CDLL(None).shmget(4242, 4096, 0o666))"
    expect(await kit.python(shared, agent=other.agent) == "-1", "shared memory is shared")
    if kit.runtime.capabilities.own_kernel:
        return  # whose threads are something to kill, to anybody
    expect((await kit.run("kill -0 -1", agent=other.agent, user="user")).status.code != 0, "something to kill")


@check("nothing outside is reached unless it is allowed")
async def _no_network(kit: Kit) -> None:
    if kit.sandbox.spec.network is None:
        expect(await kit.output("ls /sys/class/net") == "lo", "more than lo")
    for target in ("1.1.1.1", "169.254.169.254", "10.0.0.1"):
        source = (
            "import socket,time\nbegan=time.time()\ns=socket.socket(); s.settimeout(3)\n"
            f"try: s.connect(('{target}',80)); s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n'); s.recv(1); print('open')\n"
            "except OSError as e: print('closed' if time.time()-began<2 else 'slow')"
        )
        got = await kit.python(source)
        expect(got == "closed", f"{target} is {got}")
    ran = await kit.run("getent hosts example.com", timeout=8)
    expect(ran.status.code != 0, "a name was resolved")


@check("a port inside is reached through the agent")
async def _port(kit: Kit) -> None:
    await refused(kit.agent.connect_port(4711), GuestErrorCode.REFUSED)
    for host, family, port in (("127.0.0.1", "AF_INET", 4712), ("::1", "AF_INET6", 4713)):
        source = (
            f"import socket\ns=socket.socket(socket.{family}); s.bind(('{host}',{port})); s.listen()\n"
            "print('up',flush=True)\nc,_=s.accept()\ndata=b''\n"
            "while True:\n b=c.recv(65536)\n if not b: break\n data+=b\n"
            "c.sendall(b'got %d '%len(data)+data[:5]); c.close()"
        )
        process = await kit.start(["python3", "-c", source])
        await read_until(process, b"up")
        stream = await kit.agent.connect_port(port)
        await stream.write(b"hello" + bytes(200_000))
        await stream.write_eof()
        answer = await _all(stream)
        await stream.close()
        expect(answer == b"got 200005 hello", f"{host} answered {answer!r}")
        await process.wait()


async def _all(stream: PortStream) -> bytes:
    data = b""
    async with asyncio.timeout(patience(10)):
        while chunk := await stream.read():
            data += chunk
    return data


@check("its kernel is its own: what root sets there is not set on the host", needs="own_kernel")
async def _own_kernel(kit: Kit) -> None:
    def host(name: str) -> str:
        return Path("/proc/sys/kernel", name).read_text().strip()

    mine, before = await asyncio.to_thread(host, "random/boot_id"), await asyncio.to_thread(host, "panic")
    expect(await kit.output("cat /proc/sys/kernel/random/boot_id") != mine, "the boot id is the host's")
    await kit.output("echo 77 > /proc/sys/kernel/panic")
    expect(await asyncio.to_thread(host, "panic") == before, "a setting of the host was written")


@check("an unprivileged user may listen on port 80")
async def _low_port(kit: Kit) -> None:
    await kit.python("import socket; s=socket.socket(); s.bind(('127.0.0.1',80)); s.listen()", user="user")


@check("root inside is nobody outside", needs="shared_kernel")
async def _user_namespace(kit: Kit) -> None:
    inside, outside, count = map(int, (await kit.output("cat /proc/self/uid_map")).splitlines()[0].split())
    expect(inside == 0 and outside >= 65536 and count <= 65536, f"uid map {inside} {outside} {count}")
    ran = await kit.run("echo 1 > /proc/sys/kernel/panic; echo b > /proc/sysrq-trigger")
    expect(ran.status.code != 0, "a setting of the host was written")


@check("capabilities are the declared few", needs="shared_kernel")
async def _capabilities(kit: Kit) -> None:
    fields = "awk '/^Cap(Eff|Bnd|Amb|Inh)/{print $1$2}' /proc/self/status"
    root = dict(line.split(":") for line in (await kit.output(fields)).splitlines())
    for name in ("CapEff", "CapBnd"):
        bits = {bit for bit in range(64) if int(root[name], 16) >> bit & 1}
        expect(bits <= _ALLOWED_CAPABILITIES, f"{name} has {sorted(bits - _ALLOWED_CAPABILITIES)}")
    user = dict(line.split(":") for line in (await kit.output(fields, user="user")).splitlines())
    expect(int(user["CapEff"], 16) == 0 and int(user["CapAmb"], 16) == 0, f"user has {user}")


@check("masked paths show nothing", needs="shared_kernel")
async def _masked(kit: Kit) -> None:
    got = await kit.output(
        "head -c 10 /proc/kcore 2>/dev/null | wc -c; ls /sys/firmware | wc -l; cat /proc/keys | wc -c"
    )
    expect(got.split() == ["0", "0", "0"], f"sizes {got.split()}")
    for path in ("/proc/sys/vm/overcommit_memory", "/sys/kernel/profiling", "/proc/sys/kernel/core_pattern"):
        ran = await kit.run(f"echo 1 > {path}")
        expect(ran.status.code != 0, f"{path} can be written")


@check("nothing can be mounted or unmounted", needs="shared_kernel")
async def _mount(kit: Kit) -> None:
    for command in (
        "mount -t tmpfs none /mnt",
        "umount -l /proc",
        "mount --bind /etc /mnt",
        "mount -o remount,rw /sys",
    ):
        ran = await kit.run(command)
        expect(ran.status.code != 0, f"{command} worked")


@check("no new namespace can be made", needs="shared_kernel")
async def _unshare(kit: Kit) -> None:
    for user in (None, "user"):
        ran = await kit.run("unshare -Ur true || unshare -m true || unshare -n true", user=user)
        expect(ran.status.code != 0, f"unshare worked for {user or 'root'}")


@check("dangerous system calls are refused", needs="shared_kernel")
async def _seccomp(kit: Kit) -> None:
    expect(await kit.output("awk '/^Seccomp:/{print $2}' /proc/self/status") == "2", "no filter is active")
    table = _SYSCALLS.get(platform.machine(), {})
    source = (
        "import ctypes\nlibc=ctypes.CDLL(None,use_errno=True)\n"
        f"for name,number in {table!r}.items():\n"
        " libc.syscall(number,0,0,0,0,0)\n e=ctypes.get_errno()\n if e not in (1,38): print(name,e)\n"
        "print(libc.syscall(435,0,0),ctypes.get_errno())"
    )
    expect(await kit.python(source) == "-1 38", "not EPERM (clone3: not ENOSYS)")
    source = "import socket\ntry: socket.socket(40,1); print('open')\nexcept OSError as e: print(e.errno)"
    expect(await kit.python(source) in ("1", "97"), "a vsock socket was made")


@check("a debugger works on the sandbox's own processes")
async def _ptrace(kit: Kit) -> None:
    source = (
        "import ctypes,os,signal\nlibc=ctypes.CDLL(None,use_errno=True)\npid=os.fork()\n"
        "if pid==0:\n signal.pause()\n"
        "print(libc.ptrace(16,pid,0,0)); os.kill(pid,9)"
    )
    expect(await kit.python(source, user="user") == "0", "PTRACE_ATTACH was refused")


@check("the agent cannot be traced, read or replaced", needs="shared_kernel")
async def _agent_sealed(kit: Kit) -> None:
    source = (
        "import ctypes\nlibc=ctypes.CDLL(None,use_errno=True)\nassert libc.ptrace(16,1,0,0)==-1\n"
        "for path in ('mem','environ','maps','fd/3','root/etc/passwd','exe'):\n"
        " try: open('/proc/1/'+path,'rb').read(1); print(path)\n"
        " except OSError: pass"
    )
    for user in (None, "user"):
        expect(await kit.python(source, user=user) == "", "something of PID 1 can be read")
    ran = await kit.run(
        "for f in $(find /dev -name '.*agent*'); do echo x > $f && exit 0; rm -f $f && exit 0; done; exit 1"
    )
    expect(ran.status.code == 1, "the agent's file can be changed")


@check("the agent survives every signal from inside")
async def _agent_signals(kit: Kit) -> None:
    for number in (1, 2, 3, 6, 9, 11, 15, 19, 20, 10, 12, 17, 31):
        await kit.run(f"kill -{number} 1")
    await kit.run("kill -9 -1 & sleep 0.2", user="user")
    await asyncio.sleep(0.2)
    async with asyncio.timeout(patience(5)):
        await kit.agent.hello()
    expect(await kit.output("echo alive") == "alive", "no command runs any more")


@check("the agent survives root killing everything", own=True)
async def _agent_kill_all(kit: Kit) -> None:
    await kit.run("kill -9 -1")
    expect(await kit.output("echo alive") == "alive", "no command runs any more")


@check("sudo works without a password and root is only root inside")
async def _sudo(kit: Kit) -> None:
    ran = await kit.run("sudo -n id -u; sudo -n -u user id -un", user="user")
    expect(ran.text.split() == ["0", "user"] and ran.stderr == b"", f"gave {ran.stdout!r}, {ran.stderr!r}")
    if kit.runtime.capabilities.shared_kernel:
        ran = await kit.run("sudo -n mount -t tmpfs none /mnt", user="user")
        expect(ran.status.code != 0, "sudo could mount")


@check("the user cannot do what root can")
async def _permissions(kit: Kit) -> None:
    ran = await kit.run("echo x > /etc/passwd; cat /etc/shadow", user="user")
    expect(ran.stdout == b"" and ran.status.code != 0, f"got {ran.stdout[:60]!r}")


@check("the clock is the host's")
async def _clock(kit: Kit) -> None:
    inside = float(await kit.output("date +%s.%N"))
    expect(abs(inside - time.time()) < 2, f"off by {inside - time.time():.1f} s")
    if kit.runtime.capabilities.own_kernel:
        return
    ran = await kit.run("date -s '2001-01-01'")
    expect(time.time() > 1_500_000_000 and ran.status.code != 0, "the clock could be set")


@check("an idle sandbox uses no CPU")
async def _idle(kit: Kit) -> None:
    quiet = await kit.make()
    await asyncio.sleep(patience(0.3))  # a kernel of its own has things to finish after its boot
    used: list[float] = []
    while len(used) < 3 and min(used, default=1.0) >= patience(0.002):  # what others do on the host counts a little
        before = (await quiet.usage()).cpu_seconds
        await asyncio.sleep(1.5)
        used.append((await quiet.usage()).cpu_seconds - before)
    expect(min(used) < patience(0.002), f"{min(used) * 1000:.1f} ms of CPU in 1.5 s")


@check("stopped processes can be killed")
async def _stopped(kit: Kit) -> None:
    process = await kit.start("kill -STOP $$; sleep 60")
    await asyncio.sleep(0.1)
    await process.signal(signal.SIGKILL)
    async with asyncio.timeout(patience(5)):
        expect((await process.wait()).signal == signal.SIGKILL, "not killed")

    async def quiet() -> bool:
        return process.pid not in await kit.agent.processes()

    await eventually(quiet, "the agent still lists it")
