"""The life of sandboxes: admission, warm pool, expiry, leases, reaping, recovery."""

from __future__ import annotations

from sandyard.sandboxes.leases import Lease
from sandyard.sandboxes.manager import SandboxManager
from sandyard.sandboxes.model import CreateRequest, Defaults, Sandbox, State
from sandyard.sandboxes.templates import FixedTemplates, Templates, TemplateSource, TemplateView

__all__ = [
    "CreateRequest",
    "Defaults",
    "FixedTemplates",
    "Lease",
    "Sandbox",
    "SandboxManager",
    "State",
    "TemplateSource",
    "TemplateView",
    "Templates",
]
