"""`sandyard sandbox VERB`, and the short verbs people type: start, exec, connect, list, timeout, delete."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TextIO

import httpx
import typer
from e2b import NotFoundException, Sandbox, SandboxQuery

from sandyard.cli import lifecycle, logs, transfer
from sandyard.cli.console import Output, print_rows, stderr, stdout
from sandyard.cli.rest import call, word
from sandyard.cli.terminal import attach, exit_code, require_terminal
from sandyard.connection import resolve_connection
from sandyard.errors import BadRequest, NotFound

SandboxId = Annotated[str, typer.Argument(metavar="ID", help="sandbox id, as `sandyard list` prints it")]


def register(app: typer.Typer) -> None:
    sandbox = typer.Typer(help="Start, use and end sandboxes.", no_args_is_help=True)
    app.add_typer(sandbox, name="sandbox")
    for target in (sandbox, app):
        target.command("start")(start)
        target.command("exec", context_settings={"ignore_unknown_options": True})(execute)
        target.command("connect")(connect)
        target.command("cn", hidden=True)(connect)
        target.command("list")(list_sandboxes)
        target.command("ls", hidden=True)(list_sandboxes)
        target.command("timeout")(set_timeout)
        target.command("delete")(delete)
        target.command("rm", hidden=True)(delete)
        target.command("sweep")(sweep)
        for verbs in (lifecycle, logs, transfer):
            verbs.add(target)


def start(
    template: Annotated[str, typer.Argument(help="template name or id")] = "base",
    timeout: Annotated[int, typer.Option(help="seconds until the sandbox ends by itself")] = 300,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="print the id, do not attach a shell")] = False,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE, may be repeated")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="NAME=VALUE, may be repeated")] = None,
    cold: Annotated[str | None, typer.Option(metavar="IMAGE", help="start from an image, of a size of its own")] = None,
    cpu: Annotated[int | None, typer.Option(help="cores, with --cold", min=1)] = None,
    memory: Annotated[int | None, typer.Option(help="MiB of memory, with --cold", min=128)] = None,
    disk_size_mb: Annotated[int | None, typer.Option(help="MiB of disk, whole GiB, with --cold", min=1024)] = None,
) -> None:
    """Start a sandbox and attach a shell to it; it lives on after the shell until its timeout."""
    if not detach:
        require_terminal()
    common: dict[str, Any] = {"timeout": timeout, "metadata": pairs(label, "--label")}
    envs = pairs(env, "--env")
    sizes = {"cpuCount": cpu, "memoryMB": memory, "diskSizeMB": disk_size_mb}
    if cold is not None:
        box = _start_cold({"image": cold, **common, "envVars": envs}, sizes)
    elif any(size is not None for size in sizes.values()):
        raise BadRequest("--cpu, --memory and --disk-size-mb go with --cold", remedy="a template has its own size")
    else:
        box = Sandbox.create(template, envs=envs, **common, **resolve_connection().sdk_options())
    if detach:
        print(box.sandbox_id)
        return
    stderr.print(
        f"sandbox {box.sandbox_id}, ends by itself in {timeout} s; `sandyard delete {box.sandbox_id}` ends it now",
        soft_wrap=True,
    )
    raise typer.Exit(attach(box))


def _start_cold(body: dict[str, Any], sizes: Mapping[str, int | None]) -> Sandbox:
    chosen = {name: size for name, size in sizes.items() if size is not None}
    made = call("POST", "/sandboxes-cold", json={**body, **chosen, "secure": True, "autoPause": False}).json()
    box: Sandbox = Sandbox.connect(made["sandboxID"], timeout=body["timeout"], **resolve_connection().sdk_options())
    return box


def execute(
    sandbox_id: SandboxId,
    command: Annotated[
        list[str], typer.Argument(metavar="CMD...", help="one word is a shell line; more are passed as they are")
    ],
    user: Annotated[str | None, typer.Option(help="user to run as")] = None,
    cwd: Annotated[str | None, typer.Option(help="working directory")] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="send this standard input to the command")
    ] = False,
) -> None:
    """Run a command; its output streams here and its exit code is this command's own."""
    box = _connect(sandbox_id)
    handle = box.commands.run(
        command[0] if len(command) == 1 else shlex.join(command),
        background=True,
        user=user,
        cwd=cwd,
        stdin=interactive,
        timeout=0,
    )
    if interactive:
        while chunk := sys.stdin.readline():
            box.commands.send_stdin(handle.pid, chunk)
        box.commands.close_stdin(handle.pid)
    try:
        status = exit_code(lambda: handle.wait(on_stdout=_writer(sys.stdout), on_stderr=_writer(sys.stderr)))
    except KeyboardInterrupt:
        handle.kill()
        status = 130
    raise typer.Exit(status)


def connect(sandbox_id: SandboxId) -> None:
    """Attach an interactive shell (a PTY that follows this terminal's size)."""
    require_terminal()
    raise typer.Exit(attach(_connect(sandbox_id)))


def list_sandboxes(
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="only those with NAME=VALUE")] = None,
    output: Annotated[Output, typer.Option(help="auto: table on a terminal, else json")] = "auto",
) -> None:
    """List the sandboxes of this key."""
    pages = Sandbox.list(query=SandboxQuery(metadata=pairs(label, "--label")), **resolve_connection().sdk_options())
    rows = []
    while pages.has_next:
        rows += [
            {
                "id": item.sandbox_id,
                "template": item.name or item.template_id,
                "state": item.state.value,
                "started": item.started_at.isoformat(timespec="seconds"),
                "ends": item.end_at.isoformat(timespec="seconds"),
                "labels": item.metadata,
            }
            for item in pages.next_items()
        ]
    print_rows(rows, ["id", "template", "state", "started", "ends", "labels"], output)


def set_timeout(sandbox_id: SandboxId, seconds: Annotated[int, typer.Argument(help="from now; 0 ends it now")]) -> None:
    """Set how long a sandbox may still live."""
    call("POST", f"/sandboxes/{word(sandbox_id)}/timeout", json={"timeout": seconds})


def delete(sandbox_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="sandbox ids")]) -> None:
    """End sandboxes."""
    options = resolve_connection().sdk_options()
    missing = [item for item in sandbox_ids if not Sandbox.kill(item, **options)]
    if missing:
        raise NotFound(f"no such sandbox: {', '.join(missing)}", remedy="`sandyard list` shows what lives")


def sweep(
    label: Annotated[list[str], typer.Option("--label", "-l", help="NAME=VALUE, may be repeated; all must match")],
) -> None:
    """End every sandbox that carries all these labels, and print their ids."""
    connection = resolve_connection()
    body = {"metadata": pairs(label, "--label")}
    answer = httpx.post(f"{connection.api_url}/sweep", json=body, headers=connection.headers(), timeout=120)
    answer.raise_for_status()
    for sandbox_id in answer.json()["sandboxIDs"]:
        stdout.print(sandbox_id)


def pairs(items: Sequence[str] | None, option: str) -> dict[str, str]:
    """Turn NAME=VALUE words into a dict. Raises `BadRequest` naming the option."""
    result = {}
    for item in items or ():
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise BadRequest(f"{option} {item!r} is not NAME=VALUE", field=option)
        result[name] = value
    return result


def _connect(sandbox_id: str) -> Sandbox:
    try:
        return Sandbox.connect(sandbox_id, **resolve_connection().sdk_options())
    except NotFoundException as error:
        raise NotFound(f"no such sandbox: {sandbox_id}", remedy="`sandyard list` shows what lives") from error


def _writer(stream: TextIO) -> Callable[[str], None]:
    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return write
