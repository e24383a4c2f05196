"""`sandyard train RECIPE`: run a recipe's training with the flags people know."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from sandyard.cli.console import stdout
from sandyard.cli.yard import yard
from sandyard.errors import ConfigError, NotFound


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    recipe: Annotated[Path, typer.Argument(help="folder of the recipe, e.g. recipes/code_rl")],
    batch_size: Annotated[int | None, typer.Option(help="tasks per step", min=1)] = None,
    num_generations: Annotated[int | None, typer.Option(help="rollouts per task", min=2)] = None,
    max_steps: Annotated[int | None, typer.Option(help="training steps", min=0)] = None,
    model: Annotated[
        str | None, typer.Option(help="folder or GGUF file of a causal LM; without it the nano policy")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="`hermes`: use the built-in tool template if the model has none")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="task file in MBPP format; without it the built-in set")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0)] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="tokens per turn", min=1)] = None,
    max_turns: Annotated[int | None, typer.Option(min=1)] = None,
    lora_rank: Annotated[int | None, typer.Option(help="0: train all weights", min=0)] = None,
    save_steps: Annotated[int | None, typer.Option(help="checkpoint every N steps; 0: only at the end", min=0)] = None,
    seed: Annotated[int | None, typer.Option(help="same seed, same task order")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="where the run's files go [runs/NAME-TIME]")] = None,
    resume: Annotated[Path | None, typer.Option(help="run folder to continue")] = None,
    api_url: Annotated[
        str | None, typer.Option(help="server to use; without one a server is started for this run")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", help="any other field of the recipe's CONFIG: NAME=VALUE")
    ] = None,
) -> None:
    """Train with GRPO on code that runs in sandboxes; prints before and after, and where the report is."""
    given = {name: value for name, value in locals().items() if name not in {"recipe", "api_url", "options"}}
    module = load_recipe(recipe)
    config = override(module.CONFIG, {name: value for name, value in given.items() if value is not None}, options or [])
    with yard(api_url) as connection:
        asyncio.run(module.run(config, server=connection, console=stdout))


def load_recipe(folder: Path) -> ModuleType:
    """Import `recipe.py` of a recipe folder. Raises `NotFound` or `ConfigError` naming what is missing."""
    path = folder / "recipe.py"
    if not path.is_file():
        raise NotFound(f"no recipe.py in {folder}", remedy="name a folder like recipes/code_rl")
    name = f"sandyard_recipe_{folder.name}"
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for needed in ("CONFIG", "run"):
        if not hasattr(module, needed):
            raise ConfigError(f"{path} does not define {needed}")
    return module


def override(config: Any, given: dict[str, Any], options: list[str]) -> Any:
    """A copy of a recipe's config with flags applied. Raises `ConfigError` naming an unknown field."""
    types = {field.name: type(getattr(config, field.name)) for field in dataclasses.fields(config)}
    changes = dict(given)
    for option in options:
        name, separator, text = option.partition("=")
        if not separator or name not in types:
            raise ConfigError(f"--set {option!r}: not NAME=VALUE of {', '.join(sorted(types))}")
        changes[name] = _convert(name, text, types[name])
    unknown = sorted(set(changes) - set(types))
    if unknown:
        raise ConfigError(f"this recipe has no {', '.join('--' + name.replace('_', '-') for name in unknown)}")
    return dataclasses.replace(config, **changes)


def _convert(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text) if kind in (int, float) else text
    except (KeyError, ValueError) as error:
        raise ConfigError(f"--set {name}={text!r}: not a {kind.__name__}") from error
