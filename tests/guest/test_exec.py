# ruff: noqa: ASYNC240 - the test and the agent share one machine; nothing else waits
from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest import Channel, ExitStatus, LinkAgent, ProcessSpec, PtySize
from tests.guest.conftest import RunningAgent, collect, eventually, needs_root, start_agent


def sh(script: str, **more: object) -> ProcessSpec:
    return ProcessSpec(["sh", "-c", script], **more)  # type: ignore[arg-type]


async def run(agent: LinkAgent, spec: ProcessSpec) -> tuple[dict[str, bytes], ExitStatus]:
    process = await agent.spawn(spec)
    return await collect(process), await process.wait()


async def test_output_and_exit_code(agent: LinkAgent) -> None:
    output, status = await run(agent, sh("echo out; echo err >&2; exit 3"))
    assert output == {Channel.STDOUT: b"out\n", Channel.STDERR: b"err\n"}
    assert status == ExitStatus(code=3)


async def test_a_signal_is_no_exit_code(agent: LinkAgent) -> None:
    assert (await run(agent, sh("kill -TERM $$")))[1] == ExitStatus(signal=signal.SIGTERM)


async def test_environment_is_what_was_asked_and_the_defaults(agent: LinkAgent) -> None:
    output, _ = await run(agent, ProcessSpec(["env"], env={"A": "x=y\nz", "HOME": "/h"}))
    lines = output[Channel.STDOUT].decode().split("\n")
    assert {"A=x=y", "z", "HOME=/h", "USER=root", "LOGNAME=root"} <= set(lines)
    assert sum(line.startswith("HOME=") for line in lines) == 1
    assert any(line.startswith("PATH=/") for line in lines)


async def test_child_starts_clean(agent: LinkAgent) -> None:
    script = "ls /proc/self/fd; grep -E 'Sig(Blk|Ign)' /proc/self/status; umask; cat /proc/self/oom_score_adj"
    output, _ = await run(agent, sh(script))
    fds, _, rest = output[Channel.STDOUT].decode().partition("SigBlk:")
    assert fds.split() == ["0", "1", "2", "3"]  # 3 is ls's own
    assert [part for part in rest.split() if part != "SigIgn:"] == ["0" * 16, "0" * 16, "0022", "500"]


async def test_own_session(agent: LinkAgent) -> None:
    process = await agent.spawn(sh("cut -d' ' -f1,5,6 /proc/$$/stat"))
    output = await collect(process)
    assert output[Channel.STDOUT].split() == [str(process.pid).encode()] * 3


@needs_root
async def test_user_groups_and_home(agent: LinkAgent) -> None:
    output, _ = await run(agent, sh("id -u; id -g; id -G; pwd", user="daemon"))
    assert output[Channel.STDOUT].split()[:3] == [b"1", b"1", b"1"]
    output, _ = await run(agent, sh("id -u; id -g; pwd", user="12345:54321"))
    assert output[Channel.STDOUT].split() == [b"12345", b"54321", b"/"]


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (ProcessSpec(["no-such-command"]), GuestErrorCode.NOT_FOUND),
        (ProcessSpec(["/no/such/command"]), GuestErrorCode.NOT_FOUND),
        (ProcessSpec([""]), GuestErrorCode.NOT_FOUND),
        (ProcessSpec([]), GuestErrorCode.INVALID),
        (ProcessSpec(["a\0b"]), GuestErrorCode.INVALID),
        (ProcessSpec(["/etc/passwd"]), GuestErrorCode.PERMISSION),
        (ProcessSpec(["/etc"]), GuestErrorCode.PERMISSION),
        (ProcessSpec(["true"], cwd="/no/such"), GuestErrorCode.NO_CWD),
        (ProcessSpec(["true"], cwd="/etc/passwd"), GuestErrorCode.NO_CWD),
        (ProcessSpec(["true"], user="no-such-user"), GuestErrorCode.NO_USER),
        (ProcessSpec(["true"], user="root:no-such-group"), GuestErrorCode.NO_USER),
        (ProcessSpec(["true"], user="4294967295"), GuestErrorCode.NO_USER),
        (ProcessSpec(["true", "x" * (1 << 20)]), GuestErrorCode.TOO_BIG),
        (ProcessSpec(["true", "x" * (4 << 20)]), GuestErrorCode.TOO_BIG),
        (ProcessSpec(["true"], env={"A=B": "c"}), GuestErrorCode.INVALID),
    ],
)
async def test_failures_are_told_apart_before_the_process_exists(
    agent: LinkAgent, spec: ProcessSpec, code: GuestErrorCode
) -> None:
    with pytest.raises(GuestError) as caught:
        await agent.spawn(spec)
    assert caught.value.code == code
    assert await agent.processes() == []


async def test_a_mebibyte_of_arguments_arrives_whole(agent: LinkAgent) -> None:
    arguments = [chr(ord("a") + i) * 65_536 for i in range(16)]
    output, _ = await run(agent, ProcessSpec(["sh", "-c", 'printf %s "$@" | cksum', "sh", *arguments]))
    again, _ = await run(
        agent, sh("for c in a b c d e f g h i j k l m n o p; do printf %065536d 0 | tr 0 $c; done | cksum")
    )
    assert output == again
    assert output[Channel.STDOUT].split()[1] == b"1048576"


async def test_cat_without_stdin_returns_at_once(agent: LinkAgent) -> None:
    assert await run(agent, ProcessSpec(["cat"])) == ({}, ExitStatus(code=0))


async def test_stdin_of_any_size_in_bounded_pieces(agent: LinkAgent) -> None:
    process = await agent.spawn(ProcessSpec(["cat"], stdin=True))
    data = bytes(range(256)) * 8192

    async def feed() -> None:
        await process.write_stdin(data)
        await process.close_stdin()

    output, _ = await asyncio.gather(collect(process), feed())
    assert output == {Channel.STDOUT: data}
    assert await process.wait() == ExitStatus(code=0)


async def test_stdin_nobody_reads_is_an_error_and_not_a_hang(agent: LinkAgent) -> None:
    process = await agent.spawn(sh("exec <&-; sleep 5", stdin=True))
    with pytest.raises(GuestError) as caught:
        await process.write_stdin(b"x" * 1_000_000)
    assert caught.value.code == GuestErrorCode.INVALID
    await process.signal(signal.SIGKILL)


async def test_stdin_that_is_closed_or_was_never_there(agent: LinkAgent) -> None:
    without = await agent.spawn(sh("sleep 5"))
    closed = await agent.spawn(sh("sleep 5", stdin=True))
    await closed.close_stdin()
    for process in (without, closed):
        with pytest.raises(GuestError):
            await process.write_stdin(b"x")
        await process.signal(signal.SIGKILL)


async def test_a_background_child_does_not_hold_the_command(agent: LinkAgent, tmp_path: Path) -> None:
    begin = time.monotonic()
    script = f"(sleep 0.6; echo late; echo late; touch {tmp_path}/lived) & echo now"
    output, status = await run(agent, sh(script))
    assert (output, status) == ({Channel.STDOUT: b"now\n"}, ExitStatus(code=0))
    assert time.monotonic() - begin < 0.55
    await eventually(lambda: (tmp_path / "lived").exists())  # no SIGPIPE for what it wrote meanwhile


async def test_output_outlives_a_slow_reader(agent: LinkAgent) -> None:
    process = await agent.spawn(sh("head -c 200000 /dev/zero; echo end"))
    await asyncio.sleep(0.5)  # longer than the drain after exit
    output = await collect(process)
    assert len(output[Channel.STDOUT]) == 200_004


async def test_closed_output_is_not_the_end_of_the_process(agent: LinkAgent) -> None:
    process = await agent.spawn(sh("exec >&- 2>&-; sleep 0.2; exit 5"))
    assert await collect(process) == {}
    assert await agent.processes() == [process.pid]
    assert await process.wait() == ExitStatus(code=5)


async def test_wait_needs_no_reader(agent: LinkAgent) -> None:
    process = await agent.spawn(sh("head -c 50000 /dev/zero; exit 7"))
    assert await process.wait() == ExitStatus(code=7)


async def test_back_pressure_reaches_the_process(agent: LinkAgent, running: RunningAgent) -> None:
    before = running.status("VmRSS")
    process = await agent.spawn(sh("head -c 100000000 /dev/zero"))
    await asyncio.sleep(0.4)
    assert await agent.processes() == [process.pid]
    total = 0
    async for _, data in process.output():
        assert len(data) <= 65_536
        total += len(data)
    assert total == 100_000_000
    assert running.status("VmRSS") - before < 8_000


async def test_output_given_up_early_does_not_block_the_process(agent: LinkAgent) -> None:
    process = await agent.spawn(sh("head -c 10000000 /dev/zero; exit 4"))
    output = process.output()
    await anext(output)
    await output.aclose()  # type: ignore[attr-defined]
    assert await process.wait() == ExitStatus(code=4)
    assert int((await agent.hello())["dropped_bytes"]) > 0


async def test_terminal(agent: LinkAgent) -> None:
    script = "test -t 0 && test -t 2 && stty size; read line; stty size; echo got $line >&2"
    process = await agent.spawn(sh(script, pty=PtySize(24, 80)))
    await process.resize(PtySize(30, 100))
    await process.write_stdin(b"hello\n")
    output = await collect(process)
    assert set(output) == {Channel.PTY}
    assert output[Channel.PTY].endswith(b"30 100\r\ngot hello\r\n")
    assert await process.wait() == ExitStatus(code=0)


async def test_terminal_end_of_file_and_interrupt(agent: LinkAgent) -> None:
    process = await agent.spawn(ProcessSpec(["cat"], pty=PtySize(24, 80)))
    await process.close_stdin()
    assert await process.wait() == ExitStatus(code=0)
    process = await agent.spawn(ProcessSpec(["cat"], pty=PtySize(24, 80)))
    await process.write_stdin(b"\x03")
    assert await process.wait() == ExitStatus(signal=signal.SIGINT)


async def test_resize_needs_a_terminal(agent: LinkAgent) -> None:
    process = await agent.spawn(sh("sleep 5"))
    with pytest.raises(GuestError) as caught:
        await process.resize(PtySize(1, 1))
    assert caught.value.code == GuestErrorCode.INVALID
    await process.signal(signal.SIGKILL)


async def test_signal_to_the_process_or_to_its_group(agent: LinkAgent) -> None:
    script = (
        "trap 'echo parent' TERM; sh -c \"trap 'echo child; exit' TERM; while :; do sleep 0.05; done\" & wait; wait"
    )
    process = await agent.spawn(sh(script))
    await asyncio.sleep(0.3)
    await process.signal(signal.SIGTERM, group=False)
    await asyncio.sleep(0.3)
    await process.signal(signal.SIGTERM)
    output = await collect(process)
    assert output[Channel.STDOUT].split().count(b"parent") >= 1
    assert output[Channel.STDOUT].split().count(b"child") == 1


async def test_signal_after_the_end(agent: LinkAgent) -> None:
    process = await agent.spawn(ProcessSpec(["true"]))
    await process.wait()
    with pytest.raises(GuestError) as caught:
        await process.signal(signal.SIGTERM)
    assert caught.value.code == GuestErrorCode.NOT_FOUND


def marked(marker: str) -> list[int]:
    """Processes with `marker` in their environment; Linux keeps it through fork, setsid and exec."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"MARK={marker}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


async def test_kill_reaches_the_whole_tree(agent: LinkAgent, tmp_path: Path) -> None:
    script = (
        "sleep 20 & setsid sleep 21 & (setsid sh -c 'sleep 22 & sleep 23') & "
        "setsid sh -c '(setsid sleep 24 &)' ; echo ready; sleep 25"
    )
    process = await agent.spawn(sh(script, env={"MARK": str(tmp_path)}))
    assert (await anext(process.output()))[1] == b"ready\n"
    await asyncio.sleep(0.2)
    assert len(marked(str(tmp_path))) >= 7
    await process.signal(signal.SIGKILL)
    assert await process.wait() == ExitStatus(signal=signal.SIGKILL)
    await eventually(lambda: marked(str(tmp_path)) == [])


async def test_kill_beats_processes_that_fork_and_die(agent: LinkAgent, tmp_path: Path) -> None:
    # Four chains in which each link forks the next and exits: few at any time, and never the same.
    # They end by themselves after 3,000 links, whatever becomes of this test.
    chain = "f() { i=$((i+1)); [ $i -gt 3000 ] && exit; f & exit; }; "
    script = chain + 'i=0; for n in 1 2 3 4; do setsid sh -c "$0" & f & done; sleep 20'
    spec = ProcessSpec(["sh", "-c", script, chain + "i=0; f"], env={"MARK": str(tmp_path)})
    process = await agent.spawn(spec)
    await asyncio.sleep(0.2)
    assert marked(str(tmp_path))
    await process.signal(signal.SIGKILL)
    assert await process.wait() == ExitStatus(signal=signal.SIGKILL)
    await eventually(lambda: marked(str(tmp_path)) == [])


async def test_kill_of_a_wide_tree(agent: LinkAgent, tmp_path: Path) -> None:
    script = "i=0; while [ $i -lt 150 ]; do setsid sleep 20 & i=$((i+1)); done; echo ready; wait"
    process = await agent.spawn(sh(script, env={"MARK": str(tmp_path)}))
    assert (await anext(process.output()))[1] == b"ready\n"
    await process.signal(signal.SIGKILL)
    await eventually(lambda: marked(str(tmp_path)) == [])


async def test_orphans_are_reaped(agent: LinkAgent, running: RunningAgent) -> None:
    await run(agent, sh("for i in 1 2 3 4 5 6 7 8; do (sleep 0.1 &) ; done"))
    await asyncio.sleep(0.4)
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    assert children == []


async def test_many_at_once(agent: LinkAgent) -> None:
    results = await asyncio.gather(*(run(agent, sh(f"echo {i}; exit {i}")) for i in range(60)))
    assert results == [({Channel.STDOUT: f"{i}\n".encode()}, ExitStatus(code=i)) for i in range(60)]


async def test_idle_agent_does_nothing(agent: LinkAgent, running: RunningAgent) -> None:
    process = await agent.spawn(sh("sleep 5"))
    await asyncio.sleep(0.1)
    before = running.status("voluntary_ctxt_switches"), running.cpu_ticks()
    await asyncio.sleep(0.6)
    assert (running.status("voluntary_ctxt_switches"), running.cpu_ticks()) == before
    await process.signal(signal.SIGKILL)


async def test_nothing_is_left_open(agent: LinkAgent, running: RunningAgent) -> None:
    before = running.descriptors()
    await asyncio.gather(*(run(agent, sh("echo x", stdin=True)) for _ in range(20)))
    for _ in range(5):
        with pytest.raises(GuestError):
            await agent.spawn(ProcessSpec(["no-such-command"]))
    hello = await agent.hello()
    assert (hello["streams"], hello["processes"]) == ("0", "0")
    await eventually(lambda: running.descriptors() == before)


async def test_agents_that_see_each_other_kill_only_their_own(
    checked_binary: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two agents outside any pid namespace, each with its first command: the marks must not be the same."""
    agents = [start_agent(checked_binary, tmp_path_factory.mktemp("link")) for _ in range(2)]
    try:
        links = [await agent.connect() for agent in agents]
        mine, other = [await link.spawn(ProcessSpec(["sleep", "60"])) for link in links]
        await mine.signal(signal.SIGKILL)
        assert await mine.wait() == ExitStatus(signal=signal.SIGKILL)
        assert await links[1].processes() == [other.pid]
        for link in links:
            await link.close()
    finally:
        for agent in agents:
            agent.process.terminate()
            agent.process.wait()
