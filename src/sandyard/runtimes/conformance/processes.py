"""Checks of commands: output, input, ends, signals, terminals."""

from __future__ import annotations

import asyncio
import hashlib
import resource
import signal
import time

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest.base import ProcessSpec, PtySize
from sandyard.runtimes.conformance.kit import Kit, collect, eventually, expect, patience, read_until, refused
from sandyard.runtimes.conformance.runner import check

MIB = 1 << 20


@check("an exit code is told")
async def _exit_code(kit: Kit) -> None:
    for code in (0, 7, 255):
        ran = await kit.run(f"exit {code}")
        expect(ran.status.code == code and ran.status.signal is None, f"exit {code} gave {ran.status}")


@check("a death by signal is told")
async def _exit_signal(kit: Kit) -> None:
    ran = await kit.run("kill -TERM $$; sleep 5")
    expect(ran.status.signal == signal.SIGTERM and ran.status.code is None, f"gave {ran.status}")


@check("stdout and stderr are apart")
async def _channels(kit: Kit) -> None:
    ran = await kit.run("echo out; echo err >&2")
    expect((ran.stdout, ran.stderr) == (b"out\n", b"err\n"), f"got {ran.stdout!r} and {ran.stderr!r}")


@check("UTF-8 split across chunks arrives whole")
async def _split_utf8(kit: Kit) -> None:
    source = (
        "import os,time\nfor byte in '€é😀'.encode():\n os.write(1,bytes([byte])); time.sleep(0.01)\n"
        "data='€'.encode()*100001\nat=0\nwhile at<len(data): at+=os.write(1,data[at:at+65536])"
    )
    ran = await kit.run(["python3", "-c", source])
    expect(ran.stdout.decode() == "€é😀" + "€" * 100001, f"{len(ran.stdout)} bytes came, or others")


@check("output that is not UTF-8 is kept")
async def _not_utf8(kit: Kit) -> None:
    ran = await kit.run(["python3", "-c", "import os; os.write(1, bytes(range(128, 256)) * 3)"])
    expect(ran.stdout == bytes(range(128, 256)) * 3, f"got {ran.stdout[:40]!r}")


@check("null bytes in output are kept")
async def _nulls(kit: Kit) -> None:
    ran = await kit.run(r"printf 'a\0b\0\0c'")
    expect(ran.stdout == b"a\0b\0\0c", f"got {ran.stdout!r}")


@check("100 MB of output in bounded memory")
async def _flood(kit: Kit) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    process = await kit.start("head -c 100000000 /dev/zero")
    count = 0
    async for _, data in process.output():
        count += len(data)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    expect(count == 100_000_000, f"{count} bytes came")
    expect(grown < 32, f"the host side grew by {grown} MiB")
    expect((await process.wait()).code == 0, "head failed")


@check("a slow reader holds the writer back")
async def _back_pressure(kit: Kit) -> None:
    process = await kit.start(f"head -c {8 * MIB} /dev/zero")
    await asyncio.sleep(0.3)
    expect(process.pid in await kit.agent.processes(), "8 MiB were swallowed while nobody read")
    out, _ = await collect(process)
    expect(len(out) == 8 * MIB, f"{len(out)} bytes came")


@check("cat without stdin returns at once")
async def _no_stdin(kit: Kit) -> None:
    ran = await kit.run("cat", timeout=5)
    expect(ran.stdout == b"" and ran.status.code == 0, f"gave {ran}")


@check("stdin streams while output comes")
async def _stdin(kit: Kit) -> None:
    process = await kit.start(["cat"], stdin=True)
    for word in (b"one\n", b"two\n"):
        await process.write_stdin(word)
    await process.close_stdin()
    out, _ = await collect(process)
    expect(out == b"one\ntwo\n", f"got {out!r}")
    await refused(process.write_stdin(b"late"), GuestErrorCode.INVALID, GuestErrorCode.NOT_FOUND)


@check("4 MiB through stdin and back is intact")
async def _stdin_big(kit: Kit) -> None:
    data = bytes(range(256)) * (4 * MIB // 256)
    ran = await kit.run(["cat"], stdin=data)
    expect(hashlib.sha256(ran.stdout).digest() == hashlib.sha256(data).digest(), f"{len(ran.stdout)} bytes came back")


@check("a timeout kills the whole tree and keeps partial output")
async def _kill_tree(kit: Kit) -> None:
    python = "import os,time\nif os.fork()==0:\n os.setsid(); time.sleep(98763)\ntime.sleep(98764)"
    script = f"setsid sleep 98761 & (sleep 98762 &) ; python3 -c '{python}' & echo partial; sleep 98765"
    process = await kit.start(script)
    seen = await read_until(process, b"partial")
    await asyncio.sleep(0.3)
    await process.signal(signal.SIGKILL)
    async with asyncio.timeout(patience(5)):
        status = await process.wait()
    expect(seen == b"partial\n" and status.signal == signal.SIGKILL, f"got {seen!r} and {status}")

    async def gone() -> bool:
        return (await kit.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[9]876[1-5]'")).text == "0"

    await eventually(gone, "something of the command lives on", 3.0)


@check("a background child does not hang a command")
async def _background(kit: Kit) -> None:
    ran = await kit.run("sleep 4.321 & echo done", timeout=4)
    expect(ran.stdout == b"done\n" and ran.seconds < patience(2), f"took {ran.seconds:.1f} s and gave {ran.stdout!r}")
    alive = await kit.output("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[4].321'")
    expect(alive == "1", "the child was killed")


@check("zombies are reaped")
async def _zombies(kit: Kit) -> None:
    await kit.python(
        "import os\nfor i in range(50):\n if os.fork()==0:\n  if os.fork()==0: os._exit(0)\n  os._exit(0)\n"
    )

    async def none_left() -> bool:
        return (await kit.run("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l")).text == "0"

    await eventually(none_left, "zombies stay")


@check("a 1 MiB argument is refused or passed, never truncated")
async def _huge_argument(kit: Kit) -> None:
    try:
        ran = await kit.run(["bash", "-c", 'printf %s "$1" | wc -c', "x", "a" * MIB])
    except GuestError as error:
        expect(error.code is GuestErrorCode.TOO_BIG, f"refused as {error.code}")
    else:
        expect(ran.text == str(MIB), f"{ran.text} of {MIB} bytes arrived")


@check("a 100 KiB argument arrives whole")
async def _big_argument(kit: Kit) -> None:
    argument = "é" * (50 << 10)
    ran = await kit.run(["printf", "%s", argument])
    expect(ran.stdout.decode() == argument, f"{len(ran.stdout)} bytes arrived")


@check("5000 arguments arrive in order")
async def _many_arguments(kit: Kit) -> None:
    words = [f"word-{n}" for n in range(5000)]
    ran = await kit.run(["printf", "%s\\n", *words])
    expect(ran.text.split() == words, "other words arrived")


@check("odd arguments arrive as they are")
async def _odd_arguments(kit: Kit) -> None:
    words = ["", " ", "a\nb", "'\"$(id)`id`;\\", "-n", "*", "\udcff\udcfe", "😀"]
    ran = await kit.run(["python3", "-c", "import sys; print(ascii(sys.argv[1:]))", *words])
    expect(ran.text == ascii(words), f"got {ran.text}")


@check("the environment is what was asked, over sane defaults")
async def _environment(kit: Kit) -> None:
    ran = await kit.run("env -0", user="user", env={"ODD": "a b\n=c'", "EMPTY": ""})
    got = dict(item.split("=", 1) for item in ran.stdout.decode().split("\0") if "=" in item)
    wanted = {"ODD": "a b\n=c'", "EMPTY": "", "HOME": "/home/user", "USER": "user", "LANG": "C.UTF-8"}
    expect(all(got.get(name) == value for name, value in wanted.items()), f"got {got}")
    expect("/usr/bin" in got.get("PATH", "") and got.get("SHELL") == "/bin/bash", f"got {got}")


@check("locale is UTF-8")
async def _locale(kit: Kit) -> None:
    got = await kit.python("import sys,locale; print(sys.stdout.encoding, locale.getpreferredencoding(), 'é')")
    expect(got.lower() == "utf-8 utf-8 é", f"got {got}")


@check("commands run as the user asked for")
async def _users(kit: Kit) -> None:
    for user, wanted in ((None, "0 0"), ("user", "1000 1000"), ("1000", "1000 1000"), ("7:8", "7 8")):
        got = await kit.output("echo $(id -u) $(id -g)", user=user)
        expect(got == wanted, f"user {user} ran as {got}")


@check("a missing user is refused")
async def _no_user(kit: Kit) -> None:
    await refused(kit.start("true", user="nobody-of-that-name"), GuestErrorCode.NO_USER)


@check("the working directory is what was asked, else the home")
async def _cwd(kit: Kit) -> None:
    for cwd, wanted in (("/usr/lib", "/usr/lib"), (None, "/home/user")):
        ran = await kit.run("pwd", cwd=cwd, user="user")
        expect(ran.text == wanted, f"cwd {cwd} became {ran.text}")


@check("a missing working directory is refused")
async def _no_cwd(kit: Kit) -> None:
    for cwd in ("/does/not/exist", "/etc/passwd"):
        await refused(kit.start("true", cwd=cwd), GuestErrorCode.NO_CWD)


@check("a missing command and one that may not run are told apart")
async def _no_command(kit: Kit) -> None:
    await refused(kit.start(["no-such-command"]), GuestErrorCode.NOT_FOUND)
    await refused(kit.start(["/no/such/command"]), GuestErrorCode.NOT_FOUND)
    await refused(kit.start(["/etc/passwd"]), GuestErrorCode.PERMISSION)


@check("a signal reaches a handler")
async def _signal(kit: Kit) -> None:
    process = await kit.start("trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done")
    seen = bytearray()
    async with asyncio.timeout(patience(10)):
        async for _, data in process.output():
            seen += data
            if seen == b"ready\n":
                await process.signal(signal.SIGTERM, group=False)
    status = await process.wait()
    expect(seen == b"ready\ncaught\n" and status.code == 3, f"got {bytes(seen)!r} and {status}")


@check("signals start at their defaults")
async def _signal_defaults(kit: Kit) -> None:
    got = await kit.output("grep -E '^Sig(Blk|Ign)' /proc/self/status | awk '{print $2}' | sort -u")
    expect(got == "0000000000000000", f"blocked or ignored: {got}")


@check("commands get no descriptor but their own three")
async def _descriptors(kit: Kit) -> None:
    got = await kit.output(["python3", "-c", "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"])
    expect(got == "[0, 1, 2]", f"open: {got}")


@check("fifty commands at once")
async def _many(kit: Kit) -> None:
    ran = await asyncio.gather(*(kit.run(f"sleep 0.05; echo {n}") for n in range(50)))
    expect([each.text for each in ran] == [str(n) for n in range(50)], "outputs were mixed up")


@check("a PTY echoes, has its size and resizes")
async def _pty(kit: Kit) -> None:
    script = "trap 'stty size; exit 0' WINCH; stty size; read word; echo got:$word; while :; do sleep 0.05; done"
    process = await kit.start(script, pty=PtySize(rows=30, cols=100), env={"TERM": "xterm-256color"})
    seen = bytearray()
    async with asyncio.timeout(patience(10)):
        async for _, data in process.output():
            fresh = bytes(seen)
            seen += data
            if b"30 100" in seen and b"30 100" not in fresh:
                await process.write_stdin(b"hello\n")
            if b"got:hello" in seen and b"got:hello" not in fresh:
                await process.resize(PtySize(rows=40, cols=120))
    expect(seen.count(b"hello") == 2, f"no echo: {bytes(seen)!r}")
    expect(b"40 120" in seen, f"no resize: {bytes(seen)!r}")


@check("Ctrl-C on a PTY interrupts")
async def _interrupt(kit: Kit) -> None:
    process = await kit.start("echo ready; exec sleep 60", pty=PtySize(24, 80))
    began = time.monotonic()
    async with asyncio.timeout(patience(10)):
        async for _, data in process.output():
            if b"ready" in data:
                await asyncio.sleep(0.1)
                await process.write_stdin(b"\x03")
        status = await process.wait()
    expect(status.signal == signal.SIGINT and time.monotonic() - began < patience(5), f"gave {status}")


@check("a process outlives its link and can be attached")
async def _reconnect(kit: Kit) -> None:
    process = await kit.start("while :; do echo tick; sleep 0.05; done")
    await kit.agent.close()
    again = await kit.runtime.adopt(kit.sandbox.spec.sandbox_id)
    expect(again is not None, "the sandbox could not be adopted")
    if again is None:
        return
    kit.sandbox = again
    expect(process.pid in await again.agent.processes(), "the process is gone")
    attached = await again.agent.attach(process.pid)
    await read_until(attached, b"tick")
    await attached.signal(signal.SIGKILL)
    expect((await attached.wait()).signal == signal.SIGKILL, "the attached process did not die")


@check("a spawn that cannot be is not half done")
async def _bad_spawn(kit: Kit) -> None:
    async def processes() -> int:
        return int(await kit.output("ls /proc | grep -c '^[0-9]'"))

    async def none_more() -> bool:
        return await processes() <= before

    before = await processes()
    for _ in range(20):
        await refused(kit.agent.spawn(ProcessSpec(["no-such-command"])), GuestErrorCode.NOT_FOUND)
    # Not at once: the counting shell of a moment ago may not have been reaped yet.
    await eventually(none_more, f"no more than {before} processes")
