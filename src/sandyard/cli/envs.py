"""`sandyard envs describe`: what is true of a program on each back end."""

from __future__ import annotations

from dataclasses import fields

import typer
from rich.table import Column, Table

from sandyard.cli.console import stdout


def register(app: typer.Typer) -> None:
    noun = typer.Typer(help="The back ends that run a policy's programs.", no_args_is_help=True)
    noun.command("describe")(describe)
    app.add_typer(noun, name="envs")


def describe() -> None:
    """In what the back ends of the code recipe differ; `CODE_RL_BACKEND` chooses one."""
    from sandyard.envs.backends import known_backends, load_backend
    from sandyard.envs.backends.semantics import Semantics

    backends = [load_backend(name) for name in known_backends()]
    columns = [Column(backend.NAME, overflow="fold") for backend in backends]
    table = Table("", *columns, box=None, header_style="bold", pad_edge=False)
    for field in fields(Semantics):
        table.add_row(field.name, *(getattr(backend.SEMANTICS, field.name) for backend in backends))
    stdout.print(table)
