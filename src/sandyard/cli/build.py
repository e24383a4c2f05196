"""`sandyard build`: a template from a Dockerfile, built by the server, its log followed to the end."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from sandyard.cli.console import stderr, stdout
from sandyard.cli.rest import SECONDS, call, word
from sandyard.cli.template import watch
from sandyard.errors import BadRequest, Conflict, NotFound, SandyardError
from sandyard.images.dockerfile import Dockerfile, parse
from sandyard.images.dockerfile.context import ignored, pack, scan, select, sources

_HELP = """Build a template from a Dockerfile.

The server builds it. Only files that some COPY or ADD names are sent, less what .dockerignore says. Each step is
shown as it runs; a step that fails ends the command with status 1 and names its line.

    sandyard build . -t tool:v1

    sandyard build app -f app/Dockerfile.gpu --target run --build-arg VERSION=3 -t app --memory 2048

    sandyard build -t tool --rebuild --no-cache
"""


def register(app: typer.Typer) -> None:
    app.command("build", help=_HELP)(build)


def build(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="directory of the files to copy")] = Path("."),
    tag: Annotated[str, typer.Option("-t", "--tag", "--name", help="NAME[:TAG] of the template")] = "",
    file: Annotated[
        str | None, typer.Option("-f", "--file", help="the Dockerfile, - for standard input [PATH/Dockerfile]")
    ] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option("--build-arg", metavar="NAME=VALUE", help="a value of an ARG; may be repeated")
    ] = None,
    target: Annotated[str | None, typer.Option(help="the stage to build [the last]")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="run every step anew")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="also where the template is there: it moves on")] = False,
    whole_context: Annotated[bool, typer.Option("--whole-context", help="send all files that are not ignored")] = False,
    cpu: Annotated[int | None, typer.Option(help="cores of a sandbox")] = None,
    memory: Annotated[int | None, typer.Option(help="MiB of memory of a sandbox")] = None,
    disk: Annotated[int | None, typer.Option(help="MiB that a sandbox may write")] = None,
    start_cmd: Annotated[str | None, typer.Option(help="runs in every sandbox [ENTRYPOINT and CMD]")] = None,
    ready_cmd: Annotated[str | None, typer.Option(help="succeeds once the start command is up")] = None,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="do not wait: `sandyard template watch` does")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="also what is for debugging")] = False,
) -> None:
    if not tag:
        raise BadRequest("a template needs a name", field="tag", remedy="give it one: -t NAME[:TAG]")
    text, where = _read(path, file)
    args = _build_args(build_arg or [])
    parsed = parse(text)
    with tempfile.TemporaryFile() as archive:
        digest = _pack(path, where, parsed, args, target, archive, whole=whole_context)
        _check_free(tag, rebuild=rebuild)
        sizes = {"cpuCount": cpu, "memoryMB": memory, "diskMB": disk}
        body = {"name": tag, **{name: value for name, value in sizes.items() if value is not None}}
        made = call("POST", "/v3/templates", json=body).json()
        if digest is not None:
            _send(made["templateID"], digest, archive)
    order: dict[str, Any] = {
        "dockerfile": {"text": text, "buildArgs": args, "target": target, "contextHash": digest},
        "force": no_cache,
        "startCmd": start_cmd,
        "readyCmd": ready_cmd,
    }
    call("POST", f"/v2/templates/{word(made['templateID'])}/builds/{word(made['buildID'])}", json=order)
    if detach:
        print(made["buildID"])
        return
    watch(made["templateID"], made["buildID"], verbose)
    stdout.print(f"{tag} is ready: sandyard start {tag}", markup=False, highlight=False, soft_wrap=True)


def _read(path: Path, file: str | None) -> tuple[str, Path | None]:
    """The text, and where it lies. Raises `BadRequest`."""
    if file == "-":
        return sys.stdin.read(), None
    where = Path(file) if file is not None else path / "Dockerfile"
    try:
        return where.read_text("utf-8-sig"), where
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{where} cannot be read: {error}", field="file", remedy="name it with -f") from error


def _build_args(given: list[str]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for each in given:
        name, sign, value = each.partition("=")
        if not name or not sign:
            raise BadRequest(f"--build-arg {each}: write NAME=VALUE", field="build-arg")
        found[name] = value
    return found


def _pack(
    path: Path,
    where: Path | None,
    parsed: Dockerfile,
    args: Mapping[str, str],
    target: str | None,
    archive: Any,
    *,
    whole: bool,
) -> str | None:
    """The hash of the archive, None where no file is needed. Raises `BadRequest`."""
    wanted = sources(parsed, args, target) if not whole else None
    if wanted is not None and not wanted:
        return None
    tree = scan(path, ignored(path, where))
    names = select(tree, wanted) if wanted is not None else sorted(tree.nodes)
    digest = pack(path, tree, names, archive)
    stderr.print(f"[dim]{len(names)} files of {path}, {archive.tell() >> 10} KiB[/dim]")
    return digest


def _check_free(tag: str, *, rebuild: bool) -> None:
    """A name that is taken is not moved on by mistake. Raises `Conflict`."""
    if rebuild:
        return
    try:
        found = call("GET", f"/templates/aliases/{word(tag if ':' in tag else f'{tag}:default')}").json()
    except NotFound:
        return
    raise Conflict(
        f"'{tag}' already points to a build of template {found['templateID']}",
        remedy="--rebuild builds it anew, another tag keeps both",
    )


def _send(template_id: str, digest: str, archive: Any) -> None:
    """Upload the archive, unless the server has it. The link in the answer carries its own permission."""
    link = call("GET", f"/templates/{word(template_id)}/files/{word(digest)}").json()
    if link["present"]:
        return
    archive.seek(0)
    answer = httpx.put(link["url"], content=archive, timeout=SECONDS)
    if not answer.is_success:
        raise SandyardError(f"the upload of the build context was refused ({answer.status_code}): {answer.text[:500]}")
