"""Builds of templates: registered, given their files, begun, watched."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect

from sandyard.errors import BadRequest, Conflict, Forbidden, NotFound, Unsupported
from sandyard.images.build import Level, Step, check_step
from sandyard.images.dockerfile import Recipe, check, parse
from sandyard.runtimes.base import Resources
from sandyard.runtimes.room import host_memory
from sandyard.sandboxes import Build, Template
from sandyard.sandboxes.catalog import DEFAULT_TAG, Reference, check_new_tag
from sandyard.server.builds import Credentials, Order, Origin
from sandyard.server.control.context import Context, Here, Tenant
from sandyard.server.control.template_models import (
    BuildLogEntry,
    BuildLogs,
    BuildOrder,
    BuildReason,
    BuildStatus,
    NewDockerfile,
    NewTemplate,
    Registry,
    TemplateInfo,
    TemplateRequested,
    UploadLink,
)

PAGE = 100
Limit = Annotated[int, Query(ge=0, le=PAGE)]

router = APIRouter(tags=["builds"])


@router.post("/v3/templates", status_code=202)
async def create_v3(body: NewTemplate, here: Here, tenant: Tenant) -> TemplateRequested:
    """Register a build: of a new template, or of the one that has this name."""
    template, build, tags = await _register(body, here, tenant)
    return TemplateRequested(
        templateID=template.id,
        buildID=build.id,
        public=template.public,
        names=template.names,
        tags=tags,
        aliases=template.names,
    )


@router.post("/v2/templates", status_code=202, deprecated=True)
async def create_v2(body: NewTemplate, here: Here, tenant: Tenant) -> TemplateInfo:
    """Register a build, as older SDKs do."""
    template, build, _ = await _register(body, here, tenant)
    return TemplateInfo.of(template, here.manager.resources()).model_copy(update={"buildID": build.id})


@router.post("/templates", status_code=202, deprecated=True)
@router.post("/templates/{template_id:path}/builds/{build_id}", status_code=202, deprecated=True)
async def create_v1(here: Here, tenant: Tenant) -> None:
    """Refused: the first build system pushed an image that the client had built to a registry of the provider."""
    raise Unsupported(
        "template builds of the first generation need a registry that this server does not have; "
        "use an SDK of version 2, or 'e2b template create'"
    )


@router.get("/templates/{template_id:path}/files/{hash}", status_code=201)
async def upload_link(template_id: str, hash: str, request: Request, here: Here, tenant: Tenant) -> UploadLink:
    """Where to send the files of a COPY."""
    own_template(here, tenant, template_id)
    present = here.builds.files.path(tenant, hash) is not None
    return UploadLink(present=present, url=f"{request.base_url}uploads/{here.tickets.issue(tenant, hash)}")


@router.put("/uploads/{ticket}", status_code=204)
async def upload(ticket: str, request: Request, here: Here) -> Response:
    """Send the archive of a COPY. The link itself is the permission, for one upload
    at a time and one that succeeds."""
    wanted = here.tickets.read(ticket)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > here.builds.files.upload_limit:
        here.builds.files.refuse_size()
    try:
        with here.tickets.used(wanted):
            await here.builds.files.receive(wanted.tenant, wanted.files_hash, request.stream())
    except ClientDisconnect as error:
        raise BadRequest("the upload broke off") from error
    return Response(status_code=204)


@router.post("/v2/templates/{template_id:path}/builds/{build_id}", status_code=202)
async def begin(template_id: str, build_id: str, body: BuildOrder, here: Here, tenant: Tenant) -> Response:
    """Begin a registered build."""
    template, build = _find(here, tenant, template_id, build_id)
    await here.builds.begin(template, build, await asyncio.to_thread(_order, body))
    return Response(status_code=202)


@router.get("/templates/{template_id:path}/builds/{build_id}/status", response_model_exclude_none=True)
async def status(
    template_id: str,
    build_id: str,
    here: Here,
    tenant: Tenant,
    logsOffset: Annotated[int, Query(ge=0)] = 0,
    limit: Limit = PAGE,
    level: Level | None = None,
) -> BuildStatus:
    """How far a build is, with one page of its log."""
    template, build = _find(here, tenant, template_id, build_id)
    entries = (await here.builds.log_of(build)).entries(level)
    page = [BuildLogEntry.of(entry) for entry in entries[logsOffset : logsOffset + limit]]
    reason = None
    if build.reason is not None:
        step = build.reason.get("step")
        said = [BuildLogEntry.of(entry) for entry in entries if step is None or entry.step == step]
        reason = BuildReason(message=build.reason["message"], step=step, logEntries=said[-20:])
    return BuildStatus(
        templateID=template.id,
        buildID=build.id,
        status=build.status,
        logs=[entry.message for entry in page],
        logEntries=page,
        reason=reason,
    )


@router.get("/templates/{template_id:path}/builds/{build_id}/logs", response_model_exclude_none=True)
async def logs(
    template_id: str,
    build_id: str,
    here: Here,
    tenant: Tenant,
    cursor: Annotated[int | None, Query(ge=0, le=10**15)] = None,
    limit: Limit = PAGE,
    direction: Literal["forward", "backward"] = "forward",
    level: Level | None = None,
    source: Literal["temporary", "persistent"] | None = None,
) -> BuildLogs:
    """The log of a build, from `cursor` (milliseconds) on, or back from it."""
    _, build = _find(here, tenant, template_id, build_id)
    entries = list((await here.builds.log_of(build)).entries(level))
    if direction == "backward":
        entries = [entry for entry in reversed(entries) if cursor is None or int(entry.at * 1000) <= cursor]
    elif cursor is not None:
        entries = [entry for entry in entries if int(entry.at * 1000) >= cursor]
    return BuildLogs(logs=[BuildLogEntry.of(entry) for entry in entries[:limit]])


def own_template(here: Context, tenant: str, text: str) -> Template:
    """A template or snapshot that this tenant may change. Raises `NotFound` and `Forbidden`."""
    template = here.manager.catalog.find(text, tenant)
    if template.tenant != tenant:
        raise Forbidden(f"template '{template.name}' is not yours to change")
    return template


async def _register(body: NewTemplate, here: Context, tenant: str) -> tuple[Template, Build, list[str]]:
    text = body.name or body.alias
    if not text:
        raise BadRequest("name: it is missing", field="name")
    name, tag = Reference.split(text)
    tags = [check_new_tag(each) for each in ([tag] if tag is not None else []) + body.tags]
    tags = list(dict.fromkeys(tags)) or [DEFAULT_TAG]
    resources = _resources(body, here.manager.resources())
    template = await _template(here, tenant, name)
    return template, await here.builds.register(template, tags, resources), tags


async def _template(here: Context, tenant: str, name: str) -> Template:
    catalog = here.manager.catalog
    try:
        found = catalog.find(name, tenant)
    except NotFound:
        here.builds.check_room(tenant)
        return await catalog.add_template(tenant, "template", [name])
    if found.tenant == tenant:
        if found.kind != "template":
            raise Conflict(f"name '{name}' is that of a snapshot", remedy="take another or delete the snapshot")
        return found
    if found.tenant is None:
        raise Forbidden(f"template '{found.name}' belongs to the node", remedy="take another name")
    here.builds.check_room(tenant)
    return await catalog.add_template(tenant, "template", [name])  # another tenant's public one does not take it


def _resources(body: NewTemplate, default: Resources) -> Resources:
    memory = body.memoryMB or default.memory_mb
    total, _ = host_memory()
    if memory > total:
        raise BadRequest(f"memoryMB: {memory} is more than the {total} MiB of this node", field="memoryMB")
    disk = body.diskMB or default.disk_mb
    return replace(default, cpu=float(body.cpuCount or default.cpu), memory_mb=memory, disk_mb=disk)


def _find(here: Context, tenant: str, template_id: str, build_id: str) -> tuple[Template, Build]:
    template = own_template(here, tenant, template_id)
    build = template.builds.get(build_id)
    if build is None:
        raise BadRequest(f"Build '{build_id}' not found")
    return template, build


def _order(body: BuildOrder) -> Order:
    if (bool(body.fromImage), bool(body.fromTemplate), body.dockerfile is not None).count(True) != 1:
        raise BadRequest("fromImage, fromTemplate: give one of them", field="fromImage")
    if body.dockerfile is not None:
        return Order(recipe=_recipe(body, body.dockerfile))
    steps = [Step(s.type.upper(), tuple(s.args), s.filesHash or None, bool(s.force)) for s in body.steps]
    for number, step in enumerate(steps, 1):
        check_step(step, number)
    credentials = _credentials(body.fromImageRegistry) if body.fromImageRegistry is not None else None
    origin = Origin(body.fromImage or None, body.fromTemplate or None, credentials)
    return Order(origin, steps, body.startCmd or None, body.readyCmd or None, bool(body.force))


def _recipe(body: BuildOrder, given: NewDockerfile) -> Recipe:
    """Raises `DockerfileError`, and `BadRequest` for what a Dockerfile has no place for."""
    if body.steps or body.fromImageRegistry is not None:
        raise BadRequest("dockerfile: steps and fromImageRegistry do not go with it", field="dockerfile")
    recipe = Recipe(
        parse(given.text),
        given.buildArgs,
        given.target or None,
        given.contextHash or None,
        body.startCmd or None,
        body.readyCmd or None,
        bool(body.force),
    )
    check(recipe)
    return recipe


def _credentials(registry: Registry) -> Credentials:
    if registry.type == "aws":
        raise Unsupported(
            "fromImageRegistry.type: 'aws' is not supported; use 'registry' with user 'AWS' and a login password"
        )
    if registry.type == "gcp":
        return Credentials("_json_key", registry.serviceAccountJson)
    return Credentials(registry.username, registry.password)
