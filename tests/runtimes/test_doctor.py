"""The doctor proves by doing, and what does not work comes with a remedy."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sandyard import doctor
from sandyard.config import ContainerSettings, PathSettings, ServerSettings, Settings
from sandyard.doctor import Finding, diagnose
from sandyard.runtimes.base import Rootfs


async def found_by(settings: Settings) -> dict[str, Finding]:
    return {finding.name: finding async for finding in diagnose(settings)}


@pytest.mark.root
async def test_a_host_that_works(settings: Settings) -> None:
    free = settings.model_copy(update={"server": ServerSettings(port=0)})
    found = await found_by(free)
    for name in ("privileges", "packages", "free disk", "memory", "port", "container engine", "create a sandbox"):
        assert found[name].ok, found[name]
    for name in ("user namespace", "disk limit", "memory limit"):
        assert found[name].ok, found[name]
    assert found["template base"].remedy == "run: sandyard setup"  # these paths have none


@pytest.mark.root
async def test_no_engine(settings: Settings) -> None:
    wanted = settings.model_copy(update={"container": ContainerSettings(engine="runsc")})
    found = await found_by(wanted)
    assert not found["packages"].ok
    assert "runsc" in (found["packages"].remedy or "")
    assert not found["container engine"].ok
    assert "create a sandbox" not in found


async def test_an_unprivileged_user_gets_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    found = await found_by(Settings(paths=PathSettings(state=tmp_path / "s", run=tmp_path / "r")))
    assert not found["privileges"].ok
    assert not found["container engine"].ok
    assert "root" in (found["container engine"].remedy or "")


async def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = ServerSettings(port=taken.getsockname()[1])
        finding = doctor._port(Settings(server=server))
    assert not finding.ok
    assert "server.port" in (finding.remedy or "")


@pytest.mark.root
async def test_a_broken_promise_is_a_finding(
    settings: Settings, empty: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(sandbox: object) -> str:
        raise doctor._BrokenPromise("it does not hold")

    monkeypatch.setattr(doctor, "_user_namespace", broken)
    found = await found_by(settings)
    assert found["user namespace"] == Finding("user namespace", False, "it does not hold", "run: sandyard conformance")
    assert found["disk limit"].ok
