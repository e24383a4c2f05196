"""`/templates`: what sandboxes can be started from."""

from __future__ import annotations

from fastapi import APIRouter

from sandyard.server.control.context import Here, Tenant
from sandyard.server.control.models import TemplateAlias, TemplateInfo

router = APIRouter(tags=["templates"])


@router.get("/templates")
@router.get("/v2/templates")
async def list_templates(here: Here, _tenant: Tenant) -> list[TemplateInfo]:
    resources = here.manager.resources()
    return [TemplateInfo.of(template, resources) for template in here.manager.templates.all()]


@router.get("/templates/aliases/{alias}")
async def alias(alias: str, here: Here, _tenant: Tenant) -> TemplateAlias:
    return TemplateAlias(templateID=here.manager.templates.get(alias).template_id)
