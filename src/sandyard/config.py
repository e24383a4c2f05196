"""One typed tree of settings: a TOML file, then the environment, then flags; the later wins.

The file is `$SANDYARD_CONFIG`, else `~/.config/sandyard/config.toml`, else nothing. In the
environment `SANDYARD_SERVER__PORT=8001` sets `server.port`. An unknown key is an error that names
the key and where it was set: a setting that is silently ignored is worse than one that is refused.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from sandyard.errors import ConfigError

ENV_PREFIX = "SANDYARD_"
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DOMAIN = re.compile(rf"(?=.{{1,180}}$){_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,5}})?")


def bare_domain(domain: str) -> str:
    """`server.domain` without its port."""
    return domain.partition(":")[0]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class PathSettings(_Section):
    """Where things lie. State (sandboxes, database, keys) and cache (templates) may be on different disks."""

    state: Path = Path("/var/lib/sandyard")
    run: Path = Path("/run/sandyard")


class ServerSettings(_Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    allow_public: bool = False  # a public address without TLS is refused unless this is set
    database: str | None = None  # SQLAlchemy URL; default: SQLite under paths.state
    drain_seconds: float = Field(default=10.0, ge=0)
    keep_sandboxes: bool = False  # a graceful stop leaves sandboxes running, to be adopted by the next start
    domain: str | None = None  # serve `{port}-{id}.{domain}` and `api.{domain}` by Host header; `:port` if not 443
    tls_port: int | None = Field(default=None, ge=0, le=65535)  # HTTPS beside plain HTTP; 0 takes a free port
    tls_host: str | None = None  # the address of that port; None: that of server.host
    tls_cert: Path | None = None  # PEM, for `*.{domain}`; None: one of its own CA, see <state>/tls
    tls_key: Path | None = None

    @field_validator("domain")
    @classmethod
    def _is_domain(cls, value: str | None) -> str | None:
        if value is not None and not _DOMAIN.fullmatch(value.lower()):
            raise ValueError("Input should be a host name like yard.example.com, maybe with a :port")
        return value.lower() if value else value

    @model_validator(mode="after")
    def _tls_fits(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("server.tls_cert and server.tls_key come together")
        if self.tls_port is not None and self.domain is None and self.tls_cert is None:
            raise ValueError("server.tls_port needs server.domain, or server.tls_cert and server.tls_key")
        return self


class SandboxSettings(_Section):
    runtime: Literal["container", "microvm", "memory"] = "container"
    cpu: float = Field(default=1.0, gt=0)
    memory_mb: int = Field(default=512, ge=16)
    disk_mb: int = Field(default=1024, ge=16)
    pids: int = Field(default=256, ge=8)
    timeout: float = Field(default=300.0, gt=0)  # default lifetime, seconds
    max_timeout: float = Field(default=86400.0, gt=0)
    max_paused: float = Field(default=30 * 86400.0, gt=0)  # seconds after which a paused one is destroyed
    ready_timeout: float = Field(default=60.0, gt=0)  # seconds for the start command of a template to become ready
    max_count: int = Field(default=0, ge=0)  # 0: from the host's memory
    per_tenant: int = Field(default=0, ge=0)  # of one tenant, running or paused; 0: as many as there is room for
    snapshots_mb: int = Field(default=65536, ge=0)  # what the snapshots of one tenant may take; 0: no limit
    memory_overcommit: float = Field(default=8.0, ge=1)  # sum of memory limits over the host's memory
    start_concurrency: int = Field(default=0, ge=0)  # 0: four per core


class PoolSettings(_Section):
    """Warm pool per template: as many wait as the largest burst lately would have needed."""

    low: int = Field(default=2, ge=0)  # of a template in use, and of `base` always
    high: int = Field(default=64, ge=0)
    half_life: float = Field(default=300.0, gt=0)  # seconds in which the memory of a burst halves
    idle: float = Field(default=3600.0, gt=0)  # seconds without a create, after which none wait any more
    memory_share: float = Field(default=0.5, ge=0, le=1)  # of the memory limits that fit, for those that wait


class ContainerSettings(_Section):
    engine: Literal["auto", "crun", "runc", "runsc"] = "auto"
    uid_base: int = Field(default=1_879_048_192, ge=65536)  # container uid 0 on the host
    disk: Literal["auto", "loop", "none"] = "auto"


class MicroVMSettings(_Section):
    """Sandboxes with a kernel of their own; `sandyard setup microvm` gets what they boot from."""

    accel: Literal["auto", "kvm", "tcg"] = "auto"  # auto: what a guest boots with
    qemu: str = Field(default="qemu-system-x86_64", min_length=1)
    kernel: Path | None = None  # a bzImage; None: the distribution's package
    modules: Path | None = None  # its lib/modules/VERSION; both are of use to `sandyard setup microvm` alone
    guest_mb: int = Field(default=96, ge=48)  # what the guest's own kernel takes, above sandbox.memory_mb
    overhead_mb: int = Field(default=192, ge=64)  # what the VMM itself may take on the host
    disk_mb_s: int = Field(default=0, ge=0)  # MiB a second that a guest may read and write on its disk; 0: no limit
    spares: int = Field(default=2, ge=0, le=16)  # VMMs that stand ready for the next starts of a kind; 0: none do

    @model_validator(mode="after")
    def _kernel_has_modules(self) -> Self:
        if (self.kernel is None) != (self.modules is None):
            raise ValueError("microvm.kernel and microvm.modules come together")
        return self


class ImageSettings(_Section):
    base: str | None = None  # registry reference, or a rootfs tarball's path; None: choose
    mirror: str | None = None  # apt mirror; None: the host's own
    suite: str | None = None  # Debian suite; None: the host's own
    registries: list[str] = Field(default_factory=list)  # where short names are looked for, in this order
    mirrors: dict[str, list[str]] = Field(default_factory=dict)  # registry: what to try before it
    allowed: list[str] = Field(default_factory=list)  # registries (or `registry/path`) to pull from; empty: any
    plain_http: list[str] = Field(default_factory=list)  # registries without TLS; those on loopback have none
    auth_file: Path | None = None  # credentials as `docker login` keeps them; None: ~/.docker/config.json
    platform: str | None = None  # "linux/arm64"; None: the host's own
    max_layer_mb: int = Field(default=32 * 1024, ge=1)  # a layer that unpacks to more is refused
    store_high_mb: int = Field(default=0, ge=0)  # what layers of images may take; 0: two fifths of their disk
    store_low_mb: int = Field(default=0, ge=0)  # what they are brought to when they pass that; 0: four fifths of it
    aliases: dict[str, str] = Field(default_factory=dict)  # image: the template that stands for it

    @model_validator(mode="after")
    def _low_is_lower(self) -> Self:
        if 0 < self.store_high_mb < self.store_low_mb:
            raise ValueError("images.store_low_mb is more than images.store_high_mb")
        return self

    @field_validator("aliases", mode="before")
    @classmethod
    def _read_aliases(cls, value: object) -> object:
        """Also `image=template,image=template`, as an environment variable has it. Dots of a tag, which TOML
        and this tree take for levels, are put back."""
        if isinstance(value, str):
            pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
            return {image.strip(): template.strip() for image, _, template in pairs}
        return _flatten(value) if isinstance(value, Mapping) else value


class BuildSettings(_Section):
    """Template builds: how many at once, how long, and what of them is kept."""

    at_once: int = Field(default=3, ge=1)  # one tenant's: all but one, where there are more
    per_tenant: int = Field(default=64, ge=1)  # running or queued
    templates: int = Field(default=1000, ge=1)  # of one tenant
    timeout: float = Field(default=3600.0, gt=0)  # seconds from its turn on
    ready_timeout: float = Field(default=600.0, gt=0)  # seconds for a start command to become ready
    disk_mb: int = Field(default=8192, ge=16)  # what one sandbox of a build may write
    upload_mb: int = Field(default=1024, ge=1)  # one archive of a COPY as it is sent; unpacked eight times that
    files_mb: int = Field(default=8192, ge=1)  # archives of one tenant; the longest unused go first
    files_days: float = Field(default=14.0, gt=0)  # an archive that was not used for so long goes
    cache_mb: int = Field(default=16384, ge=0)  # layers kept for later builds, beyond those of templates
    log_lines: int = Field(default=20_000, ge=100)  # of one build
    untagged_days: float = Field(default=30.0, gt=0)  # a build of a template that failed or has no tag goes after that


class ExtensionSettings(_Section):
    """A service outside that is told of the life of sandboxes, and may refuse their start."""

    url: str | None = Field(default=None, pattern=r"^https?://[^/?#]+(/[^?#]*)?$")
    timeout_ms: int = Field(default=5000, ge=1, le=600_000)


def _listed(value: object) -> object:
    # The environment and flags have text only.
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Blocks = Annotated[list[IPv4Network], BeforeValidator(_listed)]
Addresses = Annotated[list[IPv4Address], BeforeValidator(_listed)]


class NetworkSettings(_Section):
    """What sandboxes reach. With egress off they have no network at all."""

    egress: Literal["off", "on"] = "off"
    denied: Blocks = []  # never reachable, beside private and special ranges: this node's own public networks, say
    reachable: Blocks = []  # private, and yet not refused: a package mirror, say; a sandbox's policy still counts
    resolvers: Addresses = []  # where names are resolved; none: the host's resolv.conf
    subnet: IPv4Network = IPv4Network("10.200.0.0/30")  # inside of every sandbox: they never meet
    spare: int = Field(default=4, ge=0)  # network namespaces made ahead
    max_connections: int = Field(default=256, ge=1)  # open at once, per sandbox


class BlobSettings(_Section):
    """Where snapshots are kept beyond this node, for every node that has the same storage. Credentials come from
    the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), never from here."""

    url: str | None = Field(default=None, pattern=r"^(s3://[a-z0-9][a-z0-9.-]+(/[A-Za-z0-9._/-]*)?|file:///.+)$")
    endpoint: str | None = Field(default=None, pattern=r"^https?://[^/?#]+$")  # of S3; None: AWS's own
    region: str = "us-east-1"
    credentials: Literal["environment", "instance", "none"] = "environment"  # instance: of the cloud's machine
    upload: Literal["off", "on_snapshot", "sync"] = "off"  # of new snapshots: behind their backs, or before the answer
    chunk_kb: int = Field(default=4096, ge=64, le=65536)  # what a layer is cut into
    concurrency: int = Field(default=4, ge=1, le=64)  # requests of one transfer at a time
    timeout: float = Field(default=60.0, gt=0)  # seconds for one request, with its repetitions
    grace_hours: float = Field(default=24.0, ge=0)  # garbage younger than that stays
    lazy: Literal["auto", "off"] = "off"  # auto: large layers are started from before they are here


class Settings(_Section):
    paths: PathSettings = PathSettings()
    server: ServerSettings = ServerSettings()
    sandbox: SandboxSettings = SandboxSettings()
    pool: PoolSettings = PoolSettings()
    container: ContainerSettings = ContainerSettings()
    microvm: MicroVMSettings = MicroVMSettings()
    images: ImageSettings = ImageSettings()
    network: NetworkSettings = NetworkSettings()
    extension: ExtensionSettings = ExtensionSettings()
    build: BuildSettings = BuildSettings()
    blobs: BlobSettings = BlobSettings()


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Load the tree. `flags` maps dotted keys ("server.port") to values; None values are left out.

    Raises `ConfigError` naming the key and its source.
    """
    environ = os.environ if environ is None else environ
    tree: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path = file or _default_file(environ)
    if path is not None:
        _merge(tree, sources, _flatten(_read_toml(path)), f"file {path}")
    _merge(tree, sources, _from_environ(environ), "the environment")
    _merge(tree, sources, {k: v for k, v in (flags or {}).items() if v is not None}, "a flag")
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        within = dict.fromkeys(source for name, source in sources.items() if name == key or name.startswith(f"{key}."))
        source = " and ".join(within) or "the settings"
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"setting {key} from {source}: there is none of that name", remedy=_near(key)) from error
        value = first["input"]
        given = f", not {str(value)[:80]!r}" if isinstance(value, str | int | float) else ""
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"setting {key} from {source}: {said}{given}") from error


def _near(key: str) -> str:
    names = {
        f"{section}.{name}"
        for section, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for name in field.annotation.model_fields
    }
    near = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {near[0]}?" if near else "all of them are in src/sandyard/config.py"


def _default_file(environ: Mapping[str, str]) -> Path | None:
    named = environ.get("SANDYARD_CONFIG")
    if named:
        return Path(named)
    config_home = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = config_home / "sandyard" / "config.toml"
    return path if path.is_file() else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"settings file {path} does not exist", remedy="create it or unset SANDYARD_CONFIG"
        ) from error
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {path}: {error}") from error


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        name.removeprefix(ENV_PREFIX).lower().replace("__", "."): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and "__" in name
    }


def _merge(tree: dict[str, Any], sources: dict[str, str], flat: Mapping[str, Any], source: str) -> None:
    for dotted, value in flat.items():
        *parents, leaf = dotted.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"setting {parent} from {sources.get(parent, source)}: a section, not a value")
        node[leaf] = value
        sources[dotted] = source
