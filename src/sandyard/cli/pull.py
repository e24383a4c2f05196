"""`sandyard pull`: a template of this node from an image."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from sandyard.cli.console import stdout
from sandyard.cli.keeping import make_room, through_server
from sandyard.cli.pulling import pull_lines
from sandyard.config import load_settings


def register(app: typer.Typer) -> None:
    app.command("pull")(pull)


def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE",
            help="registry/name:tag or @digest, oci:DIR[:tag], docker-archive:FILE, oci-archive:FILE, a rootfs .tar, "
            "or debootstrap:SUITE",
        ),
    ],
    name: Annotated[str | None, typer.Option("--name", "-n", help="of the template [the image's own]")] = None,
    platform: Annotated[str | None, typer.Option(help="such as linux/arm64 [this machine's]")] = None,
    digest: Annotated[str | None, typer.Option(help="what the image must be, sha256:...; another is refused")] = None,
    start: Annotated[
        bool, typer.Option("--start", help="sandboxes run the image's entrypoint and command when they start")
    ] = False,
) -> None:
    """Make a template from an image, or bring a newer state of one.

    A server that runs on this machine has it at once; sandboxes of an earlier state run on. Where images may come
    from is in the settings images.registries, images.mirrors, images.allowed and images.auth_file.

    \b
    sandyard pull registry.example.com/tools/python:3.12
    sandyard pull oci:./image:latest --name tools
    """
    from sandyard.images.pulled import pull_template

    settings = load_settings({"images.platform": platform})
    with pull_lines() as lines:
        work = pull_template(settings, source, name, lines, start=start, digest=digest, collect=make_room(settings))
        made = asyncio.run(work)
        through_server(settings, "/store/gc", {})  # what the one before stood on may be too much now
    stdout.print(made.name, markup=False)
