"""`sandyard snapshot`: the state of a sandbox, kept to start others from."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from sandyard.cli.console import Output, print_rows
from sandyard.cli.remote import TransferLine, sweep_storage
from sandyard.cli.rest import call, word
from sandyard.errors import SandyardError


def register(app: typer.Typer) -> None:
    snapshot = typer.Typer(help="Keep the state of a sandbox to start others from.", no_args_is_help=True)
    snapshot.command("create")(create)
    snapshot.command("list")(list_snapshots)
    snapshot.command("ls", hidden=True)(list_snapshots)
    snapshot.command("push")(push)
    snapshot.command("pull")(pull)
    snapshot.command("sweep")(sweep)
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
    remote: Annotated[bool, typer.Option("--remote", help="those in the storage of blobs.url")] = False,
    output: Annotated[Output, typer.Option(help="auto: table on a terminal, else json")] = "auto",
) -> None:
    """List the snapshots of this key."""
    if remote:
        print_rows([_remote_row(item) for item in _remote(sandbox_id)], _REMOTE_COLUMNS, output)
        return
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
    remote: Annotated[bool, typer.Option("--remote", help="in the storage of blobs.url, and not here")] = False,
) -> None:
    """Delete snapshots. Sandboxes that were started from one live on."""
    for snapshot in snapshots:
        call("DELETE", f"/remote/snapshots/{snapshot}" if remote else f"/templates/{word(snapshot)}")


def push(snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="ids or names")]) -> None:
    """Send snapshots to the storage of blobs.url; every node that has it can start from them. What is there already is
    not sent again, so one that was cut off goes on."""
    _move("push", snapshots)


def pull(snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="ids or names")]) -> None:
    """Fetch snapshots from the storage of blobs.url, checked. Starting from one does it by itself."""
    _move("pull", snapshots)


def sweep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would go, and remove nothing")] = False,
    deep: Annotated[bool, typer.Option("--verify", help="read everything that stays, and check it")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="as --verify, and remove damaged chunks: the next push sends them again")
    ] = False,
) -> None:
    """Remove from the storage of blobs.url what no snapshot needs, of all tenants. It is asked directly, with the
    settings and the credentials of this shell."""
    sweep_storage(dry_run=dry_run, deep=deep, repair=repair)


_REMOTE_COLUMNS = ["id", "created", "mb", "here"]
_POLL_SECONDS = 0.3


def _remote(sandbox_id: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call("GET", "/remote/snapshots").json()
    return [item for item in found if sandbox_id in (None, item["sandboxID"])]


def _remote_row(item: dict[str, Any]) -> dict[str, Any]:
    megabytes = round(item["sizeBytes"] / (1 << 20), 1)
    return {"id": item["snapshotID"], "created": item["createdAt"], "mb": megabytes, "here": item["here"]}


def _move(direction: str, snapshots: list[str]) -> None:
    for snapshot in snapshots:
        moving = call("POST", "/remote/transfers", json={"snapshotID": snapshot, "direction": direction}).json()
        shown = TransferLine(direction, moving["snapshotID"])
        while moving["state"] in ("waiting", "running"):
            time.sleep(_POLL_SECONDS)
            found = call("GET", "/remote/transfers").json()
            same = [each for each in found if (each["direction"], each["buildID"]) == (direction, moving["buildID"])]
            if not same:
                raise SandyardError(f"{direction} of {snapshot}: the server was started anew", remedy="try again")
            moving = same[0]
            shown.update(moving)
        shown.close()
        if moving["state"] == "failed":
            raise SandyardError(f"{direction} of {snapshot}: {moving['error']}")
        print(moving["snapshotID"])
