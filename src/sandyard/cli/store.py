"""`sandyard store`: what this machine keeps of images, templates and snapshots."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from sandyard.cli.console import Output, print_rows, stderr
from sandyard.cli.keeping import alone, through_server
from sandyard.config import Settings, load_settings
from sandyard.errors import HostError

Form = Annotated[Output, typer.Option(help="auto: table on a terminal, else json")]


def register(app: typer.Typer) -> None:
    store = typer.Typer(
        help="What this machine keeps: how much, whether it is whole, what may go.", no_args_is_help=True
    )
    store.command("df")(df)
    store.command("gc")(gc)
    store.command("verify")(verify)
    app.add_typer(store, name="store")


def df(output: Form = "auto") -> None:
    """How much of the disk is what, and the watermarks of the layers of images."""
    from sandyard.images.oci.room import Watermarks
    from sandyard.sandboxes.storage.usage import usage
    from sandyard.server.control.storage import store_view

    settings = load_settings()
    try:
        shown = store_view(Watermarks.of(settings), usage(settings))  # it only looks, server or not
    except OSError as error:
        raise _unreadable(settings, error) from error
    rows = [{"kind": use.kind, "mib": _mib(use.sizeBytes), "files": use.count, "path": use.path} for use in shown.kinds]
    print_rows(rows, ["kind", "mib", "files", "path"], output)
    stderr.print(f"layers of images: at most {_mib(shown.highBytes)} MiB, then brought to {_mib(shown.lowBytes)} MiB")


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="tell what would go, and why the rest stays")] = False,
    all_unused: Annotated[
        bool, typer.Option("--all", help="every layer that nobody uses, whatever room there is")
    ] = False,
    output: Form = "auto",
) -> None:
    """Remove layers of images that no template, snapshot or sandbox uses, the longest unused first, until what is
    left is below the low watermark."""
    settings = load_settings()
    done = through_server(settings, "/store/gc", {"dryRun": dry_run, "all": all_unused})
    if done is None:
        done = _collect(settings, dry_run=dry_run, free=-1 if all_unused else None)
    rows = [
        {
            "layer": layer["key"][:16],
            "mib": _mib(layer["sizeBytes"]),
            "unused_for": _since(layer["usedAt"]),
            "verdict": f"stays: {layer['why']}" if layer["why"] else "would go" if dry_run else "gone",
        }
        for layer in done["layers"]
        if dry_run or not layer["why"]
    ]
    print_rows(rows, ["layer", "mib", "unused_for", "verdict"], output)
    word = "would be freed" if dry_run else "freed"
    stderr.print(f"{_mib(done['freedBytes'])} MiB {word} of {_mib(done['usedBytes'])}")


def verify(
    deep: Annotated[bool, typer.Option("--deep", help="read every file and compare what it holds")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="move what is damaged aside, to be pulled or made anew")
    ] = False,
    output: Form = "auto",
) -> None:
    """Check every layer, template, snapshot and cache entry: there, whole, as it was made. Exit status 1 where
    something is damaged. What nothing names (of killed processes) is listed; it goes by itself."""
    settings = load_settings()
    done = through_server(settings, "/store/verify", {"deep": deep, "repair": repair})
    if done is None:
        done = _verify(settings, deep=deep, repair=repair)
    rows: list[dict[str, Any]] = [
        {"state": state, "kind": kind["kind"], "name": found["name"], "problem": found["problem"]}
        for kind in done["kinds"]
        for state in ("damaged", "orphans")
        for found in kind[state]
    ]
    print_rows(rows, ["name", "kind", "state", "problem"], output)
    for kind in done["kinds"]:
        blind = f", {kind['unknown']} with nothing to compare them to" if kind["unknown"] else ""
        stderr.print(f"{kind['kind']}: {kind['count']} checked{blind}")
    if damaged := sum(len(kind["damaged"]) for kind in done["kinds"]):
        moved = f"; what there is of it was moved to {settings.paths.state}/damaged" if repair else ""
        stderr.print(f"{damaged} damaged{moved}", style="red")
        raise typer.Exit(1)


def _collect(settings: Settings, *, dry_run: bool, free: int | None) -> dict[str, Any]:
    from sandyard.images.garbage.collect import collect, node_templates
    from sandyard.server.control.storage import collected

    try:
        outcome = alone(
            settings,
            lambda known: collect(
                settings, lambda: node_templates(settings) | known.in_use, free=free, dry_run=dry_run
            ),
        )
    except OSError as error:
        raise _unreadable(settings, error) from error
    return collected(outcome).model_dump()


def _verify(settings: Settings, *, deep: bool, repair: bool) -> dict[str, Any]:
    from sandyard.server.control.storage import verified
    from sandyard.server.storekeeper import checked, checkups

    found = alone(settings, lambda known: checkups(settings, checked(settings, known), deep=deep, repair=repair))
    return verified(found).model_dump()


def _unreadable(settings: Settings, error: OSError) -> HostError:
    return HostError(f"store {settings.paths.state}: {error}", remedy="run as root, and check its disk")


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f}"


def _since(moment: float) -> str:
    minutes = max(int(time.time() - moment) // 60, 0)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} d"
