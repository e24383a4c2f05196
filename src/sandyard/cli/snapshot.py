"""`sandyard snapshot`: the state of a sandbox, kept to start others from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sandyard.cli.console import Output, print_rows
from sandyard.cli.rest import call, word


def register(app: typer.Typer) -> None:
    snapshot = typer.Typer(help="Keep the state of a sandbox to start others from.", no_args_is_help=True)
    snapshot.command("create")(create)
    snapshot.command("list")(list_snapshots)
    snapshot.command("ls", hidden=True)(list_snapshots)
    snapshot.command("delete")(delete)
    snapshot.command("rm", hidden=True)(delete)
    app.add_typer(snapshot, name="snapshot")
    app.add_typer(snapshot, name="snap", hidden=True)


def create(
    sandbox_id: Annotated[str, typer.Argument(metavar="ID", help="sandbox id; it goes on running")],
    name: Annotated[str | None, typer.Option(help="name, or name:tag, to start from later")] = None,
) -> None:
    """Keep a sandbox's state, and print the id of the snapshot."""
    body = {"name": name} if name else {}
    print(call("POST", f"/sandboxes/{word(sandbox_id)}/snapshots", json=body).json()["snapshotID"])


def list_snapshots(
    sandbox_id: Annotated[str | None, typer.Option(help="only those made from this sandbox")] = None,
    output: Annotated[Output, typer.Option(help="auto: table on a terminal, else json")] = "auto",
) -> None:
    """List the snapshots of this key."""
    rows: list[dict[str, Any]] = []
    params = {"sandboxID": sandbox_id} if sandbox_id else {}
    while True:
        answer = call("GET", "/snapshots", params=params)
        rows += [{"id": item["snapshotID"], "names": ", ".join(item.get("names") or [])} for item in answer.json()]
        token = answer.headers.get("x-next-token")
        if not token:
            break
        params = {**params, "nextToken": token}
    print_rows(rows, ["id", "names"], output)


def delete(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="ids or names")],
) -> None:
    """Delete snapshots. Sandboxes that were started from one live on."""
    for snapshot in snapshots:
        call("DELETE", f"/templates/{word(snapshot)}")
