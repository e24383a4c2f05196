"""Dockerfiles over real containers: what `buildah` cannot be asked, what fails and how, what the cache knows."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from sandyard.guest.base import ProcessSpec
from sandyard.guest.shell import spawn_shell
from sandyard.images.build import Base, BuildFailed, Built
from sandyard.images.build import engine as engine_module
from sandyard.images.build.shell import output_of
from sandyard.images.dockerfile import making
from tests.images.dockerfile.listing import read
from tests.images.dockerfile.site import BUSYBOX, Site

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]
CASES = Path(__file__).parent.parent / "dockerfiles"


def context(home: Path, dockerfile: str, **files: str) -> Path:
    home.mkdir(exist_ok=True)
    (home / "Dockerfile").write_text(dockerfile)
    for name, text in files.items():
        (home / name).write_text(text)
    return home


async def ask(site: Site, built: Built, *argv: str) -> str:
    bench = await site.workshop.open(built.rootfs)
    try:
        _, said = await output_of(bench.agent, *argv)
    finally:
        await bench.close()
    return said.decode().strip()


async def test_heredocs(site: Site) -> None:
    rootfs, _ = await site.stage(site.recipe(CASES / "20-heredocs"))
    with tarfile.open(fileobj=io.BytesIO(await site.files(rootfs))) as tar:

        def text(name: str) -> str:
            file = tar.extractfile(name)
            assert file is not None
            return file.read().decode()

        said = {name: text(name) for name in ("one", "two", "three", "four", "etc/five", "etc/six", "seven")}
        many = text("many/one"), text("many/two")
        mode = tar.getmember("etc/five").mode
    assert said == {
        "one": "one\n",
        "two": "world\n",
        "three": "three world\n",
        "four": "four $WHO\n",
        "etc/five": 'five world "quoted"\n',
        "etc/six": "six $WHO\n",
        "seven": "tabs\n",
    }
    assert (many, mode) == (("first\n", "second\n"), 0o644)


async def test_a_heredoc_that_names_its_program(site: Site, tmp_path: Path) -> None:
    built = await site.build(site.recipe(context(tmp_path, "FROM busybox\nRUN <<EOF\n#!/bin/cat\nitself\nEOF\n")))
    assert site.words.of("1")[1:] == ["#!/bin/cat", "itself"]
    assert await ask(site, built, "ls", "-a", "/dev") != ""


async def test_a_template_of_a_dockerfile(site: Site, tmp_path: Path) -> None:
    text = 'FROM busybox\nENV A=1\nWORKDIR /app\nUSER app\nLABEL x=y\nENTRYPOINT ["sleep"]\nCMD ["60"]\n'
    built = await site.build(site.recipe(context(tmp_path, text)))
    assert (built.rootfs.user, built.rootfs.workdir, built.rootfs.env["A"]) == ("app", "/app", "1")
    assert (built.start_cmd, built.ready_cmd) == ("sleep 60", None)
    assert built.oci is not None
    assert (built.oci["Labels"], built.oci["Cmd"], built.oci["User"]) == ({"x": "y"}, ["60"], "app")
    accounts = await ask(site, built, "cat", "/etc/passwd")
    assert "\napp:x:1000:1000::/home/app:/bin/sh" in accounts  # made, since the image had none of the name
    assert "\nuser:x:1001:1001::/home/user:/bin/sh" in accounts  # as in every template
    again = await site.build(site.recipe(tmp_path))
    assert again.rootfs == built.rootfs
    assert site.words.of("finalize") == ["CACHED START"]


async def test_what_the_base_template_sets_is_inherited(site: Site, tmp_path: Path) -> None:
    base = site.bases["busybox"]
    below = base.rootfs.__class__(base.rootfs.layers, {"FROM_BASE": "1"}, "/home/user", "user")
    site.bases["mine"] = Base(below, "mine", "mine", "sleep 50", "true")
    built = await site.build(site.recipe(context(tmp_path, "FROM mine\nRUN id -u > /who && pwd >> /who\n")))
    assert (built.rootfs.user, built.rootfs.workdir, built.rootfs.env["FROM_BASE"]) == ("user", "/home/user", "1")
    assert (built.start_cmd, built.ready_cmd) == ("sleep 50", "true")
    assert await ask(site, built, "cat", "/who") == "0\n/"  # a Dockerfile begins as root
    own = await site.build(site.recipe(context(tmp_path, "FROM mine\nUSER 0\nWORKDIR /\nCMD sleep 40\n")))
    assert (own.rootfs.user, own.rootfs.workdir, own.start_cmd) == ("root", "/", "/bin/sh -c 'sleep 40'")


async def test_numbers_need_no_account(site: Site, tmp_path: Path) -> None:
    built = await site.build(site.recipe(context(tmp_path, "FROM busybox\nUSER 4242\nRUN id -u; id -g\n")))
    assert site.words.of("2")[1:] == ["4242", "0"]
    assert built.rootfs.user == "4242:0"


@pytest.mark.parametrize(
    ("text", "step", "words"),
    [
        ("RUN true\nRUN echo said; false\n", "2", "Dockerfile:3: RUN echo said; false: exit status 1"),
        ('RUN ["/no/such"]\n', "1", 'Dockerfile:2: RUN ["/no/such"]: the image has no /no/such'),
        ("COPY --chown=nobody1 f /x\n", "1", "invalid username: 'nobody1'"),
        ("COPY --from=busybox /no/such /x\n", "1", "is not there"),
        ("COPY --from=elsewhere /x /x\n", "base", "image 'elsewhere' is not known"),
        ("RUN touch /x\nCOPY f /x/y\n", "2", "Dockerfile:3: COPY f /x/y: "),
        ("COPY * /new\n", "1", "is no directory, and ends in no slash"),
        ("USER a:nogroup1\nRUN true\n", "2", "invalid group: 'nogroup1'"),
    ],
)
async def test_a_failure_names_the_step_and_the_line(
    site: Site, tmp_path: Path, text: str, step: str, words: str
) -> None:
    with pytest.raises(BuildFailed) as caught:
        await site.build(site.recipe(context(tmp_path, f"FROM busybox\n{text}", f="1", g="2")))
    assert caught.value.step == step
    assert words in caught.value.message
    assert "\n" not in caught.value.message


async def test_what_is_known_is_not_done_again(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "COMMIT_AFTER", 0.0)
    text = (
        "FROM busybox AS one\nRUN echo 1 > /one\n"
        "FROM busybox\nARG V=1\nCOPY f /f\nRUN echo $V > /v\nCOPY --from=one /one /\n"
    )
    await site.build(site.recipe(context(tmp_path, text, f="1")))
    opened = site.workshop.opened
    built = await site.build(site.recipe(tmp_path))
    assert (built.cached, site.workshop.opened) == (4, opened)  # nobody asked for the first stage
    assert site.words.of("4") == ["CACHED [stage 1 4/5] RUN echo $V > /v"]
    await site.build(site.recipe(tmp_path, {"V": "2"}))
    assert site.words.of("3") == ["CACHED [stage 1 3/5] COPY f /f"]
    assert site.words.of("4")[0] == "[stage 1 4/5] RUN echo $V > /v"
    await site.build(site.recipe(context(tmp_path, text, f="2")))
    assert site.words.of("3")[0] == "[stage 1 3/5] COPY f /f"
    opened = site.workshop.opened
    built = await site.build(site.recipe(tmp_path, force=True))
    assert built.cached == 0
    assert site.workshop.opened > opened


async def test_a_mount_hides_what_was_there_and_gives_it_back(site: Site, tmp_path: Path) -> None:
    text = (
        "FROM busybox\nRUN mkdir -p /d/sub && echo old > /d/f && chmod 640 /d/f && chown 5:6 /d/f && chmod 711 /d\n"
        "RUN --mount=type=cache,target=/d ls /d && echo new > /d/f\nRUN --mount=type=cache,target=/d,uid=7 ls -ln / \n"
        "RUN --mount=type=tmpfs,target=/a/b/c touch /a/b/c/x /a/b/kept\n"
    )
    rootfs, _ = await site.stage(site.recipe(context(tmp_path, text)))
    assert site.words.of("2")[1:] == []
    found = read(await site.files(rootfs)).files
    assert (found["d"].mode, found["d/f"].mode, found["d/f"].owner, found["d/f"].size) == (0o711, 0o640, (5, 6), 4)
    assert "d/sub" in found
    assert "a/b/kept" in found
    assert not [name for name in found if "sandyard-" in name or name.startswith("a/b/c")]


async def test_an_archive_that_unpacks_to_too_much_is_refused(site: Site, tmp_path: Path) -> None:
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 80 << 20
        tar.addfile(member, io.BytesIO(bytes(80 << 20)))
    home = context(tmp_path, "FROM busybox\nADD bomb.tar.gz /x/\n")
    (home / "bomb.tar.gz").write_bytes(gzip.compress(inner.getvalue(), 1))
    with pytest.raises(BuildFailed, match=r"Dockerfile:2: .* unpacks to more than 64 MiB"):
        await site.build(site.recipe(home))


async def test_an_archive_of_names_that_leave_it_is_refused(site: Site, tmp_path: Path) -> None:
    home = context(tmp_path, "FROM busybox\nADD evil.tar /x/\n")
    with tarfile.open(home / "evil.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../../etc/evil"))
    with pytest.raises(BuildFailed, match="leaves the build context"):
        await site.build(site.recipe(home))


async def test_files_of_another_stage_are_its_own(site: Site, tmp_path: Path) -> None:
    """A link of a stage leads within the stage: never to the host, and never to the stage that copies."""
    text = (
        "FROM busybox AS src\nRUN ln -s /etc/shadow /s && ln -s ../../../../etc/passwd /p && echo src > /etc/passwd\n"
        "FROM busybox\nRUN echo own > /etc/shadow\nCOPY --from=src /p /copied\n"
    )
    rootfs, _ = await site.stage(site.recipe(context(tmp_path, text)))
    assert read(await site.files(rootfs)).files["copied"].size == 4
    with pytest.raises(BuildFailed, match="is not there"):
        await site.build(site.recipe(context(tmp_path, text + "COPY --from=src /s /secret\n")))


async def test_stages_without_any_program(site: Site, tmp_path: Path) -> None:
    text = (
        "FROM scratch AS one\nCOPY f /deep/f\nCOPY --chmod=1755 --chown=3:4 f /g\n"
        "FROM scratch\nCOPY --from=one / /all/\nCOPY --from=one /g /\n"
    )
    rootfs, _ = await site.stage(site.recipe(context(tmp_path, text, f="1")))
    found = read(await site.files(rootfs)).files
    assert (found["all/deep/f"].size, found["g"].mode, found["g"].owner) == (1, 0o1755, (3, 4))


async def test_what_needs_a_program_that_is_not_there_is_said(site: Site, tmp_path: Path) -> None:
    home = context(tmp_path, "FROM scratch\nCOPY --chmod=4755 f /f\n", f="1")
    with pytest.raises(BuildFailed, match="neither tar nor chmod"):
        await site.build(site.recipe(home))
    (home / "link").symlink_to("f")
    (home / "sub").mkdir()
    (home / "sub/link").symlink_to("../f")
    with pytest.raises(BuildFailed, match="neither tar nor ln"):
        await site.build(site.recipe(context(home, "FROM scratch\nCOPY sub /sub\n")))


async def test_a_start_command_without_a_shell(site: Site, tmp_path: Path) -> None:
    text = 'FROM scratch\nCOPY busybox /\nENTRYPOINT ["/busybox", "sleep", "60"]\n'
    home = context(tmp_path, text)
    (home / "busybox").write_bytes(BUSYBOX)
    (home / "busybox").chmod(0o755)
    built = await site.build(site.recipe(home))
    assert built.start_cmd == "/busybox sleep 60"
    assert site.words.of("finalize")[-1] == "ready"
    bench = await site.workshop.open(built.rootfs)
    process = await spawn_shell(bench.agent, ProcessSpec(["/bin/bash", "-l", "-c", "/busybox echo 'a b'"]))
    said = b"".join([data async for _, data in process.output()])
    await bench.close()
    assert said == b"a b\n"


async def test_many_layers_become_few(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "COMMIT_AFTER", 0.0)
    monkeypatch.setattr(making, "MAX_LAYERS", 3)
    assert engine_module.MAX_LAYERS > 3
    lines = "".join(f"RUN echo {n} > /f{n}\n" for n in range(6))
    rootfs, _ = await site.stage(site.recipe(context(tmp_path, f"FROM busybox\n{lines}")))
    assert len(rootfs.layers) <= 4
    assert {f"f{n}" for n in range(6)} <= set(read(await site.files(rootfs)).files)
