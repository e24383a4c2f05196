"""Template builds over real containers: started by the SDK, and by a server that is killed in the middle."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tarfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import BuildException, Sandbox, Template

from sandyard.cli.app import build_app
from sandyard.config import Settings
from sandyard.errors import BadRequest
from sandyard.server.embedded import EmbeddedServer
from tests.images import oci

pytestmark = [pytest.mark.root, pytest.mark.timeout(240), pytest.mark.usefixtures("clean")]


def sdk(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def busybox_image(**config: Any) -> oci.HandMade:
    program = shutil.which("busybox")
    if program is None:
        pytest.skip("needs a static BusyBox: apt-get install busybox-static")
    names = ("sh", "cat", "id", "env", "pwd")
    applets = [oci.Entry(f"bin/{name}", kind=tarfile.SYMTYPE, link="busybox") for name in names]
    busybox = oci.Entry("bin/busybox", Path(program).read_bytes(), mode=0o755)
    return oci.image([oci.layer(oci.folder("bin"), busybox, *applets), oci.layer(oci.folder("tmp", 0o777))], **config)


def test_a_chain_of_templates(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("print('app')")
    with EmbeddedServer(settings) as server:
        sdk(server, monkeypatch)
        first = (
            Template(file_context_path=tmp_path)
            .from_base_image()
            .copy("app.py", "/opt/app/", user="root")
            .set_envs({"WHO": "first"})
            .set_workdir("/srv/app")
            .run_cmd("echo $WHO > who; sudo rm /etc/hostname /usr/bin/curl")
        )
        Template.build(first, "first", cpu_count=1, memory_mb=256)
        second = Template().from_template("first").run_cmd("echo more >> who").set_user("root")
        Template.build(second, "second:v1", cpu_count=1, memory_mb=256)
        began = time.monotonic()
        Template.build(second, "second:v2", cpu_count=1, memory_mb=256)
        assert time.monotonic() - began < 2
        for tag in ("v1", "v2"):
            box = Sandbox.create(f"second:{tag}", timeout=60)
            said = box.commands.run("id -un; pwd; cat who; echo $WHO; python3 /opt/app/app.py; which curl || echo gone")
            assert said.stdout.split() == ["root", "/srv/app", "first", "more", "first", "app", "gone"]
            box.kill()
        httpx.delete(f"{server.url}/templates/first", headers={"X-API-Key": server.api_key}).raise_for_status()
        box = Sandbox.create("second:v1", timeout=60)  # its layers stay while it needs them
        assert box.commands.run("cat who").stdout == "first\nmore\n"


@pytest.mark.skipif(not oci.have_registry(), reason="docker-registry is not installed")
def test_an_image_is_pulled_with_the_credentials_of_the_build(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = busybox_image(
        Env=["PATH=/bin", "FROM_IMAGE=yes"],
        User="nobody",
    )
    with oci.running_registry(tmp_path / "registry", password=True) as registry, ExitStack() as cleanup:
        images = settings.images.model_copy(update={"plain_http": [registry.address]})
        server = cleanup.enter_context(EmbeddedServer(settings.model_copy(update={"images": images})))
        registry.push("team/tool", made, "v1")
        sdk(server, monkeypatch)
        name = f"{registry.address}/team/tool:v1"
        template = Template().from_image(name, username=oci.USER, password=oci.PASSWORD).run_cmd("id -un > ~/who")
        said: list[str] = []
        Template.build(template, "tool", memory_mb=256, on_build_logs=lambda entry: said.append(entry.message))
        assert any(f"FROM {name} (sha256:" in line for line in said)
        box = Sandbox.create("tool", timeout=60)
        assert box.commands.run("cat ~/who; echo $FROM_IMAGE; id -un").stdout.split() == ["user", "yes", "user"]
        Template.build(template, "tool", memory_mb=256, on_build_logs=lambda entry: said.append(entry.message))
        assert "CACHED [1/1] RUN id -un > ~/who" in said
        for wrong in (Template().from_image(name), Template().from_image(name, username="x", password="y")):
            with pytest.raises(
                BuildException, match=f"image '{name}' could not be pulled: {registry.address}/team/tool: "
            ):
                Template.build(wrong, "other", memory_mb=256)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
def test_a_server_killed_in_a_build_leaves_nothing(settings: Settings, seed: int) -> None:
    steps = [{"type": "RUN", "args": [f"head -c 20M /dev/urandom > /tmp/{n}; sleep 0.{n}"]} for n in range(6)]
    key: dict[str, str] = {}
    with EmbeddedServer(settings) as server:
        key["X-API-Key"] = server.api_key
        with httpx.Client(base_url=server.url, headers=key) as api:
            made = api.post("/v3/templates", json={"name": "x", "memoryMB": 256}).json()
            url = f"/templates/{made['templateID']}/builds/{made['buildID']}"
            api.post(f"/v2{url}", json={"fromTemplate": "base", "steps": steps}).raise_for_status()
            time.sleep(random.Random(seed).uniform(0.2, 2.5))
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
    with EmbeddedServer(settings) as server, httpx.Client(base_url=server.url, headers=key) as api:
        assert api.get(f"{url}/status").json()["status"] in ("error", "ready")
        named = len(list((settings.paths.state / "layers").glob("*")))
        assert not list((settings.paths.state / "layers").glob("*.part"))
        assert named <= 6
        again = api.post("/v3/templates", json={"name": "x", "memoryMB": 256}).json()
        url = f"/templates/{again['templateID']}/builds/{again['buildID']}"
        api.post(f"/v2{url}", json={"fromTemplate": "base", "steps": steps}).raise_for_status()
        while (status := api.get(f"{url}/status").json()["status"]) == "building":
            time.sleep(0.1)
        assert status == "ready"


def test_a_dockerfile_is_built_started_and_built_upon(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "app.py").write_text("print('app')")
    text = (
        "FROM base AS made\nRUN mkdir /out && echo made > /out/made\n"
        "FROM base\nCOPY --from=made /out /opt/out\nWORKDIR /srv/app\nCOPY app.py .\nENV WHO=first\nUSER dev\n"
        "RUN id -un > /tmp/who\nONBUILD RUN echo child > /tmp/child\n"
    )
    (tmp_path / "Dockerfile").write_text(text)
    with EmbeddedServer(settings) as server:
        sdk(server, monkeypatch)
        app = build_app()
        app(["build", str(tmp_path), "-t", "first"], standalone_mode=False)
        box = Sandbox.create("first", timeout=60)
        said = box.commands.run("id -un; pwd; cat /tmp/who /opt/out/made; echo $WHO; python3 app.py")
        assert said.stdout.split() == ["dev", "/srv/app", "dev", "made", "first", "app"]
        assert box.commands.run("id -un", user="user").stdout == "user\n"
        with pytest.raises(BadRequest, match="cannot be deleted: 1 sandboxes use it"):
            app(["template", "delete", "first"], standalone_mode=False)
        box.kill()
        (tmp_path / "Dockerfile").write_text(
            "FROM first\nRUN pwd > /tmp/where\nFROM scratch\nCOPY --from=0 /tmp /tmp\n"
        )
        app(["build", str(tmp_path), "-t", "second:a", "--target", "0"], standalone_mode=False)
        box = Sandbox.create("second:a", timeout=60)
        said = box.commands.run("id -un; cat /tmp/child /tmp/where; echo $WHO")
        assert said.stdout.split() == ["dev", "child", "/srv/app", "first"]
        box.kill()
        app(["build", str(tmp_path), "-t", "third"], standalone_mode=False)
        box = Sandbox.create("third", timeout=60)  # nothing runs in it, and its files are there
        assert box.files.read("/tmp/child") == "child\n"
        box.kill()
    assert "CACHED" in capfd.readouterr().out


@pytest.mark.skipif(not oci.have_registry(), reason="docker-registry is not installed")
def test_a_dockerfile_takes_what_an_image_says_of_itself(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = busybox_image(
        Env=["PATH=/bin", "FROM_IMAGE=yes"],
        WorkingDir="/not/there/yet",
        User="11:12",
        OnBuild=["RUN id -u > /tmp/who; pwd >> /tmp/who"],
        Cmd=["no-such-command"],
    )
    with oci.running_registry(tmp_path / "registry") as registry, ExitStack() as cleanup:
        images = settings.images.model_copy(update={"plain_http": [registry.address]})
        server = cleanup.enter_context(EmbeddedServer(settings.model_copy(update={"images": images})))
        registry.push("team/tool", made, "v1")
        sdk(server, monkeypatch)
        (tmp_path / "Dockerfile").write_text(f"FROM {registry.address}/team/tool:v1\nENV MORE=1\n")
        build_app()(["build", str(tmp_path), "-t", "tool"], standalone_mode=False)
        box = Sandbox.create("tool", timeout=60)
        said = box.commands.run("cat /tmp/who; id -u; id -g; pwd; echo $FROM_IMAGE$MORE").stdout.split()
        assert said == ["11", "/not/there/yet", "11", "12", "/not/there/yet", "yes1"]
        box.kill()
