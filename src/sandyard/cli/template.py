"""`sandyard template`: what sandboxes can start from, how it is built, what it is called."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from sandyard.cli.console import Output, print_rows, stderr, stdout
from sandyard.cli.rest import call, word
from sandyard.errors import NotFound

POLL_SECONDS = 0.5
_COLOURS = {"warn": "yellow", "error": "red", "debug": "dim"}

Name = Annotated[str, typer.Argument(metavar="NAME", help="name or id of a template")]


def register(app: typer.Typer) -> None:
    template = typer.Typer(help="What sandboxes can start from.", no_args_is_help=True)
    template.command("list")(list_templates)
    template.command("ls", hidden=True)(list_templates)
    template.command("show")(show)
    template.command("watch")(watch)
    template.command("tag")(tag)
    template.command("untag")(untag)
    template.command("delete")(delete)
    template.command("rm", hidden=True)(delete)
    app.add_typer(template, name="template")
    app.add_typer(template, name="templates", hidden=True)


def list_templates(
    output: Annotated[Output, typer.Option(help="auto: table on a terminal, else json")] = "auto",
) -> None:
    """List the server's templates."""
    rows: list[dict[str, Any]] = []
    params: dict[str, str] = {}
    while True:
        answer = call("GET", "/v2/templates", params=params)
        rows += [
            {
                "name": ", ".join(item["names"]) or item["templateID"],
                "id": item["templateID"],
                "status": item["buildStatus"],
                "builds": item["buildCount"],
                "cpu": item["cpuCount"],
                "memory_mb": item["memoryMB"],
                "created": item["createdAt"],
            }
            for item in answer.json()
        ]
        token = answer.headers.get("x-next-token")
        if not token:
            break
        params = {"nextToken": token}
    print_rows(rows, ["name", "id", "status", "builds", "cpu", "memory_mb", "created"], output)


def show(
    name: Name,
    output: Annotated[Output, typer.Option(help="auto: table on a terminal, else json")] = "auto",
) -> None:
    """List a template's builds and their tags, the newest first."""
    tags: dict[str, list[str]] = {}
    for item in call("GET", f"/templates/{word(name)}/tags").json():
        tags.setdefault(item["buildID"], []).append(item["tag"])
    rows = [
        {
            "build": build["buildID"],
            "tags": ", ".join(tags.get(build["buildID"], [])),
            "status": build["status"],
            "cpu": build["cpuCount"],
            "memory_mb": build["memoryMB"],
            "created": build["createdAt"],
        }
        for build in call("GET", f"/templates/{word(name)}").json()["builds"]
    ]
    print_rows(rows, ["build", "tags", "status", "cpu", "memory_mb", "created"], output)


def watch(
    name: Name,
    build: Annotated[str | None, typer.Option(help="id of a build; the newest where none is given")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="also what is for debugging")] = False,
) -> None:
    """Follow a build to its end; the exit status says how it ended."""
    if build is None:
        builds = call("GET", f"/templates/{word(name)}").json()["builds"]
        if not builds:
            raise NotFound(f"template '{name}' has no build")
        build = builds[0]["buildID"]
    path = f"/templates/{word(name)}/builds/{word(str(build))}/status"
    seen = 0
    while True:
        found = call("GET", path, params={"logsOffset": seen, "level": "debug" if verbose else "info"}).json()
        for entry in found["logEntries"]:
            style = _COLOURS.get(entry["level"], "")
            stdout.print(entry["message"], style=style, markup=False, highlight=False, soft_wrap=True)
        seen += len(found["logEntries"])
        if found["status"] in ("ready", "error") and not found["logEntries"]:
            break
        if not found["logEntries"]:
            time.sleep(POLL_SECONDS)
    if found["status"] == "error":
        where = found["reason"].get("step")
        message = f"failed{f' at step {where}' if where else ''}: {found['reason']['message']}"
        stderr.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def tag(
    target: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="the build that gets the tags")],
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="tags to point to it")],
) -> None:
    """Point tags to a build, wherever they pointed before."""
    print(call("POST", "/templates/tags", json={"target": target, "tags": tags}).json()["buildID"])


def untag(name: Name, tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="tags to remove")]) -> None:
    """Remove tags; the builds stay."""
    call("DELETE", "/templates/tags", json={"name": name, "tags": tags})


def delete(names: Annotated[list[str], typer.Argument(metavar="NAME...", help="names or ids")]) -> None:
    """Delete templates with their builds. Refused while sandboxes use one."""
    for name in names:
        call("DELETE", f"/templates/{word(name)}")
