"""Builds of Dockerfiles: the text, the plan of each stage, the work in sandboxes, the files of the build context."""

from __future__ import annotations

from sandyard.images.dockerfile.build import DockerBuild, FindBase, check
from sandyard.images.dockerfile.making import Means, Recipe
from sandyard.images.dockerfile.syntax import Dockerfile, DockerfileError, parse

__all__ = ["DockerBuild", "Dockerfile", "DockerfileError", "FindBase", "Means", "Recipe", "check", "parse"]
