"""The stages of a Dockerfile: where each starts, and which of them a build needs."""

from __future__ import annotations

import platform as host
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sandyard.errors import BadRequest
from sandyard.images.dockerfile.scope import PREDEFINED, Scope
from sandyard.images.dockerfile.syntax import Dockerfile, DockerfileError, Instruction, assignments

SCRATCH = "scratch"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Stage:
    """`base`: the index of an earlier stage, or the name of an image."""

    index: int
    name: str | None
    base: int | str
    start: Instruction
    steps: Sequence[Instruction]


@dataclass(slots=True)
class Stages:
    """`globals`: what ARGs before the first FROM came to, for stages that ask for them. `build_args` were given."""

    all: list[Stage]
    globals: dict[str, str]
    build_args: Mapping[str, str]
    escape: str
    declared: set[str] = field(default_factory=set)

    def find(self, text: str, below: int) -> Stage | None:
        """A stage before `below`, by name or number. Names do not mind case."""
        for stage in reversed(self.all[:below]):
            if stage.name is not None and stage.name == text.lower():
                return stage
        return self.all[int(text)] if text.isdecimal() and len(text) < 6 and int(text) < below else None

    def target(self, text: str | None) -> Stage:
        """The stage that is asked for, else the last. Raises `BadRequest`."""
        if text is None:
            return self.all[-1]
        found = self.find(text, len(self.all))
        if found is None:
            names = ", ".join(stage.name or str(stage.index) for stage in self.all)
            raise BadRequest(f"target '{text}' is no stage", field="target", remedy=f"there are: {names}")
        return found

    def needed(self, target: Stage) -> list[Stage]:
        """`target` and all it takes files from, in their order."""
        wanted = {target.index}
        for stage in reversed(self.all[: target.index + 1]):
            if stage.index in wanted:
                wanted |= {stage.base} if isinstance(stage.base, int) else set()
                found = [self.find(text, stage.index) for step in stage.steps for text in origins(step)]
                wanted |= {other.index for other in found if other is not None}
        return [stage for stage in self.all if stage.index in wanted]


def host_platform() -> str:
    return f"linux/{_ARCHITECTURES.get(host.machine(), host.machine())}"


def split(file: Dockerfile, build_args: Mapping[str, str]) -> Stages:
    """Raises `DockerfileError`: an instruction before FROM, a platform that is not this host's, a name twice."""
    system, _, architecture = host_platform().partition("/")
    known = {f"{side}{name}": value for side in ("TARGET", "BUILD") for name, value in
             (("PLATFORM", host_platform()), ("OS", system), ("ARCH", architecture), ("VARIANT", ""))}  # fmt: skip
    scope = Scope({}, file.escape)
    for name, value in known.items():
        scope.set_arg(name, build_args.get(name, value))
    stages = Stages([], scope.args, build_args, file.escape)
    for instruction in file.instructions:
        if instruction.name == "FROM":
            stages.all.append(_stage(instruction, stages, scope))
        elif stages.all:
            steps = stages.all[-1].steps
            assert isinstance(steps, list)
            steps.append(instruction)
        elif instruction.name == "ARG":
            for word in instruction.args:
                name, default = scope.assignment(word, instruction.line)
                stages.declared.add(name)
                if name in build_args or default is not None:
                    scope.set_arg(name, build_args.get(name, default or ""))
        else:
            raise DockerfileError(instruction.line, f"{instruction.name} before the first FROM")
    if not stages.all:
        raise DockerfileError(1, "no FROM")
    stages.declared |= {
        word.partition("=")[0]
        for stage in stages.all
        for step in stage.steps
        if step.name == "ARG"
        for word in step.args
    }
    return stages


def unused_args(stages: Stages) -> Sequence[str]:
    """Build arguments that no ARG declares."""
    return sorted(set(stages.build_args) - stages.declared - PREDEFINED - set(stages.globals))


def origins(step: Instruction) -> Sequence[str]:
    """Stages or images that an instruction takes files from, as written."""
    if step.name == "COPY":
        return [text] if (text := step.flag("from")) is not None else []
    if step.name == "RUN":
        mounts = [assignments(value, step.line, "--mount") for value in step.all_of("mount")]
        return [mount["from"] for mount in mounts if "from" in mount]
    return []


def _stage(start: Instruction, stages: Stages, scope: Scope) -> Stage:
    words = list(start.args)
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
        raise DockerfileError(start.line, "FROM takes an image, and may name its stage: FROM image AS name")
    name = words[2].lower() if len(words) == 3 else None
    if name is not None and any(stage.name == name for stage in stages.all):
        raise DockerfileError(start.line, f"there is a stage '{name}' already")
    image = scope.expand(words[0], start.line).strip()
    if not image:
        raise DockerfileError(start.line, f"FROM {words[0]} names no image", remedy="give its ARG a value: --build-arg")
    wanted = scope.expand(start.flag("platform") or "", start.line)
    if wanted and wanted != host_platform():
        raise DockerfileError(start.line, f"FROM --platform={wanted}: builds here are for {host_platform()}")
    known = stages.find(image, len(stages.all)) if not image.isdecimal() else None
    return Stage(len(stages.all), name, known.index if known is not None else image, start, [])
