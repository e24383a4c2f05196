"""`sandyard pull`: a template of this node from an image."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from sandyard.cli.console import stdout
from sandyard.cli.setup import SetupLines
from sandyard.config import load_settings


def register(app: typer.Typer) -> None:
    app.command("pull")(pull)


def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE",
            help="registry/name:tag or @digest, oci:DIR[:tag], docker-archive:FILE, oci-archive:FILE, or a rootfs .tar",
        ),
    ],
    name: Annotated[str | None, typer.Option("--name", "-n", help="of the template [the image's own]")] = None,
    platform: Annotated[str | None, typer.Option(help="such as linux/arm64 [this machine's]")] = None,
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
    made = asyncio.run(pull_template(settings, source, name, SetupLines("pull"), start=start))
    stdout.print(made.name, markup=False)
