"""Structured logs on stderr: warnings and worse, more with `SANDYARD_LOG=info` or `debug`."""

from __future__ import annotations

import logging
import os
import sys

import structlog

LEVEL_VARIABLE = "SANDYARD_LOG"


class _Expected(logging.Filter):
    """Breaking a response off is how a client learns that its sandbox died, and a WebSocket's handshake may
    be answered with an HTTP response: not errors of the server."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "without completing response" not in message and "without completing handshake" not in message


def set_up_logs() -> None:
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL_VARIABLE, "warning").upper(), logging.WARNING)
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").addFilter(_Expected())
    logging.getLogger("alembic").setLevel(max(level, logging.WARNING))
