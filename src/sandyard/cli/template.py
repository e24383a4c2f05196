"""`sandyard template`: what sandboxes can start from."""

from __future__ import annotations

from typing import Annotated

import httpx
import typer

from sandyard.cli.console import Output, print_rows
from sandyard.connection import resolve_connection


def register(app: typer.Typer) -> None:
    template = typer.Typer(help="What sandboxes can start from.", no_args_is_help=True)
    # A group of its own even with one verb: typer would otherwise drop the verb.
    template.callback()(lambda: None)
    template.command("list")(list_templates)
    app.add_typer(template, name="template")


def list_templates(
    output: Annotated[Output, typer.Option(help="auto: table on a terminal, else json")] = "auto",
) -> None:
    """List the server's templates."""
    connection = resolve_connection()
    answer = httpx.get(f"{connection.api_url}/templates", headers=connection.headers(), timeout=30)
    answer.raise_for_status()
    rows = [
        {
            "name": (item.get("aliases") or item.get("names") or [item["templateID"]])[0],
            "id": item["templateID"],
            "cpu": item.get("cpuCount"),
            "memory_mb": item.get("memoryMB"),
            "created": item.get("createdAt"),
        }
        for item in answer.json()
    ]
    print_rows(rows, ["name", "id", "cpu", "memory_mb", "created"], output)
