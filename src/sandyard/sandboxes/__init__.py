"""The life of sandboxes: admission, warm pool, expiry, leases, reaping, recovery."""

from __future__ import annotations

from sandyard.sandboxes.catalog import Build, Catalog, Template
from sandyard.sandboxes.copying import Snapshot
from sandyard.sandboxes.leases import Lease
from sandyard.sandboxes.manager import SandboxManager
from sandyard.sandboxes.model import CreateRequest, Defaults, Sandbox, State
from sandyard.sandboxes.templates import FixedTemplates, TemplateSource, TemplateView

__all__ = [
    "Build",
    "Catalog",
    "CreateRequest",
    "Defaults",
    "FixedTemplates",
    "Lease",
    "Sandbox",
    "SandboxManager",
    "Snapshot",
    "State",
    "Template",
    "TemplateSource",
    "TemplateView",
]
