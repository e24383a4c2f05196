"""`python3 -m program`: serve on a port of the loopback, which the sandbox's port proxy reaches."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path

from tornado.httpserver import HTTPServer

from .contexts import Contexts
from .server import BODY_LIMIT, Service, application

THREADS_AT_MOST = 8  # of numeric libraries: they take one a core, and a sandbox may have few processes


async def serve(host: str, port: int, home: str) -> None:
    service = Service(Contexts(home))
    server = HTTPServer(application(service), max_buffer_size=BODY_LIMIT, idle_connection_timeout=640)
    server.listen(port, host)
    await service.warm_up()
    await asyncio.Event().wait()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=49999)
    options.add_argument("--home", default="/home/user", help="where code runs that asks for no directory")
    chosen = options.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    threads = str(min(len(os.sched_getaffinity(0)), THREADS_AT_MOST))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, threads)
    asyncio.run(serve(chosen.host, chosen.port, str(Path(chosen.home).resolve())))


main()
