"""The environment variables that the sandbox was made with.

A sandbox may be made before anybody knows whose it will be: this server and its first kernels then run
already when the variables come. They lie in a file that is read before each execution.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

PLACE = Path("/run/sandyard/environment.json")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def given(place: Path = PLACE) -> Mapping[str, str]:
    """The variables in the file; none where there is no such file, or where it is not one of ours."""
    try:
        return checked(json.loads(place.read_text()))
    except (OSError, ValueError):
        return {}


def checked(variables: object) -> dict[str, str]:
    """`variables` if they can be set in any language. Raises `ValueError` naming the first that cannot."""
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise ValueError("env_vars is not an object of strings")
    for name, value in variables.items():
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"env_vars: the value of {name!r} is not a string without NUL")
        if not _NAME.fullmatch(name):
            raise ValueError(f"env_vars: {name!r} is not a variable's name")
    return variables
