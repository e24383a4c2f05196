"""The step engine over the in-memory runtime: what runs, what is kept, what is said, what is closed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandyard.errors import AgentLinkError, CreateFailed
from sandyard.guest.base import ProcessSpec
from sandyard.guest.memory import MemoryAgent
from sandyard.images.build import Base, BuildFailed, Built, Engine, Level, Plan, Step
from sandyard.images.build import engine as engine_module
from sandyard.runtimes.base import Rootfs
from sandyard.runtimes.memory import MemoryRuntime
from tests.images.test_build_parts import pack
from tests.images.workshop import PlainCache, TestWorkshop, Uploads, Words

BASE = Base(Rootfs([], {"FROM": "base"}), "key", "base")


class Site:
    """An engine with all that it needs, and what its commands did."""

    def __init__(self, home: Path) -> None:
        self.ran: list[ProcessSpec] = []
        self.agents: list[MemoryAgent] = []
        self.words = Words()
        self.cache = PlainCache()
        self.uploads = Uploads()
        self.runtime = MemoryRuntime(self._agent)
        self.workshop = TestWorkshop(self.runtime, home)

    def _agent(self) -> MemoryAgent:
        async def note(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
            self.ran.append(spec)
            return b"noted\n", b"", 0

        async def write(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
            self.ran.append(spec)
            await agent.write_file(spec.argv[1], spec.argv[2].encode())
            return b"", b"", 0

        async def fail(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
            return b"part\nof a line", b"curl: Could not resolve host: x\n", int(spec.argv[1])

        async def drop(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
            raise AgentLinkError("the link is gone")

        agent = MemoryAgent({"note": note, "write": write, "fail": fail, "drop": drop})
        self.agents.append(agent)
        return agent

    async def build(self, *steps: Step, base: Base = BASE, ready_seconds: float = 5, **plan: object) -> Built:
        self.ran.clear()
        self.words.said.clear()
        made = Plan(base, steps, **plan)  # type: ignore[arg-type] # names of Plan's own fields
        engine = Engine(self.workshop, self.uploads, self.cache, self.words)
        try:
            return await engine.run(made, ready_seconds=ready_seconds)
        finally:
            assert not self.workshop.open_ids
            assert not self.runtime.instances

    async def files(self, built: Built) -> MemoryAgent:
        """The agent of a sandbox of what was built."""
        bench = await self.workshop.open(built.rootfs)
        self.workshop.open_ids.clear()
        assert isinstance(bench.agent, MemoryAgent)
        return bench.agent


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def run(command: str, *, user: str | None = None, force: bool = False) -> Step:
    return Step("RUN", [command] if user is None else [command, user], force=force)


async def test_steps_share_user_directory_and_environment(site: Site) -> None:
    built = await site.build(
        run("note a"),
        Step("ENV", ["A", "1", "B", "$A-$FROM"]),
        Step("ARG", ["ONLY"]),
        Step("WORKDIR", ["/app"]),
        Step("WORKDIR", ["sub"]),
        Step("USER", ["root"]),
        run("note b"),
        run("note c", user="user"),
    )
    first, second, third = site.ran
    assert (first.user, first.cwd, "A" in first.env) == ("user", "/home/user", False)
    assert (second.user, second.cwd, second.env["B"], second.env["ONLY"]) == ("root", "/app/sub", "1-base", "")
    assert (third.user, third.cwd) == ("user", "/app/sub")
    assert (built.rootfs.user, built.rootfs.workdir) == ("root", "/app/sub")
    assert built.rootfs.env == {"FROM": "base", "A": "1", "B": "1-base", "ONLY": ""}
    assert (await (await site.files(built)).stat("/app/sub")).uid == 1000


async def test_cheap_steps_share_one_layer_and_dear_ones_get_their_own(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [run("write /a 1"), run("write /b 2"), run("write /c 3")]
    assert len((await site.build(*steps)).rootfs.layers) == 1
    monkeypatch.setattr(engine_module, "COMMIT_AFTER", 0.0)
    site.cache.entries.clear()
    built = await site.build(*steps)
    assert len(built.rootfs.layers) == 3
    agent = await site.files(built)
    assert [(await agent.stat(f"/{name}")).size for name in "abc"] == [1, 1, 1]


async def test_a_step_that_changes_no_file_adds_no_layer(site: Site) -> None:
    bare = await site.build()
    assert len(bare.rootfs.layers) == 1  # the accounts that every template has
    built = await site.build(Step("ENV", ["A", "1"]))
    assert (built.rootfs.layers, built.size_bytes) == (bare.rootfs.layers, bare.size_bytes)
    assert built.rootfs.env == {"FROM": "base", "A": "1"}
    again = await site.build(base=Base(built.rootfs, "next", "next"))
    assert again.rootfs == built.rootfs
    assert again.size_bytes == 0


async def test_what_is_known_is_not_run_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "COMMIT_AFTER", 0.0)
    steps = [Step("ENV", ["A", "1"]), run("write /a 1"), Step("WORKDIR", ["/w"]), run("note x")]
    first = await site.build(*steps)
    opened = site.workshop.opened
    again = await site.build(*steps)
    assert (again.rootfs, again.cached, site.ran) == (first.rootfs, 4, [])
    assert site.workshop.opened == opened
    assert site.words.of("2") == ["CACHED [2/4] RUN write /a 1"]
    changed = await site.build(*steps[:3], run("note y"))
    assert (changed.cached, [spec.argv[1] for spec in site.ran]) == (3, ["y"])
    assert (site.ran[0].cwd, site.ran[0].env["A"]) == ("/w", "1")
    assert list(changed.rootfs.layers)[1:] == list(first.rootfs.layers)[1:]


async def test_force_runs_again_what_it_names_and_all_after(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "COMMIT_AFTER", 0.0)
    await site.build(run("note 1"), run("note 2"), run("note 3"))
    await site.build(run("note 1"), run("note 2", force=True), run("note 3"))
    assert [spec.argv[1] for spec in site.ran] == ["2", "3"]
    await site.build(run("note 1"), run("note 2"), run("note 3"), force=True)
    assert [spec.argv[1] for spec in site.ran] == ["1", "2", "3"]


async def test_a_command_that_fails_names_its_step_and_its_words_are_kept(site: Site) -> None:
    with pytest.raises(BuildFailed, match="failed to run command 'fail 3': exit status 3") as caught:
        await site.build(run("note 1"), run("fail 3"))
    assert caught.value.step == "2"
    said = site.words.of("2")
    assert said[:4] == ["[2/2] RUN fail 3", "part", "curl: Could not resolve host: x", "of a line"]
    assert "looked for a network" in said[4]
    assert not [key for key, value in site.cache.entries.items() if value.layers]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            run("whoami", user="nobody1"),
            "failed to run command 'whoami': command failed: unauthenticated: invalid username",
        ),
        (run("no-such-command"), "failed to run command 'no-such-command': command failed: "),
        (Step("USER", ["a b"]), "invalid username: 'a b'"),
        (Step("USER", ["4242"]), "no user has this number"),
        (Step("COPY", ["a", "b"], "missing1"), "its files were not uploaded"),
        (Step("WORKDIR", ["$UNSET"]), "the path is empty"),
    ],
)
async def test_what_cannot_be_done_is_said_in_one_line(site: Site, step: Step, words: str) -> None:
    with pytest.raises(BuildFailed) as caught:
        await site.build(step)
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.step == "1"


async def test_files_are_copied_without_a_tar_in_the_image(site: Site, tmp_path: Path) -> None:
    site.uploads.files["h1"] = pack(tmp_path / "u", ("d", None), ("d/f", b"one"), ("d/s", None), ("d/s/g", b"two"))
    built = await site.build(
        Step("COPY", ["d/*", "to"], "h1"),
        Step("COPY", ["d/f", "/x/y", "root", "0600"], "h1"),
        Step("COPY", ["d/f", "/x/"], "h1"),
        Step("ADD", ["d", "."], "h1"),
    )
    agent = await site.files(built)
    assert (await agent.stat("/home/user/to/s/g")).uid == 1000
    file = await agent.stat("/x/y")
    assert (file.uid, file.mode, file.size) == (0, 0o600, 3)
    assert (await agent.stat("/x/f")).size == 3
    assert (await agent.stat("/home/user/s/g")).size == 3


async def test_a_copy_of_nothing_fails(site: Site, tmp_path: Path) -> None:
    site.uploads.files["h1"] = pack(tmp_path / "u", ("f", b""))
    with pytest.raises(BuildFailed, match="no files match 'other'"):
        await site.build(Step("COPY", ["other", "/x"], "h1"))


async def test_a_start_command_is_tried_until_it_is_ready(site: Site) -> None:
    built = await site.build(run("note 1"), start_cmd="sleep 30", ready_cmd="true")
    assert (built.start_cmd, built.ready_cmd) == ("sleep 30", "true")
    assert site.words.of("finalize") == ["START sleep 30", "ready"]
    await site.build(run("note 1"), start_cmd="sleep 30", ready_cmd="true")
    assert site.words.of("finalize") == ["CACHED START"]
    await site.build(run("note 1"), start_cmd="sleep 31", ready_cmd="true")
    assert site.words.of("finalize") == ["START sleep 31", "ready"]


async def test_the_wait_that_sdks_write_by_themselves_is_for_the_build_only(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sandyard.images.build import start

    async def soon(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
        await asyncio.sleep(0 if spec.argv[1] == "20" else 60)
        return b"", b"", 0

    made = site._agent

    def with_sleep() -> MemoryAgent:
        agent = made()
        agent.commands["sleep"] = soon
        return agent

    monkeypatch.setattr(site.runtime, "_make_agent", with_sleep)
    built = await site.build(start_cmd="sleep 60", ready_cmd=start.DEFAULT_READY)
    assert (built.start_cmd, built.ready_cmd) == ("sleep 60", None)
    assert site.words.of("finalize")[-1] == "ready"


async def test_a_start_command_that_is_over_is_not_waited_for(site: Site) -> None:
    for said in (["START note 1", "noted", "the start command is over"], ["CACHED START"]):
        built = await site.build(start_cmd="note 1", ready_cmd="sleep 20")
        assert (built.start_cmd, built.ready_cmd) == ("note 1", None)
        assert site.words.of("finalize") == said
    built = await site.build(start_cmd="note 1", ready_cmd="true")
    assert built.ready_cmd == "true"


@pytest.mark.parametrize(
    ("start", "ready", "words"),
    [
        ("fail 4", "sleep 5", "the start command failed: exit status 4"),
        ("sleep 30", "false", "did not succeed within 0.3 s"),
        ("no-such-command", "true", "the start command failed"),
    ],
)
async def test_a_start_that_fails_is_an_error_of_the_last_step(site: Site, start: str, ready: str, words: str) -> None:
    with pytest.raises(BuildFailed, match=words) as caught:
        await site.build(start_cmd=start, ready_cmd=ready, ready_seconds=0.3)
    assert caught.value.step == "finalize"


async def test_the_start_of_the_template_below_is_inherited(site: Site) -> None:
    base = Base(BASE.rootfs, "key", "base", "sleep 9", "true")
    built = await site.build(base=base)
    assert (built.start_cmd, built.ready_cmd) == ("sleep 9", "true")
    built = await site.build(base=base, ready_cmd="sleep 0")
    assert (built.start_cmd, built.ready_cmd) == (None, "sleep 0")


async def test_the_death_of_the_sandbox_is_told(site: Site) -> None:
    site.workshop.death = "oom (memory limit)"
    with pytest.raises(BuildFailed, match=r"the sandbox died: oom \(memory limit\)"):
        await site.build(run("fail 137"))


async def test_a_sandbox_that_cannot_be_made_leaves_nothing(site: Site) -> None:
    site.runtime.fail_next.append(CreateFailed("disk", "full"))
    with pytest.raises(CreateFailed):
        await site.build(run("note 1"))


@pytest.mark.parametrize("plan", [{"steps": True}, {"start": True}])
async def test_a_cancelled_build_leaves_nothing(site: Site, plan: dict[str, bool]) -> None:
    if "steps" in plan:
        task = asyncio.create_task(site.build(run("sleep 60")))
    else:
        task = asyncio.create_task(site.build(start_cmd="sleep 60", ready_cmd="false", ready_seconds=60))
    await asyncio.sleep(0.3)
    assert site.workshop.open_ids
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not site.runtime.instances


async def test_a_long_line_is_cut_and_a_progress_bar_shows_its_end(site: Site) -> None:
    from sandyard.guest.base import Channel
    from sandyard.images.build.shell import LINE_LIMIT, Lines

    lines = Lines(site.words, "1")
    lines.feed(Channel.STDOUT, b"10%\r50%\r100%\r\nab")
    lines.feed(Channel.STDERR, b"err\n")
    lines.feed(Channel.STDOUT, "cdé".encode()[:3])
    lines.feed(Channel.STDOUT, "é".encode()[1:] + b"\n")
    lines.feed(Channel.STDOUT, b"x" * 100_000)
    lines.flush()
    assert [message for _, _, message in site.words.said[:3]] == ["100%", "err", "abcdé"]
    assert len(site.words.said[3][2]) == LINE_LIMIT
    assert {level for _, level, _ in site.words.said} == {Level.INFO}
