"""A stage, worked out before anything runs: each instruction's work, its key for the cache, the image's settings.

Keys hold what a step's files can depend on, and nothing else: its arguments with variables replaced, the variables a
command sees, the bytes and modes of the files it copies, and the key of the step before.
"""

from __future__ import annotations

import copy
import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Sequence

from e2b_dockerfile_utils import parse_heredoc

from sandyard.images.build.chain import then
from sandyard.images.dockerfile.actions import Action, MakeFolder, MakeUser, Mount, Origin, Planned, Put, Run, Work
from sandyard.images.dockerfile.config import ImageSettings, healthcheck, ports
from sandyard.images.dockerfile.mounts import mounts_of
from sandyard.images.dockerfile.scope import PREDEFINED, Scope
from sandyard.images.dockerfile.stages import Stage, Stages
from sandyard.images.dockerfile.syntax import DockerfileError, Instruction, pairs, parse_trigger, quoted
from sandyard.images.dockerfile.tree import NoSource, Tree

_FORMAT = "dockerfile 1"  # change when an instruction comes to do something else
_MODE = re.compile(r"[0-7]{1,5}")
_REMOTE = re.compile(r"(?:https?|git|ssh)://|git@", re.IGNORECASE)
_LONE_HEREDOC = re.compile(r"<<-?\s*(['\"]?)[^\s'\"<>|&;]+\1")


class Planner:
    """`context`: the tree of the files that were sent, None where none were. `key_of`: the key of a stage or image.
    `network`: whether commands of this build reach one."""

    def __init__(
        self, stages: Stages, context: Tree | None, key_of: Callable[[int | str], str], *, network: bool
    ) -> None:
        self.stages = stages
        self._context = context
        self.key_of = key_of
        self.network = network

    def plan(self, stage: Stage, base: ImageSettings, number: int) -> Planned:
        """`number`: of the stage's first instruction. Raises `DockerfileError`."""
        return _StagePlan(self, stage, base, number).run()

    def digest(self, origin: Origin, sources: Sequence[str], line: int) -> str:
        """Of the files that a source names. Raises `DockerfileError` where the context has none."""
        if origin is not None:
            return self.key_of(origin)
        total = hashlib.sha256()
        for source in sources:
            try:
                found = self.context(line).find(source)
            except NoSource as error:
                raise DockerfileError(line, f"{error}: no file of the build context") from error
            for each in found:
                total.update(
                    f"{each.name}\0{self.context(line).digest(each.path)}\0".encode("utf-8", "surrogateescape")
                )
        return total.hexdigest()

    def context(self, line: int) -> Tree:
        if self._context is None:
            raise DockerfileError(
                line, "it needs files of the build context, and none were sent", remedy="build with --whole-context"
            )
        return self._context

    def origin(self, text: str, stage: Stage) -> Origin:
        found = self.stages.find(text, stage.index)
        return found.index if found is not None else text


class _StagePlan:
    def __init__(self, planner: Planner, stage: Stage, base: ImageSettings, number: int) -> None:
        self._planner = planner
        self._stage = stage
        self._stages = planner.stages
        self._settings = copy.deepcopy(base)
        self._scope = Scope(base.env, self._stages.escape)
        self._key = then(planner.key_of(stage.base), _FORMAT, [])
        self._number = number
        self._command_here = False

    def run(self) -> Planned:
        triggers = [
            parse_trigger(text, self._stage.start.line, self._stages.escape) for text in self._settings.on_build
        ]
        self._settings.on_build = []
        works = [self._work(step) for step in (*triggers, *self._stage.steps)]
        stage = self._stage
        label = stage.name or (f"stage {stage.index}" if len(self._stages.all) > 1 else "")
        self._settings.env = dict(self._scope.env)
        return Planned(stage.index, label, stage.base, works, self._settings, self._key)

    def _work(self, step: Instruction) -> Work:
        action = self._action(step)
        if action is not None:
            self._key = then(self._key, step.name, [json.dumps(self._parts(action, step), ensure_ascii=True)])
        work = Work(self._number, step.line, step.title, action, self._key)
        self._number += 1
        return work

    def _parts(self, action: Action, step: Instruction) -> list[object]:
        match action:
            case Run():
                env = sorted((name, value) for name, value in action.env.items() if name not in PREDEFINED)
                mounts = [self._mount_parts(mount, step.line) for mount in action.mounts]
                return [list(action.argv), env, action.cwd, action.user, action.script, mounts]
            case Put():
                files = "" if action.inline and not action.sources else self._planner.digest(
                    action.origin, action.sources, step.line
                )  # fmt: skip
                how = [action.target, action.owner, action.mode, list(action.exclude), action.unpack]
                return [list(action.sources), [list(each) for each in action.inline], files, *how]
            case MakeFolder():
                return [action.path, action.user]
            case MakeUser():
                return [action.name]

    def _mount_parts(self, mount: Mount, line: int) -> list[object]:
        files = self._planner.digest(mount.origin, [mount.source], line) if mount.kind == "bind" else ""
        return [mount.kind, mount.target, mount.source, files, list(mount.owner), mount.mode]

    def _action(self, step: Instruction) -> Action | None:
        settings = self._settings
        match step.name:
            case "RUN":
                return self._run(step)
            case "COPY" | "ADD":
                return self._put(step)
            case "WORKDIR":
                path = self._word(step)
                settings.workdir = posixpath.normpath(posixpath.join(settings.workdir or "/", path))
                return MakeFolder(settings.workdir, settings.user)
            case "USER":
                settings.user = self._word(step)
                name = settings.user.partition(":")[0]
                return MakeUser(name) if not name.isdecimal() else None
            case "ARG":
                self._arg(step)
            case "ENV":
                found = [(self._scope.expand(n, step.line), self._scope.expand(v, step.line)) for n, v in pairs(step)]
                for name, value in found:
                    self._scope.set_env(name, value)
            case _:
                self._set(step, settings)
        return None

    def _set(self, step: Instruction, settings: ImageSettings) -> None:
        """Instructions that say something of the image, and do nothing."""
        match step.name:
            case "LABEL":
                for name, value in pairs(step):
                    settings.labels[self._scope.expand(name, step.line)] = self._scope.expand(value, step.line)
            case "CMD":
                settings.command = settings.run_command(step) if step.args else None
                settings.command_is_own = self._command_here = True
            case "ENTRYPOINT":
                settings.entrypoint = settings.run_command(step) if step.args else None
                settings.command = settings.command if self._command_here else None
                settings.command_is_own = True
            case "SHELL":
                if not step.exec_form:
                    raise DockerfileError(step.line, 'SHELL takes a JSON list: SHELL ["/bin/sh", "-c"]')
                settings.shell = list(step.args)
            case "EXPOSE":
                settings.ports = list(dict.fromkeys([*settings.ports, *ports(self._words(step), step.line)]))
            case "VOLUME":
                settings.volumes = list(dict.fromkeys([*settings.volumes, *self._words(step)]))
            case "HEALTHCHECK":
                settings.healthcheck = healthcheck(step)
            case "STOPSIGNAL":
                settings.stop_signal = self._word(step)
            case "ONBUILD":
                trigger = step.text.split(None, 1)[1] if len(step.text.split(None, 1)) > 1 else ""
                parse_trigger(trigger, step.line, self._stages.escape)
                settings.on_build.append(trigger)

    def _arg(self, step: Instruction) -> None:
        if not step.args:
            raise DockerfileError(step.line, "ARG takes a name")
        for word in step.args:
            name, default = self._scope.assignment(word, step.line)
            value = self._stages.build_args.get(name, default)
            value = self._stages.globals.get(name) if value is None else value
            if value is not None:
                self._scope.set_arg(name, value)

    def _run(self, step: Instruction) -> Run:
        network = step.flag("network") or "default"
        if network != "default" and not (network == "none" and not self._planner.network):
            raise DockerfileError(step.line, f"RUN --network={network} is not supported on this node")
        if not step.args:
            raise DockerfileError(step.line, "RUN takes a command")
        known = {name: value for name, value in self._stages.build_args.items() if name in PREDEFINED}
        cwd = self._settings.workdir or "/"
        mounts = mounts_of(step, cwd, self._scope.expand, lambda text: self._planner.origin(text, self._stage))
        argv, script = self._settings.run_command(step), None
        if step.heredocs:
            argv, script = self._heredoc(step)
        return Run(argv, {**known, **self._scope.known()}, cwd, self._settings.user, mounts, script)

    def _heredoc(self, step: Instruction) -> tuple[list[str], str | None]:
        """A heredoc alone is the command, or a script for the program it names; else the shell gets all of it."""
        shell, command = self._settings.run_command(step)[:-1], step.args[0]
        first = step.heredocs[0]
        if len(step.heredocs) == 1 and _LONE_HEREDOC.fullmatch(command.strip()):
            return ([], first.content) if first.content.startswith("#!") else ([*shell, first.content], None)
        bodies = "".join(f"{heredoc.content}{heredoc.name}\n" for heredoc in step.heredocs)
        return [*shell, f"{command}\n{bodies}"], None

    def _put(self, step: Instruction) -> Put:
        expand = self._scope.expand
        words = list(step.args)
        if len(words) < 2:
            raise DockerfileError(step.line, f"{step.name} takes a source and a destination")
        waiting = list(step.heredocs)
        sources: list[str] = []
        inline: list[tuple[str, str]] = []
        for word in words[:-1]:
            if waiting and not step.exec_form and parse_heredoc(word) is not None:
                body = waiting.pop(0)
                text = self._scope.expand_plain(body.content, step.line) if body.expand else body.content
                inline.append((body.name, text))
            else:
                sources.append(expand(word, step.line))
        for source in sources:
            if step.name == "ADD" and _REMOTE.match(source):
                raise DockerfileError(step.line, f"ADD of a URL ({source}) is refused", remedy="fetch it in a RUN")
        target = expand(words[-1], step.line)
        named = step.flag("from")
        origin = self._planner.origin(named, self._stage) if named is not None else None
        if len(sources) + len(inline) > 1 and not target.endswith(("/", "/.")) and target != ".":
            raise DockerfileError(
                step.line, f"{step.name} of several sources: the destination '{target}' must end with a slash"
            )
        if origin is not None:  # in an image `..` ends at the root
            sources = [posixpath.normpath(f"/{source}").lstrip("/") or "." for source in sources]
        mode = expand(step.flag("chmod") or "", step.line)
        if mode and not _MODE.fullmatch(mode):
            raise DockerfileError(step.line, f"{step.name} --chmod={mode}: write an octal mode")
        return Put(
            tuple(sources),
            self._target(target),
            origin,
            tuple(inline),
            expand(step.flag("chown") or "", step.line) or None,
            int(mode, 8) if mode else None,
            tuple(expand(each, step.line) for each in step.all_of("exclude")),
            step.name == "ADD",
        )

    def _target(self, text: str) -> str:
        path = posixpath.normpath(posixpath.join(self._settings.workdir or "/", text))
        path = path if not path.startswith("//") else path[1:]
        return f"{path.rstrip('/')}/" if text.endswith(("/", "/.", "/..")) or text in (".", "..") else path

    def _word(self, step: Instruction) -> str:
        """The one argument, which must not be empty."""
        found = self._scope.expand(step.args[0], step.line).strip() if step.args else ""
        if not found:
            raise DockerfileError(step.line, f"{step.name} {quoted(step.args)}: it is empty")
        return found

    def _words(self, step: Instruction) -> list[str]:
        if step.exec_form:
            found = [self._scope.expand(word, step.line) for word in step.args]
        else:
            found = [word for arg in step.args for word in self._scope.words(arg, step.line)]
        if not found or not all(found):
            raise DockerfileError(step.line, f"{step.name} takes at least one value")
        return found
