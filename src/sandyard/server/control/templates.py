"""`/templates`: what sandboxes can be started from, their names and tags."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from fastapi import APIRouter, Query, Response

from sandyard.errors import BadRequest, NotFound
from sandyard.sandboxes import Template
from sandyard.sandboxes.catalog import Reference, check_new_tag, check_tag
from sandyard.server.control.builds import own_template
from sandyard.server.control.context import Context, Here, Tenant
from sandyard.server.control.template_models import (
    AssignedTags,
    NewTags,
    OldTags,
    TagInfo,
    TemplateAlias,
    TemplateInfo,
    TemplateNames,
    TemplateUpdate,
    TemplateWithBuilds,
    moment,
)

PAGE = 100
Limit = Annotated[int, Query(ge=1, le=PAGE)]

router = APIRouter(tags=["templates"])


@router.get("/templates", deprecated=True)
async def list_v1(here: Here, tenant: Tenant) -> list[TemplateInfo]:
    """All templates of this tenant and of the node, the newest first."""
    return [TemplateInfo.of(template, here.manager.resources()) for template in _listed(here, tenant)]


@router.get("/v2/templates")
async def list_v2(
    here: Here, tenant: Tenant, response: Response, limit: Limit = PAGE, nextToken: str | None = None
) -> list[TemplateInfo]:
    """One page of templates; `X-Next-Token` leads to the next."""
    found = _listed(here, tenant)
    if nextToken:
        mark = _read_token(nextToken)
        found = [template for template in found if (template.created_at, template.id) < mark]
    if len(found) > limit:
        response.headers["X-Next-Token"] = _token(found[limit - 1])
    return [TemplateInfo.of(template, here.manager.resources()) for template in found[:limit]]


@router.get("/templates/aliases/{alias:path}")
async def alias(alias: str, here: Here, tenant: Tenant) -> TemplateAlias:
    """Whether a name, or `name:tag`, is there: one whose builds all failed is not."""
    template = here.manager.catalog.find(alias, tenant)
    if Reference.parse(alias).tag is not None:
        here.manager.catalog.resolve(alias, tenant)
    elif all(build.status in ("error", "waiting") for build in template.builds.values()):
        raise NotFound(f"template '{alias}' has no build that is ready or under way")
    return TemplateAlias(templateID=template.id, public=template.public)


@router.post("/templates/tags", status_code=201)
async def assign_tags(body: NewTags, here: Here, tenant: Tenant) -> AssignedTags:
    """Point tags to the build of `target`, wherever they pointed before."""
    Reference.split(body.target)
    tags = list(dict.fromkeys(check_new_tag(tag) for tag in body.tags))
    template = own_template(here, tenant, body.target)
    _, build = here.manager.catalog.resolve(body.target, tenant)
    await here.manager.catalog.set_tags(template, build.id, tags)
    return AssignedTags(tags=tags, buildID=build.id)


@router.delete("/templates/tags", status_code=204)
async def remove_tags(body: OldTags, here: Here, tenant: Tenant) -> None:
    """Remove tags; the builds stay."""
    tags = list(dict.fromkeys(check_tag(tag) for tag in body.tags))
    await here.manager.catalog.drop_tags(own_template(here, tenant, body.name), tags)


@router.get("/templates/{template_id:path}/tags")
async def list_tags(template_id: str, here: Here, tenant: Tenant) -> list[TagInfo]:
    """The tags of a template, the newest first.

    A build that is under way has its tags here already, so that whoever wants the same waits for it; what
    is started by a tag is the ready build until then."""
    template = here.manager.catalog.find(template_id, tenant)
    tags = dict(template.tags)
    for build in template.builds.values():
        if build.status == "building":
            tags |= {tag: (build.id, build.created_at) for tag in build.config.get("tags", ())}
    newest_first = sorted(tags.items(), key=lambda item: (item[1][1], item[0]), reverse=True)
    return [TagInfo(tag=tag, buildID=build_id, createdAt=moment(at)) for tag, (build_id, at) in newest_first]


@router.get("/templates/{template_id:path}")
async def info(
    template_id: str,
    here: Here,
    tenant: Tenant,
    response: Response,
    limit: Limit = PAGE,
    nextToken: Annotated[str | None, Query(description="How many builds were seen.")] = None,
) -> TemplateWithBuilds:
    """A template and its builds, the newest first; `X-Next-Token` leads to more of them."""
    template = here.manager.catalog.find(template_id, tenant)
    if nextToken and not (nextToken.isdecimal() and len(nextToken) < 10):
        raise BadRequest(f"nextToken: '{nextToken}' is not one of ours", field="nextToken")
    seen = int(nextToken or 0)
    builds = list(reversed(template.builds.values()))
    if len(builds) > seen + limit:
        response.headers["X-Next-Token"] = str(seen + limit)
    return TemplateWithBuilds.of(template, builds[seen : seen + limit], here.manager.resources())


@router.patch("/templates/{template_id:path}", deprecated=True)
@router.patch("/v2/templates/{template_id:path}")
async def update(template_id: str, body: TemplateUpdate, here: Here, tenant: Tenant) -> TemplateNames:
    """Let other tenants use a template, or no longer."""
    template = own_template(here, tenant, template_id)
    if body.public is not None:
        await here.manager.catalog.set_public(template, body.public)
    return TemplateNames(names=template.names)


@router.delete("/templates/{template_id:path}", status_code=204)
async def delete(template_id: str, here: Here, tenant: Tenant) -> None:
    """Delete a template with its builds, or a snapshot. Refused while sandboxes of a template live. A snapshot's
    `name:tag` is that state of it alone."""
    template = own_template(here, tenant, template_id)
    tag = Reference.parse(template_id).tag
    if tag is None:
        await here.builds.delete(template)
    elif template.kind == "snapshot":
        await here.builds.delete_tagged(template, tag)
    else:
        raise BadRequest(
            f"'{template_id}' is one build of a template",
            remedy="DELETE /templates/tags removes tags",
        )


def _listed(here: Context, tenant: str) -> list[Template]:
    found = here.manager.catalog.all(tenant)
    return [t for t in found if t.kind == "template" and t.tenant in (None, tenant)]


def _token(template: Template) -> str:
    return base64.urlsafe_b64encode(f"{template.created_at!r}|{template.id}".encode()).decode()


def _read_token(value: str) -> tuple[float, str]:
    try:
        created_at, _, template_id = base64.urlsafe_b64decode(value).decode().partition("|")
        return float(created_at), template_id
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"nextToken: '{value}' is not one of ours", field="nextToken") from error
