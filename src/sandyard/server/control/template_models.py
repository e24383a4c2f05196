"""Bodies of templates, builds and tags, field by field as E2B clients send and expect them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sandyard.images.dockerfile.syntax import LIMIT
from sandyard.runtimes.base import Resources
from sandyard.sandboxes import Build, Template
from sandyard.sandboxes.catalog import DEFAULT_TAG
from sandyard.server.builds import LogEntry
from sandyard.server.control.models import ENVD_VERSION, cpu_count


def _encodable(value: str) -> str:
    value.encode()  # JSON can write half of a surrogate pair
    return value


Text = Annotated[str, AfterValidator(_encodable)]
Cpus = Annotated[int, Field(ge=1, le=1024)]
Memory = Annotated[int, Field(ge=128, le=1 << 24)]
Disk = Annotated[int, Field(ge=16, le=1 << 24)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore")


class NewTemplate(_Request):
    """`alias` is the older word for `name`."""

    name: Text | None = Field(default=None, description="`name` or `name:tag`.", max_length=256)
    alias: Text | None = Field(default=None, max_length=256)
    tags: list[Text] = Field(default_factory=list, max_length=100)
    cpuCount: Cpus | None = None
    memoryMB: Memory | None = None
    diskMB: Disk | None = Field(default=None, description="What a sandbox may write above the template.")


class Registry(_Request):
    """Who asks a registry for a private image. Kept nowhere."""

    type: Literal["registry", "aws", "gcp"] = "registry"
    username: Text = ""
    password: Text = ""
    serviceAccountJson: Text = ""


class NewStep(_Request):
    type: Text
    args: list[Text] = Field(default_factory=list, max_length=10_000)
    filesHash: Text | None = None
    force: bool | None = None


class NewDockerfile(_Request):
    """A Dockerfile instead of steps. `contextHash`: the archive of its files, uploaded as that of a COPY is."""

    text: Text = Field(max_length=LIMIT)
    buildArgs: dict[Text, Text] = Field(default_factory=dict, max_length=1000)
    target: Text | None = Field(default=None, max_length=256)
    contextHash: Text | None = None


class BuildOrder(_Request):
    """Exactly one of `fromImage`, `fromTemplate` and `dockerfile`."""

    dockerfile: NewDockerfile | None = None
    fromImage: Text | None = None
    fromTemplate: Text | None = None
    fromImageRegistry: Registry | None = None
    force: bool | None = None
    steps: list[NewStep] = Field(default_factory=list, max_length=1000)
    startCmd: Text | None = None
    readyCmd: Text | None = None


class NewTags(_Request):
    target: Text = Field(description="`name` or `name:tag`: the build that gets the tags.")
    tags: list[Text] = Field(min_length=1, max_length=100)


class OldTags(_Request):
    name: Text
    tags: list[Text] = Field(min_length=1, max_length=100)


class TemplateUpdate(_Request):
    public: bool | None = Field(default=None, description="Whether other tenants may use it.")


class TemplateRequested(BaseModel):
    """What a registered build answers with."""

    templateID: str
    buildID: str
    public: bool
    names: list[str]
    tags: list[str]
    aliases: list[str]


class TemplateInfo(BaseModel):
    """A template by its newest ready build; `buildStatus` is that of the newest one."""

    templateID: str
    buildID: str
    aliases: list[str]
    names: list[str]
    public: bool
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    createdAt: datetime
    updatedAt: datetime
    createdBy: dict[str, Any] | None = None
    lastSpawnedAt: datetime | None = None
    spawnCount: int = 0
    buildCount: int
    buildStatus: str
    envdVersion: str = ENVD_VERSION

    @classmethod
    def of(cls, template: Template, resources: Resources) -> TemplateInfo:
        builds = list(template.builds.values())
        newest = builds[-1] if builds else None
        current = template.build(DEFAULT_TAG) or next((b for b in reversed(builds) if b.status == "ready"), newest)
        sizes = sizes_of(current, resources)
        return cls(
            templateID=template.id,
            buildID=current.id if current is not None else "",
            aliases=template.names,
            names=template.names,
            public=template.public,
            cpuCount=cpu_count(sizes),
            memoryMB=sizes.memory_mb,
            diskSizeMB=sizes.disk_mb,
            createdAt=moment(template.created_at),
            updatedAt=moment(template.updated_at),
            buildCount=len(builds),
            buildStatus=newest.status if newest is not None else "waiting",
        )


class BuildInfo(BaseModel):
    buildID: str
    status: str
    createdAt: datetime
    updatedAt: datetime
    finishedAt: datetime | None
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    envdVersion: str = ENVD_VERSION

    @classmethod
    def of(cls, build: Build, resources: Resources) -> BuildInfo:
        sizes = sizes_of(build, resources)
        finished = moment(build.finished_at) if build.finished_at is not None else None
        return cls(
            buildID=build.id,
            status=build.status,
            createdAt=moment(build.created_at),
            updatedAt=finished or moment(build.created_at),
            finishedAt=finished,
            cpuCount=cpu_count(sizes),
            memoryMB=sizes.memory_mb,
            diskSizeMB=sizes.disk_mb,
        )


class TemplateWithBuilds(BaseModel):
    templateID: str
    public: bool
    aliases: list[str]
    names: list[str]
    createdAt: datetime
    updatedAt: datetime
    lastSpawnedAt: datetime | None = None
    spawnCount: int = 0
    builds: list[BuildInfo]

    @classmethod
    def of(cls, template: Template, builds: Sequence[Build], resources: Resources) -> TemplateWithBuilds:
        return cls(
            templateID=template.id,
            public=template.public,
            aliases=template.names,
            names=template.names,
            createdAt=moment(template.created_at),
            updatedAt=moment(template.updated_at),
            builds=[BuildInfo.of(build, resources) for build in builds],
        )


class TemplateAlias(BaseModel):
    templateID: str
    public: bool


class TemplateNames(BaseModel):
    names: list[str]


class TagInfo(BaseModel):
    tag: str
    buildID: str
    createdAt: datetime


class AssignedTags(BaseModel):
    tags: list[str]
    buildID: str


class UploadLink(BaseModel):
    """`present`: an archive of that hash is here already. `url` takes one PUT of a tar or tar.gz, without a key."""

    present: bool
    url: str


class BuildLogEntry(BaseModel):
    timestamp: datetime
    message: str
    level: str
    step: str | None = None

    @classmethod
    def of(cls, entry: LogEntry) -> BuildLogEntry:
        return cls(timestamp=moment(entry.at), message=entry.message, level=entry.level.value, step=entry.step)


class BuildReason(BaseModel):
    message: str
    step: str | None = None
    logEntries: list[BuildLogEntry] = Field(default_factory=list)


class BuildStatus(BaseModel):
    templateID: str
    buildID: str
    status: str
    logs: list[str]
    logEntries: list[BuildLogEntry]
    reason: BuildReason | None = None


class BuildLogs(BaseModel):
    logs: list[BuildLogEntry]


def sizes_of(build: Build | None, default: Resources) -> Resources:
    sizes = build.config.get("resources") if build is not None else None
    return Resources(**sizes) if sizes else default


def moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
