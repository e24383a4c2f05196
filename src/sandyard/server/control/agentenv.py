"""What AgentENV's clients use beyond E2B's API: cold starts from an image, parameters of the extension."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, Field

from sandyard.errors import BadRequest, NotFound, Unsupported
from sandyard.runtimes.base import Resources
from sandyard.server.builds.bases import template_of_image
from sandyard.server.control.context import Context, Here, Tenant
from sandyard.server.control.hooks import PARAMS, params_of
from sandyard.server.control.models import NewSandbox, SandboxView, Seconds, Text
from sandyard.server.control.sandboxes import Key, start

ID_HEADER = "x-agentenv-sandbox-id"
GIB = 1024  # in MiB: disks come in whole ones

router = APIRouter(tags=["agentenv"])


class ColdSandbox(BaseModel):
    image: str = Field(min_length=1, max_length=1024, description="An image that a template of this node stands for.")
    timeout: Seconds | None = Field(default=None, description="Lifetime in seconds; more than 0.")
    cpuCount: int | None = Field(default=None, ge=1, le=1024)
    memoryMB: int | None = Field(default=None, ge=128, le=2**24)
    diskSizeMB: int | None = Field(default=None, ge=GIB, le=2**30, multiple_of=GIB)
    attachedDrives: list[dict[str, Any]] = Field(default_factory=list)
    extraBootArgs: str | list[str] | None = None
    allowInternetAccess: bool | None = None
    autoPause: bool | None = Field(default=None, description="Default: true, where the runtime can pause.")
    autoResume: dict[str, Any] | bool | None = None
    secure: bool = False
    network: dict[str, Any] | None = None
    metadata: dict[Text, Text] = Field(default_factory=dict)
    envVars: dict[Text, Text] = Field(default_factory=dict)
    customExtensionParams: dict[str, Any] = Field(default_factory=dict)


@router.post("/sandboxes-cold", status_code=201)
async def create_cold(
    body: ColdSandbox, here: Here, tenant: Tenant, response: Response, idempotency_key: Key = None
) -> SandboxView:
    """Start a sandbox from an image, of a size of its own. Its id is in `x-agentenv-sandbox-id` too."""
    for name in ("attachedDrives", "extraBootArgs"):
        if getattr(body, name):
            raise Unsupported(f"{name}: not supported by runtime {here.manager.runtime.name}")
    name = template_of(body.image, here, tenant)
    usual = here.manager.catalog.get(name, tenant).resources or here.manager.resources()
    wanted, resources = NewSandbox.model_validate(_wanted(body, here, name)), _resources(body, usual)
    view = await start(wanted, here, tenant, idempotency_key, secured=body.secure, resources=resources)
    response.headers[ID_HEADER] = view.sandboxID
    return view


@router.get("/sandboxes/{sandbox_id}/custom-extension-params")
async def extension_params(sandbox_id: str, here: Here, tenant: Tenant) -> dict[str, Any]:
    """What the node's extension was told of this sandbox; `{}` where nothing was set."""
    return params_of(here.manager.get(tenant, sandbox_id))


@router.patch("/sandboxes/{sandbox_id}/custom-extension-params")
async def patch_extension_params(
    sandbox_id: str, here: Here, tenant: Tenant, patch: Annotated[dict[str, Any], Body()]
) -> dict[str, Any]:
    """Hand a patch to the node's extension, and keep the parameters it answers with."""
    sandbox = here.manager.get(tenant, sandbox_id)
    if here.hooks is None:
        raise Unsupported("customExtensionParams: this node has no extension", remedy="set extension.url")
    params = await here.hooks.patched(sandbox, patch)
    here.manager.get(tenant, sandbox_id)  # it may have died meanwhile
    sandbox.extension = {**sandbox.extension, PARAMS: params}
    await here.manager.store.set_extension(sandbox.id, sandbox.extension)
    return params


def template_of(image: str, here: Context, tenant: str) -> str:
    """The template that stands for an image: by `images.aliases`, else of that name. Raises `NotFound`."""
    alias = template_of_image(here.manager.settings, image)
    bare = image.removesuffix(":latest")
    for name in [alias] if alias else [image, bare]:
        try:
            here.manager.catalog.resolve(name, tenant)
        except (NotFound, BadRequest):
            continue
        return name
    raise NotFound(
        f"image '{image}' stands for no template of this node",
        remedy="make one with `sandyard pull` or name one in images.aliases",
    )


def _wanted(body: ColdSandbox, here: Context, template: str) -> dict[str, Any]:
    """The create that this is, as E2B's API has it."""
    capabilities = here.manager.runtime.capabilities
    auto_pause = body.autoPause
    if auto_pause is None:
        auto_pause = capabilities.pause_keeps_memory or capabilities.halt
    resume = {"enabled": body.autoResume} if isinstance(body.autoResume, bool) else body.autoResume
    wanted = body.model_dump(include={"timeout", "metadata", "envVars", "network", "customExtensionParams"})
    return wanted | {
        "templateID": template,
        "secure": body.secure,
        "autoPause": auto_pause,
        "autoResume": resume,
        "allow_internet_access": body.allowInternetAccess,
    }


def _resources(body: ColdSandbox, usual: Resources) -> Resources | None:
    """None where the caller leaves the size to the template."""
    if body.cpuCount is None and body.memoryMB is None and body.diskSizeMB is None:
        return None
    return Resources(
        cpu=float(body.cpuCount or usual.cpu),
        memory_mb=body.memoryMB or usual.memory_mb,
        disk_mb=body.diskSizeMB or usual.disk_mb,
        pids=usual.pids,
    )
