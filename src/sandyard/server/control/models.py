"""Bodies of the control plane, field by field as E2B clients send and expect them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from sandyard.runtimes.base import Resources
from sandyard.sandboxes import Sandbox, Snapshot
from sandyard.server.usage import MIB, Sample

ENVD_VERSION = "0.6.13"  # the envd whose features are offered


def _number(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("Input should be a number of seconds")
    return value


def _encodable(value: str) -> str:
    # JSON can write half of a surrogate pair; no answer, database or process could take it.
    value.encode()
    return value


Seconds = Annotated[int, BeforeValidator(_number), Field(ge=-(10**12), le=10**12)]
Text = Annotated[str, AfterValidator(_encodable)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore")  # newer clients send fields that older servers do not know


class AutoResume(_Request):
    enabled: bool = False


class NewSandbox(_Request):
    templateID: str = Field(min_length=1, description="Name or id of a template.")
    timeout: Seconds | None = Field(default=None, description="Lifetime in seconds; more than 0.")
    metadata: dict[Text, Text] = Field(
        default_factory=dict,
        description="Labels. `sandyard.lease` binds the sandbox to a lease, `sandyard.idle_timeout` (seconds) "
        "kills it after so long without use.",
    )
    envVars: dict[Text, Text] = Field(default_factory=dict)
    secure: bool = False
    autoPause: bool = False
    autoPauseMemory: bool = Field(default=True, description="Whether the pause at its end keeps the memory.")
    autoResume: AutoResume | None = None
    allow_internet_access: bool | None = None
    network: dict[str, Any] | None = None
    mcp: dict[str, Any] | None = None
    volumeMounts: list[dict[str, Any]] | None = None
    customExtensionParams: dict[str, Any] = Field(default_factory=dict, description="Read by the node's extension.")


class ConnectSandbox(_Request):
    timeout: Seconds | None = None
    memory: bool = Field(default=True, description="false: a paused sandbox boots from its files.")


class ResumeSandbox(ConnectSandbox):
    autoPause: bool | None = Field(default=None, description="Replaces what was said at create.")


class PauseSandbox(_Request):
    memory: bool = Field(default=True, description="false: only the files are kept, and a resume boots.")
    requireHealthyGuest: bool = Field(default=False, description="Refuse while the sandbox does not answer.")


class ForkSandbox(_Request):
    timeout: Seconds | None = None
    count: int = Field(default=1, ge=1, le=100)


class NewSnapshot(_Request):
    name: Text | None = Field(default=None, max_length=256, description="`name` or `name:tag`.")
    memory: bool = Field(default=False, description="true: refused where the runtime keeps files only.")


class SetTimeout(_Request):
    timeout: Seconds = Field(description="Seconds from now; 0 or less ends the sandbox now.")


class Refresh(_Request):
    duration: Seconds | None = Field(default=None, ge=0, le=3600)


class WarmRequest(_Request):
    templateID: str = Field(min_length=1)
    count: int = Field(ge=0, le=10_000)


class NewLease(_Request):
    ttl: float = Field(gt=0, le=86400, description="Seconds without a renewal after which its sandboxes are killed.")
    labels: dict[Text, Text] = Field(default_factory=dict)
    warm: list[WarmRequest] = Field(default_factory=list, description="Bursts of creates to prepare for.")


class SweepRequest(_Request):
    metadata: dict[Text, Text] = Field(min_length=1, description="Every label a sandbox must carry to be killed.")


class LeaseView(BaseModel):
    leaseID: str
    ttl: float
    expiresAt: datetime


class SandboxView(BaseModel):
    """What create and connect answer."""

    templateID: str
    sandboxID: str
    clientID: str = ""
    envdVersion: str = ENVD_VERSION
    alias: str
    envdAccessToken: str | None = None
    trafficAccessToken: str | None = None
    domain: str | None = None

    @classmethod
    def of(cls, sandbox: Sandbox, token: str | None, domain: str | None) -> SandboxView:
        return cls(
            templateID=sandbox.template_id,
            sandboxID=sandbox.id,
            alias=sandbox.template,
            envdAccessToken=token,
            domain=domain,
        )


class ListedSandbox(BaseModel):
    templateID: str
    sandboxID: str
    clientID: str = ""
    envdVersion: str = ENVD_VERSION
    alias: str
    startedAt: datetime
    endAt: datetime
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    state: str = "running"
    metadata: dict[str, str]
    volumeMounts: list[dict[str, Any]] = Field(default_factory=list)

    @classmethod
    def fields_of(cls, sandbox: Sandbox) -> dict[str, Any]:
        return {
            "templateID": sandbox.template_id,
            "sandboxID": sandbox.id,
            "alias": sandbox.template,
            "startedAt": datetime.fromtimestamp(sandbox.started_at, UTC),
            "endAt": datetime.fromtimestamp(sandbox.end_at, UTC),
            "cpuCount": cpu_count(sandbox.resources),
            "memoryMB": sandbox.resources.memory_mb,
            "diskSizeMB": sandbox.resources.disk_mb,
            "state": "paused" if sandbox.is_paused else "running",
            "metadata": dict(sandbox.metadata),
        }


class Lifecycle(BaseModel):
    autoResume: bool = False
    onTimeout: str = "kill"

    @classmethod
    def of(cls, sandbox: Sandbox) -> Lifecycle:
        return cls(autoResume=sandbox.policy.auto_resume, onTimeout=sandbox.policy.on_timeout.value)


class SandboxDetail(ListedSandbox):
    envdAccessToken: str | None = None
    domain: str | None = None
    lifecycle: Lifecycle = Field(default_factory=Lifecycle)
    pauseMode: str | None = Field(default=None, description="What a paused sandbox keeps: full or filesystem.")
    network: dict[str, Any] = Field(default_factory=dict)
    allowInternetAccess: bool = False
    reason: str | None = None


class SandboxMetric(BaseModel):
    """Bytes; `cpuUsedPct` of one core."""

    timestamp: datetime
    timestampUnix: int
    cpuCount: int
    cpuUsedPct: float
    memUsed: int
    memTotal: int
    memCache: int
    diskUsed: int
    diskTotal: int

    @classmethod
    def of(cls, sample: Sample, resources: Resources) -> SandboxMetric:
        return cls(
            timestamp=datetime.fromtimestamp(sample.at, UTC),
            timestampUnix=int(sample.at),
            cpuCount=cpu_count(resources),
            cpuUsedPct=sample.cpu_percent,
            memUsed=sample.usage.memory_bytes,
            memTotal=resources.memory_mb * MIB,
            memCache=sample.usage.memory_cache_bytes,
            diskUsed=sample.usage.disk_bytes,
            diskTotal=resources.disk_mb * MIB,
        )


class ErrorBody(BaseModel):
    code: int
    message: str
    error_code: str | None = None


class SnapshotView(BaseModel):
    """`memory`: whether the memory is part of it; without it processes start anew. `sizeBytes` is what this
    snapshot alone takes, above those of `layers` that it stands on."""

    snapshotID: str
    names: list[str]
    memory: bool = False
    sandboxID: str
    templateID: str
    buildID: str
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    sizeBytes: int
    layers: int
    imageRef: str
    createdAt: datetime
    updatedAt: datetime

    @classmethod
    def of(cls, snapshot: Snapshot) -> SnapshotView:
        build, template = snapshot.build, snapshot.template
        resources = Resources(**build.config["resources"])
        return cls(
            snapshotID=snapshot.id,
            names=list(snapshot.names),
            memory=snapshot.memory,
            sandboxID=snapshot.source,
            templateID=template.id,
            buildID=build.id,
            cpuCount=cpu_count(resources),
            memoryMB=resources.memory_mb,
            diskSizeMB=resources.disk_mb,
            sizeBytes=build.size_bytes,
            layers=len(build.rootfs.layers),
            imageRef=str(build.config.get("template", "")),
            createdAt=datetime.fromtimestamp(build.created_at, UTC),
            updatedAt=datetime.fromtimestamp(template.updated_at, UTC),
        )


class ForkResult(BaseModel):
    """Exactly one of the two is there. `memory`: whether the child has the memory of the one it was made from."""

    sandbox: SandboxView | None = None
    error: ErrorBody | None = None
    memory: bool = False


class Capacity(BaseModel):
    maxSandboxes: int
    running: int
    warm: int
    free: int
    reasonsIfZero: list[str]


class Swept(BaseModel):
    sandboxIDs: list[str]


def cpu_count(resources: Resources) -> int:
    return max(round(resources.cpu), 1)
