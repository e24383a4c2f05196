"""Which modules a program may import, and what of them.

A member that is not listed is refused when it is used: it would show the interpreter instead of the
program (`sys.stdout`, `operator.attrgetter`, …), or nobody has tried it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from sandyard.envs.interpreter.traps import Trap

_TYPING = (
    "Any Callable Deque Dict FrozenSet Generator Iterable Iterator List Mapping Optional Sequence Set Tuple Type Union"
)
_MEMBERS: Mapping[str, str | None] = {  # None: everything public that is no module
    "array": None,
    "bisect": None,
    "cmath": None,
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "copy deepcopy",
    "datetime": "date datetime time timedelta timezone MAXYEAR MINYEAR",
    "decimal": None,
    "fractions": "Fraction",
    "functools": "cmp_to_key lru_cache cache partial reduce",
    "heapq": None,
    "itertools": None,
    "json": "dumps loads",
    "math": None,
    "operator": "abs add and_ concat contains countOf eq floordiv ge getitem gt index indexOf inv invert is_ is_not "
    "itemgetter le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv truth xor",
    "random": None,
    "re": None,
    "statistics": None,
    "string": "ascii_letters ascii_lowercase ascii_uppercase capwords digits hexdigits octdigits printable "
    "punctuation whitespace",
    "sys": "maxsize",
    "time": "time sleep monotonic perf_counter",
    "typing": _TYPING,
    "unicodedata": None,
}
DEFAULT_IMPORTS = frozenset(_MEMBERS)


def allows(module: str, member: str) -> bool:
    """Whether `module.member` may be used; of a module that is not listed here, every public member."""
    listed = _MEMBERS.get(module)
    if listed is not None:
        return member in listed.split()
    return not member.startswith("_") and not isinstance(getattr(_load(module), member, None), ModuleType)


def exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@cache
def _load(module: str) -> ModuleType:
    return importlib.import_module(module)


class GuardedModule(ModuleType):
    """A module with the members that `allows` names; any other is a `Trap`, or missing as it is."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        real = _load(name)
        for member in dir(real):
            if not member.startswith("_") and allows(name, member):
                self.__dict__[member] = getattr(real, member)

    def __getattr__(self, member: str) -> Any:
        if hasattr(_load(self.__name__), member):
            raise Trap(f"{self.__name__}.{member}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {member!r}")

    def __setattr__(self, member: str, value: object) -> None:
        raise Trap(f"setting {self.__name__}.{member}")

    def __repr__(self) -> str:
        return repr(_load(self.__name__))


def guarded(name: str, imports: Collection[str]) -> GuardedModule:
    """The module `name`. Raises `Trap` when it is not of `imports`."""
    if name not in imports:
        raise Trap(f"import of {name}")
    return GuardedModule(name)
