"""`sandyard pause`, `resume`, `fork`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sandyard.cli.console import Output, print_rows, stderr
from sandyard.cli.rest import call, lives, word

SandboxId = Annotated[str, typer.Argument(metavar="ID", help="sandbox id, as `sandyard list` prints it")]


def add(target: typer.Typer) -> None:
    target.command("pause")(pause)
    target.command("resume")(resume)
    target.command("fork")(fork)


def pause(
    sandbox_id: SandboxId,
    files_only: Annotated[
        bool, typer.Option("--files-only", help="end its processes and keep its files: it needs no memory then")
    ] = False,
) -> None:
    """Stop a sandbox where it stands; `sandyard resume` lets it go on."""
    call("POST", f"/sandboxes/{word(sandbox_id)}/pause", json={"memory": False} if files_only else {})


def resume(
    sandbox_id: SandboxId,
    timeout: Annotated[int, typer.Option(help="seconds until it ends (or pauses) by itself", min=1)] = 300,
) -> None:
    """Let a paused sandbox go on."""
    answer = call("POST", f"/sandboxes/{word(sandbox_id)}/connect", json={"timeout": timeout})
    if answer.status_code == 200:
        stderr.print(f"sandbox {sandbox_id} was running; it lives at least {timeout} s more", soft_wrap=True)


def fork(
    source: Annotated[str, typer.Argument(metavar="ID|SNAPSHOT", help="a sandbox, or the name or id of a snapshot")],
    count: Annotated[int, typer.Option("--count", "-n", help="how many copies", min=1, max=100)] = 1,
    timeout: Annotated[int, typer.Option(help="seconds until a copy ends by itself", min=1)] = 300,
    output: Annotated[Output, typer.Option(help="auto: table on a terminal, else json")] = "auto",
) -> None:
    """Start copies of a sandbox or of a snapshot, and print their ids; exit 1 if one could not be made."""
    rows = _forked(source, count, timeout) if lives(source) else _started(source, count, timeout)
    print_rows(rows, ["id", "template", "error"], output)
    raise typer.Exit(1 if any(row["error"] for row in rows) else 0)


def _forked(sandbox_id: str, count: int, timeout: int) -> list[dict[str, Any]]:
    children = call("POST", f"/sandboxes/{word(sandbox_id)}/fork", json={"count": count, "timeout": timeout}).json()
    return [_row(child.get("sandbox") or {}, (child.get("error") or {}).get("message")) for child in children]


def _started(snapshot: str, count: int, timeout: int) -> list[dict[str, Any]]:
    body = {"templateID": snapshot, "timeout": timeout}
    return [_row(call("POST", "/v2/sandboxes", json=body).json(), None) for _ in range(count)]


def _row(sandbox: dict[str, Any], error: str | None) -> dict[str, Any]:
    template = sandbox.get("alias") or sandbox.get("templateID")
    return {"id": sandbox.get("sandboxID"), "template": template, "error": error}
