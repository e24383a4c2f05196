"""Images from a real registry, from files, and from sources that lie."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandyard.config import ImageSettings, PathSettings, Settings
from sandyard.errors import BadRequest, HostError
from sandyard.images.oci.base import SourceError, digest_of
from sandyard.images.oci.layers import LayerStore, chain_id
from sandyard.images.oci.manifest import default_platform
from sandyard.images.oci.pull import candidates, pull
from sandyard.images.oci.reference import Reference
from sandyard.images.oci.registry import RegistrySource
from tests.images import oci
from tests.images.oci import Entry, Registry, folder, free_port, image, layer, running_registry

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
needs_registry = pytest.mark.skipif(not oci.have_registry(), reason="docker-registry is not installed")

LOWER = layer(folder("etc"), Entry("etc/name", b"lower"), Entry("etc/old", b"old"))
UPPER = layer(folder("etc"), Entry("etc/name", b"upper"), Entry("etc/.wh.old"))
MakeSettings = Callable[..., Settings]


@pytest.fixture
def make(tmp_path: Path) -> MakeSettings:
    def settings(**images: Any) -> Settings:
        return Settings(
            paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run"),
            images=ImageSettings.model_validate(images),
        )

    return settings


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


def nothing_left(settings: Settings) -> bool:
    home = LayerStore(settings).home
    downloads = settings.paths.state / "downloads"
    return not list(home.glob(".making-*")) and not list(downloads.glob("*"))


# --- names ---


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("debian", (None, "debian", None, None)),
        ("debian:12", (None, "debian", "12", None)),
        ("team/tool:1", (None, "team/tool", "1", None)),
        ("host.example/team/tool", ("host.example", "team/tool", None, None)),
        ("localhost/x:y", ("localhost", "x", "y", None)),
        ("127.0.0.1:5000/x", ("127.0.0.1:5000", "x", None, None)),
        (f"a:1@sha256:{'0' * 64}", (None, "a", "1", f"sha256:{'0' * 64}")),
    ],
)
def test_names_are_read_as_everywhere(text: str, parts: tuple[object, ...]) -> None:
    found = Reference.parse(text)
    assert (found.registry, found.path, found.tag, found.digest) == parts
    assert Reference.parse(str(found)) == found


@pytest.mark.parametrize("text", ["", "Debian", "a:", "a:b c", "a@sha256:12", "a//b", "http://a/b", "a/../b"])
def test_bad_names_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="image"):
        Reference.parse(text)


def test_mirrors_come_first_and_short_names_are_searched(make: MakeSettings) -> None:
    settings = make(registries=["one.example/library", "two.example"], mirrors={"one.example": ["m.example/proxy"]})
    assert candidates(settings, Reference.parse("debian:12")) == [
        ("m.example", "proxy/library/debian"),
        ("one.example", "library/debian"),
        ("two.example", "debian"),
    ]
    with pytest.raises(BadRequest, match=r"images\.registries"):
        candidates(make(), Reference.parse("debian"))


def test_only_allowed_registries_are_asked(make: MakeSettings) -> None:
    settings = make(allowed=["good.example/team"])
    assert candidates(settings, Reference.parse("good.example/team/x")) == [("good.example", "team/x")]
    for name in ("bad.example/x", "good.example/other/x", "good.example/teamster/x"):
        with pytest.raises(BadRequest, match="not of a registry that is allowed"):
            candidates(settings, Reference.parse(name))


# --- a real registry ---


@root_only
@needs_registry
async def test_pull_by_tag_by_digest_and_the_layers_are_shared(registry: Registry, make: MakeSettings) -> None:
    first = image([LOWER, UPPER], Env=["A=1", "B=x=y"], WorkingDir="/srv", User="app", Cmd=["run"])
    second = image([LOWER])
    registry.push("team/first", first, "v1")
    registry.push("team/second", second)
    settings = make()
    said: list[str] = []
    pulled = await pull(settings, f"{registry.address}/team/first:v1", lambda _stage, _part, line: said.append(line))
    assert (pulled.trees[0] / "etc/name").read_text() == "upper"
    assert (pulled.trees[1] / "etc/name").read_text() == "lower"
    assert (pulled.config.env, pulled.config.workdir, pulled.config.user) == ({"A": "1", "B": "x=y"}, "/srv", "app")
    assert pulled.digest == first.manifest
    assert any("layer 2 of 2" in line for line in said)
    again = await pull(settings, f"{registry.address}/team/first@{first.manifest}")
    other = await pull(settings, f"{registry.address}/team/second")
    assert again.trees == pulled.trees
    assert list(other.trees) == [pulled.trees[1]]
    assert len(LayerStore(settings).all()) == 2
    assert nothing_left(settings)


@root_only
@needs_registry
async def test_the_platform_is_chosen_or_missed_by_name(registry: Registry, make: MakeSettings) -> None:
    there, elsewhere = image([LOWER]), image([UPPER])
    registry.push("multi", oci.index({"linux/other": elsewhere, default_platform(): there}))
    assert (await pull(make(), f"{registry.address}/multi")).digest == there.manifest
    assert (await pull(make(platform="linux/other"), f"{registry.address}/multi")).digest == elsewhere.manifest
    with pytest.raises(HostError, match="no image for linux/none"):
        await pull(make(platform="linux/none"), f"{registry.address}/multi")


@root_only
@needs_registry
async def test_a_dead_mirror_is_passed_over(registry: Registry, make: MakeSettings) -> None:
    registry.push("m/library/tool", image([LOWER]))
    dead = f"127.0.0.1:{free_port()}"
    settings = make(registries=["hub.example/library"], mirrors={"hub.example": [dead, f"{registry.address}/m"]})
    pulled = await pull(settings, "tool")
    assert pulled.source == f"{registry.address}/m/library/tool"


@root_only
@needs_registry
async def test_a_failure_lists_each_candidate(registry: Registry, make: MakeSettings) -> None:
    dead = f"127.0.0.1:{free_port()}"
    settings = make(registries=[dead, registry.address])
    with pytest.raises(HostError) as caught:
        await pull(settings, "no/such:tag")
    assert f"{dead}/no/such: " in str(caught.value)
    assert f"{registry.address}/no/such: 404: no manifest of tag" in str(caught.value)


@root_only
@needs_registry
async def test_credentials(tmp_path: Path, make: MakeSettings) -> None:
    with running_registry(tmp_path / "closed", password=True) as closed:
        closed.push("private", image([LOWER]))
        name = f"{closed.address}/private"
        with pytest.raises(HostError, match="401: credentials are needed"):
            await pull(make(), name)
        auth = tmp_path / "auth.json"
        for password, works in (("wrong", False), (oci.PASSWORD, True)):
            packed = base64.b64encode(f"{oci.USER}:{password}".encode()).decode()
            auth.write_text(json.dumps({"auths": {closed.address: {"auth": packed}}}))
            if works:
                assert (await pull(make(auth_file=auth), name)).trees
            else:
                with pytest.raises(HostError, match="401: the credentials are refused"):
                    await pull(make(auth_file=auth), name)


@root_only
@needs_registry
@pytest.mark.parametrize("damage", ["cut", "changed"])
async def test_a_damaged_blob_is_refused(damage: str, registry: Registry, make: MakeSettings) -> None:
    made = image([layer(folder(damage), Entry(f"{damage}/x", os.urandom(3000)))])
    registry.push(f"damaged/{damage}", made)
    blob = registry.blob_file(made.layers[0])
    data = blob.read_bytes()
    blob.write_bytes(data[:-100] if damage == "cut" else data[:-100] + bytes(100))
    settings = make()
    with pytest.raises(HostError, match=r"blob|layer 1 is sha256"):
        await pull(settings, f"{registry.address}/damaged/{damage}")
    assert LayerStore(settings).all() == []
    assert nothing_left(settings)


@root_only
@needs_registry
async def test_a_layer_that_is_not_what_its_image_says_is_refused(registry: Registry, make: MakeSettings) -> None:
    made = image([LOWER])
    config = json.loads(next(data for data in made.blobs.values() if b"diff_ids" in data))
    config["rootfs"]["diff_ids"] = [f"sha256:{'1' * 64}"]
    lying = image([LOWER])
    document = json.loads(lying.blobs[lying.manifest])
    data = json.dumps(config).encode()
    document["config"] |= {"digest": digest_of(data), "size": len(data)}
    manifest = json.dumps(document).encode()
    blobs = {**lying.blobs, digest_of(data): data, digest_of(manifest): manifest}
    del blobs[lying.manifest]
    registry.push("lying", oci.HandMade(blobs, digest_of(manifest), [], []))
    with pytest.raises(HostError, match="its image says sha256:1111"):
        await pull(make(), f"{registry.address}/lying")


# --- registries that lie ---


def bearer(realm: str, rest: str = "") -> httpx.Response:
    return httpx.Response(401, headers={"www-authenticate": f'Bearer realm="{realm}"{rest}'})


class _Endless(httpx.AsyncByteStream):
    def __init__(self) -> None:
        self.given = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.given += 1 << 16
            yield b" " * (1 << 16)


async def manifest_of(answer: Callable[[httpx.Request], httpx.Response], registry: str = "hub.test") -> bytes:
    source = RegistrySource(registry, "x", None, plain_http=False, transport=httpx.MockTransport(answer))
    try:
        return await source.manifest("latest")
    finally:
        await source.close()


@pytest.mark.parametrize("realm", ["http://[", "https://a:99999/", "file:///etc/passwd", "http://\\", "https://"])
async def test_a_token_service_that_is_nowhere(realm: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host != "hub.test":
            raise httpx.ConnectError("nobody there")
        return bearer(realm)

    with pytest.raises(SourceError, match=r"hub\.test/x: "):
        await manifest_of(answer)


@pytest.mark.parametrize("said", [b"[]", b"[" * 100_000, b"\xff", b'{"token": 1}', '{"token": "é\\n"}'.encode(), b""])
async def test_a_token_service_that_answers_no_token(said: bytes) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return (
            httpx.Response(200, stream=httpx.ByteStream(said))
            if request.url.path == "/t"
            else bearer("https://hub.test/t")
        )

    with pytest.raises(SourceError, match=r"hub\.test/x: "):
        await manifest_of(answer)


async def test_a_token_service_that_does_not_end_is_cut_off() -> None:
    endless = _Endless()

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=endless) if request.url.path == "/t" else bearer("https://hub.test/t")

    with pytest.raises(SourceError, match="the answer passes 1048576 bytes"):
        await manifest_of(answer)
    assert endless.given <= 2 << 20


@pytest.mark.parametrize("rest", [" " + "a" * 90_000, " " + 'a="' * 30_000, " " + "=" * 90_000])
async def test_a_challenge_is_read_in_no_time(rest: str) -> None:
    began = time.process_time()
    with pytest.raises(SourceError):
        await manifest_of(lambda _: bearer("file:///", rest))
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("registry", "scheme"),
    [
        ("localhost", "http"),
        ("localhost:5000", "http"),
        ("127.0.0.1:5000", "http"),
        ("127.9.9.9", "http"),
        ("[::1]:5000", "http"),
        ("[::1]", "http"),
        ("127.example", "https"),
        ("localhost.example:5000", "https"),
        ("hub.test", "https"),
    ],
)
async def test_loopback_only_has_no_tls(registry: str, scheme: str) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.scheme)
        return httpx.Response(200, content=b"{}")

    assert await manifest_of(answer, registry) == b"{}"
    assert asked == [scheme]


async def test_a_port_that_cannot_be_is_a_failure_of_the_candidate(make: MakeSettings) -> None:
    with pytest.raises(HostError, match=r"image 'hub\.test:99999/x' could not be pulled: "):
        await pull(make(), "hub.test:99999/x")


# --- files ---


@root_only
async def test_an_oci_layout_and_a_docker_archive_give_the_same(tmp_path: Path, make: MakeSettings) -> None:
    settings = make()
    layout = oci.write_layout(tmp_path / "layout", image([LOWER, UPPER], User="u"), "v2")
    archive = oci.write_docker_archive(tmp_path / "saved.tar", [LOWER, UPPER], User="u")
    one = await pull(settings, f"oci:{layout}:v2")
    two = await pull(settings, f"docker-archive:{archive}")
    assert one.trees == two.trees
    assert one.config.user == two.config.user == "u"
    with pytest.raises(HostError, match="no image 'v3'"):
        await pull(settings, f"oci:{layout}:v3")
    with pytest.raises(BadRequest, match="does not exist"):
        await pull(settings, "oci:/no/such/layout")


# --- the store ---


@root_only
async def test_layers_that_need_those_below_are_kept_by_chain(make: MakeSettings, tmp_path: Path) -> None:
    """The same tar on two bases is two layers if it leaves out a directory that the bases have otherwise."""
    settings = make()
    bare = layer(Entry("tmp/x", b"1"))
    trees = []
    for mode in (0o1777, 0o700):
        made = image([layer(folder("tmp", mode)), bare])
        pulled = await pull(settings, f"oci:{oci.write_layout(tmp_path / str(mode), made)}")
        trees.append(pulled.trees[0])
        assert (pulled.trees[0] / "tmp").stat().st_mode & 0o7777 == mode
        assert pulled.layers[0].key == chain_id(made.diff_ids).partition(":")[2]
    assert trees[0] != trees[1]


@root_only
async def test_two_pulls_at_once_make_one_layer(make: MakeSettings, tmp_path: Path) -> None:
    settings = make()
    layout = oci.write_layout(tmp_path / "layout", image([LOWER, UPPER]))
    pulled = await asyncio.gather(*(pull(settings, f"oci:{layout}") for _ in range(4)))
    assert len({tuple(found.trees) for found in pulled}) == 1
    assert len(LayerStore(settings).all()) == 2
    assert nothing_left(settings)
