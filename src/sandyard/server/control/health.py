"""`/health` and `/metrics`: for whoever watches the server, without a key."""

from __future__ import annotations

from fastapi import APIRouter, Response

from sandyard.server.control.context import Here

router = APIRouter(tags=["server"])


@router.get("/health", status_code=204)
@router.head("/health", status_code=204, include_in_schema=False)
async def health() -> None:
    """Whether the server answers."""


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(here: Here) -> Response:
    """Prometheus metrics."""
    return Response(here.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
