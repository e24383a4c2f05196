"""`/templates`: what sandboxes can be started from."""

from __future__ import annotations

from fastapi import APIRouter

from sandyard.server.control.context import Here, Tenant
from sandyard.server.control.models import TemplateAlias, TemplateInfo

router = APIRouter(tags=["templates"])


@router.get("/templates")
@router.get("/v2/templates")
async def list_templates(here: Here, tenant: Tenant) -> list[TemplateInfo]:
    resources = here.manager.resources()
    return [TemplateInfo.of(here.manager.catalog.get(t.id), resources) for t in here.manager.catalog.all(tenant)]


@router.get("/templates/aliases/{alias}")
async def alias(alias: str, here: Here, tenant: Tenant) -> TemplateAlias:
    return TemplateAlias(templateID=here.manager.catalog.get(alias, tenant).template_id)
