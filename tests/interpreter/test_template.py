"""Making the template: what it depends on, what it is kept by, what it says when it cannot be made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandyard.config import PathSettings, Settings
from sandyard.errors import Conflict, HostError, NotFound
from sandyard.images.templates import Origin, Template, TemplateStore
from sandyard.interpreter import template as module
from sandyard.interpreter.template import ALIASES, NAME, build_interpreter, digest
from sandyard.interpreter.wheels import PROBE, Target, fetch


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run"))


def install(store: TemplateStore, name: str, base: Template | None = None) -> Template:
    with store.building() as (scratch, _):
        (scratch / "rootfs").mkdir()
        origin = Origin("a test", digest(base) if base else "", 7)
        if base is not None:
            below = base.rootfs.layers
            origin = Origin("a test", digest(base), 7, {}, "/w", "u", below, ALIASES, "start", "ready", 1024)
        return store.install(name, scratch / "rootfs", origin)


async def test_it_needs_base_and_root(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="run: sandyard setup"):
        await build_interpreter(settings)
    install(TemplateStore(settings), "base")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(HostError, match="needs root; run as root"):
        await build_interpreter(settings)


async def test_it_is_kept_while_nothing_it_depends_on_changes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TemplateStore(settings)
    base = install(store, "base")
    made = install(store, NAME, base)
    assert (await build_interpreter(settings)).template_id == made.template_id
    monkeypatch.setattr(module, "PACKAGES", ("other",))
    assert digest(base) != made.recipe
    monkeypatch.undo()
    assert digest(install(store, "base")) != made.recipe  # another base


async def test_a_build_that_fails_leaves_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> int:
        raise HostError("no packages")

    store = TemplateStore(settings)
    install(store, "base")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(module, "_make", fail)
    with pytest.raises(HostError, match="no packages"):
        await build_interpreter(settings)
    assert sorted(entry.name for entry in store.home.iterdir()) == [".lock", "base"]


def test_a_template_above_another_one(settings: Settings) -> None:
    store = TemplateStore(settings)
    base = install(store, "base")
    made = install(store, NAME, base)
    assert [layer.parent.name for layer in made.rootfs.layers] == [made.template_id, base.template_id]
    again = store.get(ALIASES[0])
    assert (again.template_id, again.start_cmd, again.ready_cmd, again.memory_mb) == (
        made.template_id,
        "start",
        "ready",
        1024,
    )
    for _ in range(3):  # what it stands on stays, however often base is made anew
        install(store, "base")
    assert store.get(NAME).rootfs.layers == made.rootfs.layers
    with pytest.raises(Conflict, match=f"'{NAME}' is made from 'base'; delete that one first"):
        store.delete("base")
    store.delete(NAME)
    store.delete("base")
    assert store.list() == []


def test_the_target_is_what_a_python_says_of_itself() -> None:
    said = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout.strip()
    target = Target.parse(said)
    assert target.python == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert target.platforms()[0].startswith("manylinux_2_")


def test_platforms_reach_down_to_old_wheels() -> None:
    platforms = Target.parse("3.13|glibc|2.41|aarch64").platforms()
    assert platforms[0] == "manylinux_2_41_aarch64"
    assert {"manylinux_2_17_aarch64", "manylinux2014_aarch64", "linux_aarch64"} <= set(platforms)
    with pytest.raises(HostError, match=r"C library is musl; set images\.base"):
        Target.parse("3.12|musl|1.2|x86_64")
    with pytest.raises(HostError, match="none that Python knows"):
        Target.parse("3.12|||x86_64")


async def test_an_index_that_lacks_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    heard: list[str] = []
    with pytest.raises(
        HostError, match=r"packages for Python 3\.11 could not be fetched.*sandyard-no-such.*pip config"
    ):
        await fetch(
            ["sandyard-no-such"], Target("3.11", "2.36", "x86_64"), tmp_path, lambda *what: heard.append(what[2])
        )
    assert heard
