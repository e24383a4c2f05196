"""Setup installs what is missing where it may, and says the command where it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandyard.config import PathSettings, SandboxSettings, Settings
from sandyard.errors import HostError
from sandyard.images import setup as module
from sandyard.images.setup import setup
from sandyard.images.templates import Template
from sandyard.runtimes.base import Rootfs


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Nothing is installed; `apt-get` is a program that writes down how it was called."""
    apt = tmp_path / "bin" / "apt-get"
    apt.parent.mkdir()
    apt.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n[ -e {tmp_path}/lists ] || [ "$1" = update ] || exit 100\n'
        f'[ "$1" = update ] && : > {tmp_path}/lists\necho done\n'
    )
    apt.chmod(0o755)
    monkeypatch.setattr(module, "_SYSTEM_PATH", str(apt.parent))
    monkeypatch.setenv("PATH", f"{apt.parent}:/usr/bin:/bin")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return Settings(paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run"))


async def test_packages_are_installed_after_fetching_lists(settings: Settings, tmp_path: Path) -> None:
    heard: list[tuple[str, float | None, str]] = []
    await module._install(["crun", "mmdebstrap"], lambda *what: heard.append(what))
    install = "install -y --no-install-recommends crun mmdebstrap"
    assert (tmp_path / "calls").read_text().splitlines() == [install, "update", install]
    assert heard[0] == ("packages", 0.0, "installing crun, mmdebstrap")
    assert heard[-1] == ("packages", 1.0, "installed crun, mmdebstrap")


async def test_a_user_who_is_not_root_gets_the_command(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(HostError, match="run: sudo apt-get install -y --no-install-recommends crun"):
        await setup(settings)


async def test_a_host_without_apt_gets_the_names(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SYSTEM_PATH", "/nonexistent")
    with pytest.raises(HostError, match="missing on this host: crun, e2fsprogs"):
        await setup(settings)


async def test_a_runtime_that_needs_nothing(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def build(settings: Settings, progress: object) -> Template:
        return Template("base", "id", Rootfs([]), 0.0, 0, "a test")

    monkeypatch.setattr(module, "build_base", build)
    memory = settings.model_copy(update={"sandbox": SandboxSettings(runtime="memory")})
    ready = await setup(memory)
    assert (ready.installed, ready.runtime.works, ready.template.source) == ([], True, "a test")
    assert not (tmp_path / "calls").exists()
