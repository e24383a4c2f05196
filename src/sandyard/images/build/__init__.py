"""Builds of templates: steps run in sandboxes, layers kept by content."""

from __future__ import annotations

from sandyard.images.build.base import (
    Archives,
    Base,
    Bench,
    BuildFailed,
    Built,
    Cache,
    Cached,
    Level,
    Log,
    Plan,
    State,
    Step,
    Workshop,
)
from sandyard.images.build.engine import Engine
from sandyard.images.build.steps import check_step

__all__ = [
    "Archives",
    "Base",
    "Bench",
    "BuildFailed",
    "Built",
    "Cache",
    "Cached",
    "Engine",
    "Level",
    "Log",
    "Plan",
    "State",
    "Step",
    "Workshop",
    "check_step",
]
