"""`/nodes`: this machine as AgentENV's tools see it."""

from __future__ import annotations

import os
import platform
import shutil
import time
import uuid
from functools import cache
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel

from sandyard.errors import NotFound
from sandyard.runtimes.room import host_memory
from sandyard.server.control.context import Context, Here, Tenant

MIB = 1024 * 1024
CPU_SECONDS = 1.0  # a figure of the processors is over at least so long

router = APIRouter(tags=["nodes"])


class Disk(BaseModel):
    mountPoint: str
    device: str
    filesystemType: str
    usedBytes: int
    totalBytes: int


class NodeMetrics(BaseModel):
    allocatedCPU: int
    cpuPercent: int
    cpuCount: int
    allocatedMemoryBytes: int
    memoryUsedBytes: int
    memoryTotalBytes: int
    disks: list[Disk]
    pausedAllocatedCPU: int
    pausedAllocatedMemoryBytes: int


class MachineInfo(BaseModel):
    cpuFamily: str
    cpuModel: str
    cpuModelName: str
    cpuArchitecture: str


class Node(BaseModel):
    id: str
    clusterID: str
    serviceInstanceID: str
    version: str
    commit: str = ""
    status: str = "ready"
    sandboxCount: int
    sandboxStartingCount: int
    sandboxPausedCount: int
    createSuccesses: int
    createFails: int
    metrics: NodeMetrics
    machineInfo: MachineInfo


class NodeDetail(Node):
    cachedBuilds: list[str]


class Processors:
    """How busy the machine's processors are, from one asking to the next."""

    def __init__(self) -> None:
        self._at = -CPU_SECONDS
        self._busy = self._all = 0
        self._percent = 0.0

    def percent(self) -> float:
        """0..100 since the last reading that is a second old; at first since the machine started."""
        now = time.monotonic()
        if now - self._at >= CPU_SECONDS:
            busy, everything = _jiffies()
            if everything > self._all:
                self._percent = 100.0 * (busy - self._busy) / (everything - self._all)
            self._at, self._busy, self._all = now, busy, everything
        return min(max(self._percent, 0.0), 100.0)


_instance = str(uuid.uuid4())
_processors = Processors()


@router.get("/nodes")
async def nodes(here: Here, _tenant: Tenant) -> list[Node]:
    """The machines that run sandboxes: this one."""
    return [Node.model_validate(_figures(here))]


@router.get("/nodes/{node_id}")
async def node(node_id: str, here: Here, tenant: Tenant) -> NodeDetail:
    """One machine, with the ids of the builds that this tenant's sandboxes can start from at once."""
    if node_id != node_name():
        raise NotFound(f"node '{node_id}' not found", remedy=f"this one is '{node_name()}'")
    templates = here.manager.catalog.all(tenant)
    builds = [build.id for t in templates for build in t.builds.values() if build.status == "ready"]
    return NodeDetail.model_validate({**_figures(here), "cachedBuilds": builds})


def node_name() -> str:
    return platform.node() or "localhost"


def _figures(here: Context) -> dict[str, object]:
    counts = here.metrics.counts()
    running, paused = counts.running, counts.paused
    total, available = host_memory()
    return {
        "id": node_name(),
        "clusterID": str(uuid.UUID(int=0)),
        "serviceInstanceID": _instance,
        "version": version("sandyard"),
        "sandboxCount": len(running) + len(paused),
        "sandboxStartingCount": counts.starting,
        "sandboxPausedCount": len(paused),
        "createSuccesses": counts.created,
        "createFails": counts.failed,
        "machineInfo": _machine(),
        "metrics": NodeMetrics(
            allocatedCPU=round(sum(s.resources.cpu for s in running)),
            cpuPercent=round(_processors.percent()),
            cpuCount=os.cpu_count() or 1,
            allocatedMemoryBytes=sum(s.resources.memory_mb for s in running) * MIB,
            memoryUsedBytes=(total - available) * MIB,
            memoryTotalBytes=total * MIB,
            disks=[_disk(here.manager.settings.paths.state)],
            pausedAllocatedCPU=round(sum(s.resources.cpu for s in paused)),
            pausedAllocatedMemoryBytes=sum(s.resources.memory_mb for s in paused) * MIB,
        ),
    }


def _disk(path: Path) -> Disk:
    usage = shutil.disk_usage(path)
    mount, device, kind = _mount(path.resolve())
    return Disk(mountPoint=mount, device=device, filesystemType=kind, usedBytes=usage.used, totalBytes=usage.total)


def _mount(path: Path) -> tuple[str, str, str]:
    """(mount point, device, type) of what a path lies on."""
    best = ("/", "", "")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, where, kind = line.split()[:3]
        where = where.replace("\\040", " ")
        if path.is_relative_to(where) and len(where) >= len(best[0]):
            best = (where, device, kind)
    return best


@cache
def _machine() -> MachineInfo:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return MachineInfo(
        cpuFamily=fields.get("cpu family", ""),
        cpuModel=fields.get("model", ""),
        cpuModelName=fields.get("model name", ""),
        cpuArchitecture=platform.machine(),
    )


def _jiffies() -> tuple[int, int]:
    """(busy, all) time of all processors, in ticks. Formula: proc(5), idle and iowait are not busy."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
