"""Programs that want out of their session, or to spoil it for others: what each of them gets."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import time
from pathlib import Path

import pytest

from sandyard.envs.process import filter as seccomp
from sandyard.envs.process.limits import SessionLimits
from sandyard.envs.process.plan import find_interpreter
from sandyard.envs.process.server import SessionServer
from sandyard.envs.process.session import ProcessSession
from sandyard.runtimes.container.seccomp import ALLOWED

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    ctypes.set_errno(0)
    result = getattr(libc, name)(*arguments)
    print(name, errno.errorcode.get(ctypes.get_errno(), result) if result < 0 else 'DONE')
"""
# Each a library call that must fail, and how.
REFUSED = [
    ("mount(b'none', b'/tmp', b'tmpfs', 0, None)", "EPERM"),
    ("mount(b'/', b'/tmp', None, 4096, None)", "EPERM"),
    ("umount2(b'/proc', 2)", "EPERM"),
    ("umount2(b'/tmp', 2)", "EPERM"),
    ("unshare(0x10000000)", "EPERM"),  # a user namespace, where it would be root
    ("unshare(0x40000000)", "EPERM"),
    ("chroot(b'/tmp')", "EPERM"),
    ("ptrace(16, 1, 0, 0)", "EPERM"),
    ("ptrace(0, 0, 0, 0)", "EPERM"),
    ("syscall(250, 0, 0, 0)", "EPERM"),  # keyctl
    ("syscall(248, b'user', b'a', b'b', 1, -3)", "EPERM"),  # add_key
    ("syscall(321, 0, 0, 0)", "EPERM"),  # bpf
    ("syscall(298, 0, 0, 0, 0, 0)", "EPERM"),  # perf_event_open
    ("syscall(425, 1, 0)", "EPERM"),  # io_uring_setup
    ("syscall(323, 0)", "EPERM"),  # userfaultfd
    ("syscall(310, 1, 0, 0, 0, 0, 0)", "EPERM"),  # process_vm_readv
    ("syscall(304, -1, 0, 0)", "EPERM"),  # open_by_handle_at
    ("syscall(435, 0, 0)", "ENOSYS"),  # clone3
    ("syscall(56, 0x10000011, 0, 0, 0, 0)", "EPERM"),  # clone into a user namespace
    ("setns(0, 0)", "EPERM"),
    ("mknod(b'/tmp/disk', 0o60666, 0x800)", "EPERM"),
    ("setuid(0)", "EINVAL"),  # there is no such user in the namespace
    ("setgroups(0, None)", "EPERM"),
    ("sethostname(b'mine', 4)", "EPERM"),
    ("reboot(0x1234567)", "EPERM"),
    ("swapon(b'/tmp/a', 0)", "EPERM"),
    ("syscall(164, 0, 0)", "EPERM"),  # settimeofday
    ("setrlimit(7, (ctypes.c_ulong * 2)(100000, 100000))", "EPERM"),
    ("kill(1, 9)", "EPERM"),  # it has another user id
]

HERE = str(Path(__file__).resolve())


async def said(session: ProcessSession, code: str) -> str:
    return (await session.run(code, 30)).stdout.strip()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its numbers of system calls are those of x86_64")
async def test_calls_that_lead_out_are_refused(session: ProcessSession) -> None:
    calls = "".join(f"call('{name}', {rest}\n" for name, rest in (call.split("(", 1) for call, _ in REFUSED))
    answers = (await said(session, CALL + calls)).splitlines()
    assert answers == [f"{call.split('(')[0]} {how}" for call, how in REFUSED]
    assert session.alive


async def test_the_files_of_the_host_are_not_there(session: ProcessSession, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    paths = ["/root/.ssh", "/etc/shadow", "/var", "/home", "/work", "/sys", "/run", "/bin", "/boot"]
    paths += [HERE, str(tmp_path / "secret"), "/proc/sys", "/proc/kcore", "/proc/keys"]
    code = f"import os\nprint([p for p in {paths!r} if os.path.exists(p)])\nprint(sorted(os.listdir('/')))"
    seen, root = (await said(session, code)).splitlines()
    assert seen == "[]"
    programs = "import os\nprint(sorted(os.listdir('/usr/bin')) if os.path.isdir('/usr/bin') else [])"
    assert await said(session, programs) in ("[]", str([Path(find_interpreter().program).name]))
    assert set(root[2:-2].split("', '")) <= {"dev", "etc", "lib", "lib64", "opt", "proc", "root", "tmp", "usr", "work"}
    foreign = """
import os
for where, directories, files in os.walk('/'):
    directories[:] = [name for name in directories if where != '/' or name != 'proc']
    if where.endswith('-packages') and (directories or files) or 'sandyard' in ' '.join(directories + files):
        print('found', where)
print('looked')
"""
    assert await said(session, foreign) == "looked"
    assert "sandyard" not in await said(session, "import sys\nprint(list(sys.modules), sys.path)")
    assert await said(session, "import os\nprint(sorted(os.environ))") == "['HOME', 'LANG', 'MALLOC_ARENA_MAX', 'PATH']"


async def test_nothing_but_tmp_can_be_written(session: ProcessSession) -> None:
    code = """
import os
written = []
for where, _, _ in os.walk('/'):
    if where.startswith('/proc') or where.startswith('/tmp') or where == '/dev/shm':
        continue
    try:
        open(where + '/mine', 'w').close()
        written.append(where)
    except OSError:
        pass
print(written)
for name in ('/usr/lib', '/dev/null', '/etc/passwd', os.__file__):
    try: os.chmod(name, 0o777); print('changed', name)
    except OSError: pass
"""
    assert await said(session, code) == "[]"


async def test_the_processes_of_others_cannot_be_reached(server: SessionServer, session: ProcessSession) -> None:
    other = await server.open()
    await other.run("secret = 'abc' * 3")
    pids = await said(session, "import os\nprint([p for p in os.listdir('/proc') if p.isdigit()])")
    assert pids == "['1', '2']"
    reach = """
import signal
for pid in [*range(3, 400), 0x7fff]:
    try: os.kill(pid, 0); print('reached', pid)
    except (ProcessLookupError, PermissionError): pass
try: os.kill(-1, signal.SIGKILL)
except ProcessLookupError: pass
print(os.getppid())
"""
    assert await said(session, reach) == "0"
    assert await said(other, "print(secret)") == "abcabcabc"
    assert "Permission" in (await session.run("open('/proc/1/mem', 'rb').read(1)", 30)).stderr


async def test_there_is_no_network(session: ProcessSession) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"""
import socket
for host in ('127.0.0.1', '1.1.1.1', '169.254.169.254', '10.0.0.1', '::1', 'fe80::1'):
    try: socket.create_connection((host, {port}), 1); print('connected', host)
    except OSError: pass
for family in (16, 17, 40, 38):
    try: socket.socket(family, socket.SOCK_RAW); print('socket', family)
    except OSError: pass
print('none')
"""
        assert await said(session, code) == "none"
    abstract = socket.socket(socket.AF_UNIX)
    with abstract:
        abstract.bind("\0sandyard-test-of-escapes")
        abstract.listen()
        result = await session.run("socket.socket(socket.AF_UNIX).connect('\\0sandyard-test-of-escapes')", 30)
        assert "ConnectionRefusedError" in result.stderr


async def test_a_fork_storm_ends_at_its_bound(server: SessionServer, session: ProcessSession) -> None:
    storm = """
import os, time
children = 0
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(60); os._exit(0)
        children += 1
    except BlockingIOError:
        pass
print(children)
"""
    started = int(await said(session, storm))
    assert 10 <= started < server.limits.processes
    threads = "import threading\ntry:\n  for _ in range(200): threading.Thread(target=time.sleep, args=(60,)).start()\n"
    assert "can't start new thread" in await said(session, threads + "except RuntimeError as error: print(error)")
    other = await server.open()
    assert await said(other, "print(1)") == "1"
    await session.close()
    assert server.live == 1


async def test_tmp_fills_and_nothing_else(session: ProcessSession) -> None:
    fill = """
import os
written = 0
try:
    for number in range(64):
        with open(f'/tmp/{number}', 'wb') as file:
            written += file.write(b'x' * (1 << 20))
except OSError as error:
    print(error.strerror)
print(written <= 8 << 20)
try:
    for number in range(50_000): open(f'/tmp/e{number}', 'w').close()
except OSError as error:
    print(error.strerror)
"""
    assert (await said(session, fill)).splitlines() == ["No space left on device", "True", "No space left on device"]
    assert await said(session, "print(1)") == "1"
    assert "File too large" in await said(
        session,
        "os.unlink('/tmp/0')\ntry: open('/tmp/b', 'wb').truncate(1 << 40)\nexcept OSError as e: print(e.strerror)",
    )


async def test_programs_that_would_give_privileges_do_not(session: ProcessSession) -> None:
    code = """
import os, shutil, subprocess, sys
copy = shutil.copy(sys.executable, '/tmp/python')
os.chmod(copy, 0o6755)
done = subprocess.run([copy, '-c', 'import os; print(os.geteuid())'], capture_output=True, text=True)
print(done.stdout.strip())
paths = [w + '/' + f for w, _, fs in os.walk('/') for f in fs if not w.startswith(('/proc', '/tmp', '/dev'))]
marked = [path for path in paths if os.path.isfile(path) and os.stat(path).st_mode & 0o6000]
print([path for path in marked if not os.statvfs(path).f_flag & os.ST_NOSUID])
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
print([status[name].strip() for name in ('CapEff', 'CapBnd', 'NoNewPrivs', 'Seccomp')])
"""
    result = await session.run(code, 30)
    assert result.stdout.splitlines() == ["1000", "[]", str(["0" * 16, "0" * 16, "1", "2"])], result


async def test_the_user_ids_are_nobodys_and_differ(server: SessionServer) -> None:
    sessions = [await server.open() for _ in range(3)]
    maps = {await said(session, "print(open('/proc/self/uid_map').read())") for session in sessions}
    assert len(maps) == 3
    assert all(int(line.split()[1]) > 1_000_000 for line in maps)
    for session in sessions:
        write = "import os; os.write(os.open('/proc/self/uid_map', os.O_WRONLY), b'0 0 1')"
        assert "PermissionError" in (await session.run(write, 30)).stderr


async def test_memory_of_all_its_processes_is_bounded(server: SessionServer) -> None:
    """Files in memory count, too."""
    assert server.limits.memory_mb == 256
    session = await server.open()
    hoard = """
import os
kept = []
for _ in range(40):
    fd = os.memfd_create('x'); kept.append(fd)
    for _ in range(4): os.write(fd, b'x' * (2 << 20))
print('kept', len(kept))
"""
    result = await session.run(hoard, 30)
    assert result.state_lost, result
    assert "out of memory" in result.ending


async def test_a_stopped_or_deaf_session_still_goes(server: SessionServer) -> None:
    deaf = "import signal, os\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
    deaf += "  except (OSError, ValueError): pass\n"
    for code in ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", deaf + "while True: pass"):
        session = await server.open()
        started = time.monotonic()
        result = await session.run(code, 0.3)
        assert (result.timed_out, result.state_lost) == (True, True)
        assert time.monotonic() - started < 20
    assert server.live == 0


async def test_descriptors_of_the_host_are_not_inherited() -> None:
    secret = os.open(os.devnull, os.O_RDONLY)
    try:
        os.set_inheritable(secret, True)
        async with SessionServer(SessionLimits(memory_mb=256)) as server, await server.open() as session:
            links = await said(session, "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd')))")
            assert len(links.split(",")) == 5, links  # standard ones, the link, and the listing itself
    finally:
        os.close(secret)


async def test_many_at_once_do_not_hold_up_each_other(server: SessionServer) -> None:
    sessions = await asyncio.gather(*(server.open() for _ in range(8)))
    spinning = [asyncio.ensure_future(session.run("while True: pass", 2)) for session in sessions[:4]]
    assert [await said(session, "print(7)") for session in sessions[4:]] == ["7"] * 4
    assert all(result.timed_out and not result.state_lost for result in await asyncio.gather(*spinning))


def test_the_filter_allows_nothing_that_a_container_is_refused() -> None:
    for machine in ("x86_64", "aarch64"):
        calls = seccomp.allowed(machine)
        assert set(calls) <= set(ALLOWED)
        assert len(set(calls.values())) == len(calls)
        assert not {"ptrace", "mount", "unshare", "setns", "keyctl", "bpf", "clone", "socket", "chroot"} & set(calls)
        program = seccomp.program(machine)
        assert len(program) % 8 == 0
        assert len(program) // 8 < 4096
