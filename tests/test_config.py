"""Settings: precedence, and errors that name the key and its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandyard.config import load_settings
from sandyard.errors import ConfigError


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[server]\nport = 1\nhost = '127.0.0.2'\n[pool]\nhigh = 3\n")
    settings = load_settings(
        {"server.port": 3, "pool.low": None},
        environ={"SANDYARD_SERVER__PORT": "2", "SANDYARD_POOL__HIGH": "9"},
        file=file,
    )
    assert (settings.server.port, settings.server.host, settings.pool.high) == (3, "127.0.0.2", 9)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"SANDYARD_SERVER__PORT": "many"}, "server.port from the environment: .*, not 'many'"),
        ({"SANDYARD_SERVER__PROT": "1"}, "server.prot from the environment: .*; did you mean server.port?"),
        ({"SANDYARD_NOSUCH__THING": "1"}, "nosuch.* from the environment: .*src/sandyard/config.py"),
        ({"SANDYARD_SANDBOX__CPU": "0"}, "sandbox.cpu from the environment: .*, not '0'"),
        (
            {"SANDYARD_SANDBOX__RUNTIME": "microvms"},
            "sandbox.runtime from the environment: .*'microvm'.*not 'microvms'",
        ),
        ({"SANDYARD_MICROVM__QEMU": ""}, "microvm.qemu from the environment: .*, not ''"),
        ({"SANDYARD_MICROVM__MODULES": "/m"}, "from the environment: microvm.kernel and microvm.modules come together"),
    ],
)
def test_a_wrong_value_or_key_is_named_with_its_source(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_settings(environ={"HOME": "/nonexistent", "XDG_CONFIG_HOME": "/nonexistent", **environ})


def test_a_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[server\n")
    with pytest.raises(ConfigError, match=str(broken)):
        load_settings(environ={"SANDYARD_CONFIG": str(broken)})
    with pytest.raises(ConfigError, match="does not exist"):
        load_settings(environ={"SANDYARD_CONFIG": str(tmp_path / "none.toml")})


def test_a_section_that_is_not_a_table_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("server = 5\n")
    with pytest.raises(ConfigError, match="server"):
        load_settings({"server.port": 1}, environ={}, file=file)
