"""Where the server is: no half-set variable may send a key elsewhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sandyard.config import PathSettings, Settings
from sandyard.connection import LOCAL_URL, Connection, read_credentials, resolve_connection, write_credentials
from sandyard.errors import ConfigError


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run"))


def test_flag_then_environment_then_file(environ: dict[str, str], settings: Settings) -> None:
    write_credentials(Connection("http://stored:1", "e2b_stored", "http://stored:1"), environ)
    assert resolve_connection(environ=environ, settings=settings).api_key == "e2b_stored"
    environ |= {"E2B_API_URL": "http://env:2/", "E2B_API_KEY": "e2b_env"}
    assert resolve_connection(environ=environ, settings=settings) == Connection(
        "http://env:2", "e2b_env", "http://env:2"
    )
    assert resolve_connection("http://flag:4", "e2b_f", environ=environ, settings=settings).api_key == "e2b_f"


def test_a_stored_key_stays_with_its_url(environ: dict[str, str], settings: Settings) -> None:
    write_credentials(Connection("http://stored:1", "e2b_stored", "http://stored:1"), environ)
    environ["E2B_API_URL"] = "http://other:2"
    with pytest.raises(ConfigError, match="no API key for http://other:2"):
        resolve_connection(environ=environ, settings=settings)


def test_the_local_key_is_found_only_for_the_local_server(environ: dict[str, str], settings: Settings) -> None:
    secrets = settings.paths.state / "secrets"
    secrets.mkdir(parents=True)
    (secrets / "api-key").write_text("e2b_local\n")
    assert resolve_connection(environ=environ, settings=settings) == Connection(LOCAL_URL, "e2b_local", LOCAL_URL)
    with pytest.raises(ConfigError):
        resolve_connection("http://10.0.0.1:8000", environ=environ, settings=settings)


def test_credentials_are_private_and_a_broken_file_is_named(environ: dict[str, str]) -> None:
    path = write_credentials(Connection(LOCAL_URL, "e2b_x", LOCAL_URL), environ)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    path.write_text("{")
    with pytest.raises(ConfigError, match="credentials"):
        read_credentials(environ)


def test_a_url_without_scheme_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="not an http"):
        resolve_connection("localhost:8000", "k", environ=environ)


def test_two_names_for_two_servers_are_refused(environ: dict[str, str]) -> None:
    environ |= {"E2B_API_URL": "http://env:2/", "AENV_API_URL": "http://env:2", "E2B_API_KEY": "e2b_x"}
    assert resolve_connection(environ=environ).api_url == "http://env:2"
    environ["AENV_API_URL"] = "http://aenv:3"
    with pytest.raises(ConfigError, match="name different servers"):
        resolve_connection(environ=environ)


def test_a_domain_routes_by_host_name(environ: dict[str, str]) -> None:
    environ |= {"E2B_DOMAIN": "sbx.test", "E2B_API_KEY": "e2b_x"}
    connection = resolve_connection(environ=environ)
    assert (connection.api_url, connection.sandbox_url, connection.domain) == ("https://api.sbx.test", None, "sbx.test")
    assert "e2b_x" not in repr(connection)
