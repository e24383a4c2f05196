"""Where a build starts: a template of the yard, one that stands for an image, or an image that is pulled."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sandyard.config import Settings
from sandyard.errors import BadRequest, NotFound, SandyardError
from sandyard.images.build import Base, Level, Log
from sandyard.images.build.base import BASE_STEP, BuildFailed
from sandyard.images.build.expand import DEFAULT_PATH
from sandyard.images.dockerfile.stages import SCRATCH
from sandyard.images.oci import registry
from sandyard.images.oci.manifest import ImageConfig
from sandyard.images.oci.pull import Needs, candidates, needs, pull
from sandyard.images.oci.reference import Reference
from sandyard.images.oci.room import Collect, collect_nothing
from sandyard.runtimes.base import Rootfs
from sandyard.sandboxes import Catalog
from sandyard.server.builds.outward import PublicOnly, trusted

_needs: ContextVar[Needs | None] = ContextVar("needs of the build", default=None)
# What the images that SDKs name by themselves are here.
STANDARD = {"e2bdev/base": "base", "e2bdev/code-interpreter": "code-interpreter"}
DEFAULT_IMAGE = "e2bdev/base"


@dataclass(frozen=True, slots=True)
class Credentials:
    """For one registry, given with a build; kept nowhere."""

    username: str
    password: str


@dataclass(frozen=True, slots=True)
class Origin:
    """What a build is asked to start from: exactly one of the two."""

    image: str | None = None
    template: str | None = None
    credentials: Credentials | None = None


def template_of_image(settings: Settings, image: str) -> str | None:
    """The template that stands for an image: by `images.aliases`, else by what the standard images are. A name
    without a tag there stands for every tag."""
    known: Mapping[str, str] = {**STANDARD, **settings.images.aliases}
    name, _, digest = image.strip().partition("@")
    for prefix in ("docker.io/", "index.docker.io/", "registry-1.docker.io/"):
        name = name.removeprefix(prefix)
    name = name.removeprefix("library/")
    head, _, tail = name.rpartition("/")
    plain, _, tag = tail.partition(":")
    plain = f"{head}/{plain}" if head else plain
    tagged = f"{plain}:{tag or 'latest'}"
    return (known.get(name) or known.get(tagged) or known.get(plain)) if not digest else known.get(plain)


class Bases:
    def __init__(self, settings: Settings, catalog: Catalog) -> None:
        self._settings = settings
        self._catalog = catalog
        self._nothing = settings.paths.state.absolute() / "scratch"
        self.collect: Collect = collect_nothing
        self.settled: Callable[[], None] = lambda: None  # told when what a build pulled is held no more

    @contextlib.asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """For one build, in its task: what is pulled for it stays until it ends, and by then has a name. Raises
        `HostError`."""
        try:
            async with needs(self._settings, self.collect) as given:
                token = _needs.set(given)
                try:
                    yield
                finally:
                    _needs.reset(token)
        finally:
            self.settled()

    async def find(self, origin: Origin, tenant: str, log: Log) -> Base:
        """Raises `BuildFailed` at the base step, naming what was tried and why it failed."""
        try:
            if origin.template is not None:
                return self._of_template(origin.template, tenant, origin.template)
            return await self._of_image(origin, tenant, log)
        except BuildFailed:
            raise
        except SandyardError as error:
            raise BuildFailed(BASE_STEP, str(error)) from error

    async def from_dockerfile(self, name: str, tenant: str, log: Log) -> Base:
        """What a Dockerfile's FROM means: `scratch`, a template of the tenant or of the node, else an image with all
        that it says of itself. Another tenant's template, public or not, stands for no image. Raises as `find`."""
        try:
            if name == SCRATCH:
                return await asyncio.to_thread(self._scratch, tenant)
            try:
                if self._catalog.find(name, tenant).tenant in (None, tenant):
                    return self._of_template(name, tenant, f"template {name}")
            except (NotFound, BadRequest):
                pass  # a name of an image, then
            return await self._of_image(Origin(name), tenant, log, whole=True)
        except BuildFailed:
            raise
        except SandyardError as error:
            raise BuildFailed(BASE_STEP, str(error)) from error

    def _of_template(self, reference: str, tenant: str, label: str) -> Base:
        template, build = self._catalog.resolve(reference, tenant)
        view = self._catalog.view(template, build)
        oci = build.config.get("oci")
        return Base(view.rootfs, _key(tenant, build.id), label, view.start_cmd, view.ready_cmd, oci)

    def _scratch(self, tenant: str) -> Base:
        """No file at all: a layer with nothing in it."""
        if not self._nothing.is_dir():
            self._nothing.mkdir(parents=True, exist_ok=True)
        base = self._settings.container.uid_base
        os.chown(self._nothing, base, base)
        self._nothing.chmod(0o755)
        return Base(Rootfs([self._nothing]), _key(tenant, SCRATCH), SCRATCH, oci={"Env": [f"PATH={DEFAULT_PATH}"]})

    async def _of_image(self, origin: Origin, tenant: str, log: Log, *, whole: bool = False) -> Base:
        image = origin.image or DEFAULT_IMAGE
        if (name := template_of_image(self._settings, image)) is not None:
            try:
                return self._of_template(name, tenant, f"{image} (template {name})")
            except NotFound as error:
                raise BuildFailed(BASE_STEP, f"image '{image}' stands for a template here: {error}") from error
        _check_public(image)
        async with contextlib.AsyncExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            settings = _with_credentials(self._settings, image, origin.credentials, Path(scratch))
            held = _needs.get()
            if held is None:
                held = await stack.enter_async_context(needs(settings, self.collect))
            given = replace(
                held,
                owner=tenant,
                transports=lambda host: None if host in trusted(settings.images) else PublicOnly(settings),
            )
            pulled = await pull(
                settings, image, lambda _stage, _part, line: log(line, level=Level.DEBUG, step=BASE_STEP), given
            )
        # As elsewhere that speaks this API: the image's user and directory do not count, its environment does.
        rootfs = Rootfs(list(pulled.trees), dict(pulled.config.env))
        oci = _oci(pulled.config) if whole else None
        return Base(rootfs, _key(tenant, pulled.digest), f"{image} ({pulled.digest})", oci=oci)


def _oci(config: ImageConfig) -> Mapping[str, Any]:
    """An image's `config` object, by the names of the OCI image specification."""
    return {
        "Env": [f"{name}={value}" for name, value in config.env.items()],
        "WorkingDir": config.workdir,
        "User": config.user,
        "Entrypoint": list(config.entrypoint),
        "Cmd": list(config.command),
        "Labels": dict(config.labels),
        "ExposedPorts": {port: {} for port in config.ports},
        "Volumes": {volume: {} for volume in config.volumes},
        "Shell": list(config.shell),
        "Healthcheck": config.healthcheck,
        "StopSignal": config.stop_signal,
        "OnBuild": list(config.on_build),
    }


def _check_public(image: str) -> None:
    """Files of this machine are its operator's: no request over the network may name one."""
    kind = image.partition(":")[0]
    if kind in ("oci", "oci-archive", "docker-archive", "dir", "containers-storage") or image.startswith(("/", ".")):
        raise BadRequest(f"image '{image}': give the name of an image in a registry", field="fromImage")


def _with_credentials(settings: Settings, image: str, given: Credentials | None, scratch: Path) -> Settings:
    """Settings whose credentials are those that came with the build, for the registries the image may come from.
    Without such, the operator's own are for images that `images.allowed` names (as `candidates` saw to): what
    else they open is not every tenant's to read, be it in a registry that the settings name."""
    hosts = {host for host, _ in candidates(settings, Reference.parse(image))}
    if given is not None:
        auths = dict.fromkeys(hosts, _basic(given.username, given.password))
    elif not settings.images.allowed:
        auths = {}
    else:
        own = registry.Credentials.load(settings)
        known = {host: own.of(host) for host in hosts}
        auths = {host: _basic(*login) for host, login in known.items() if login is not None}
    path = scratch / "auth.json"
    path.touch(0o600)
    path.write_text(json.dumps({"auths": {host: {"auth": auth} for host, auth in auths.items()}}))
    return settings.model_copy(update={"images": settings.images.model_copy(update={"auth_file": path})})


def _basic(username: str, password: str) -> str:
    return base64.b64encode(f"{username}:{password}".encode()).decode()


def _key(tenant: str, source: str) -> str:
    """Of this tenant alone: nobody learns from a quick build what others have built."""
    return hashlib.sha256(f"{tenant}\0{source}".encode()).hexdigest()
