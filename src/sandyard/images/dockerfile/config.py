"""What an image says of how it is run: kept under the names of the OCI image specification (`config.md`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandyard.images.build.expand import DEFAULT_PATH
from sandyard.images.dockerfile.syntax import DockerfileError, Instruction

SHELL = ("/bin/sh", "-c")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9, "h": 3600e9}
_PORT = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/(tcp|udp|sctp))?", re.IGNORECASE)
_HEALTH = {
    "interval": "Interval",
    "timeout": "Timeout",
    "start-period": "StartPeriod",
    "start-interval": "StartInterval",
}


@dataclass(slots=True)
class ImageSettings:
    """`command_is_own`: ENTRYPOINT or CMD was set by the Dockerfile, not by what it starts from."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    entrypoint: list[str] | None = None
    command: list[str] | None = None
    command_is_own: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    ports: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    healthcheck: dict[str, Any] | None = None
    shell: list[str] = field(default_factory=list)
    stop_signal: str = ""
    on_build: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, oci: Mapping[str, Any]) -> ImageSettings:
        """From an image's `config` object, with any of its keys missing."""
        return cls(
            env=dict(str(entry).partition("=")[::2] for entry in oci.get("Env") or ()),
            workdir=str(oci.get("WorkingDir") or ""),
            user=str(oci.get("User") or ""),
            entrypoint=_list(oci.get("Entrypoint")),
            command=_list(oci.get("Cmd")),
            labels=dict(oci.get("Labels") or {}),
            ports=list(oci.get("ExposedPorts") or ()),
            volumes=list(oci.get("Volumes") or ()),
            healthcheck=dict(oci["Healthcheck"]) if oci.get("Healthcheck") else None,
            shell=_list(oci.get("Shell")) or [],
            stop_signal=str(oci.get("StopSignal") or ""),
            on_build=_list(oci.get("OnBuild")) or [],
        )

    def oci(self) -> dict[str, Any]:
        """The `config` object; what is not set is left out."""
        found: dict[str, Any] = {
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": self.workdir,
            "User": self.user,
            "Entrypoint": self.entrypoint,
            "Cmd": self.command,
            "Labels": self.labels,
            "ExposedPorts": {port: {} for port in self.ports},
            "Volumes": {volume: {} for volume in self.volumes},
            "Healthcheck": self.healthcheck,
            "Shell": self.shell,
            "StopSignal": self.stop_signal,
            "OnBuild": self.on_build,
        }
        return {name: value for name, value in found.items() if value}

    def run_command(self, instruction: Instruction) -> list[str]:
        """An instruction's command as an argument list: in shell form it is the shell's."""
        if instruction.exec_form:
            return list(instruction.args)
        return [*(self.shell or SHELL), *instruction.args]

    def start(self) -> list[str]:
        """What a container of the image would run; empty for nothing. Reference, "how CMD and ENTRYPOINT interact"."""
        return [*(self.entrypoint or ()), *(self.command or ())]


def scratch_env() -> dict[str, str]:
    """What an image without a base has: builders set the path."""
    return {"PATH": DEFAULT_PATH}


def ports(words: Sequence[str], line: int) -> list[str]:
    """`80`, `80/udp` and `8000-8010` as OCI has them. Raises `DockerfileError`."""
    found: list[str] = []
    for word in words:
        match = _PORT.fullmatch(word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if match is None or not 0 < first <= last < 65536:
            raise DockerfileError(line, f"EXPOSE {word}: not a port, or range of ports, with /tcp, /udp or /sctp")
        found += [f"{port}/{(match[3] or 'tcp').lower()}" for port in range(first, last + 1)]
    return found


def healthcheck(instruction: Instruction) -> dict[str, Any]:
    """The `Healthcheck` object; durations in nanoseconds. Raises `DockerfileError`."""
    line = instruction.line
    kind, *command = instruction.args or ("",)
    if kind.upper() == "NONE":
        if command or instruction.flags:
            raise DockerfileError(line, "HEALTHCHECK NONE takes nothing else")
        return {"Test": ["NONE"]}
    if kind.upper() != "CMD" or not command:
        raise DockerfileError(line, "HEALTHCHECK takes CMD with a command, or NONE")
    found: dict[str, Any] = {"Test": ["CMD", *command] if instruction.exec_form else ["CMD-SHELL", *command]}
    for name, value in instruction.flags:
        if name != "retries":
            found[_HEALTH[name]] = _nanoseconds(name, value, line)
        elif value.isdecimal() and len(value) < 10:
            found["Retries"] = int(value)
        else:
            raise DockerfileError(line, f"HEALTHCHECK --retries={value}: not a number")
    return {name: value for name, value in found.items() if value}


def _nanoseconds(name: str, value: str, line: int) -> int:
    parts = _DURATION.findall(value)
    if value == "0":
        return 0
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise DockerfileError(line, f"HEALTHCHECK --{name}={value}: write a duration, as 30s or 1m30s")
    return round(sum(float(number) * _UNITS[unit] for number, unit in parts))


def _list(value: Any) -> list[str] | None:
    return [str(part) for part in value] if value else None
