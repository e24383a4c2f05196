"""Plain data between the box and the judge. What one side says, the other distrusts.

JSON scalars stand for themselves; everything else is `[tag, payload]`. Mutable containers are
numbered in the order in which they are met, on both sides alike, so that aliases, cycles and
changes in place survive; `["ref", n]` is a container met before.
"""

from __future__ import annotations

import builtins
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Json = Any
_PLAIN_INT = 1 << 63
_NAMED_BY_VALUE: Mapping[str, Callable[[Any], Json]] = {
    "fractions.Fraction": lambda v: [hex(v.numerator), hex(v.denominator)],
    "decimal.Decimal": str,
    "datetime.date": lambda v: v.isoformat(),
    "datetime.datetime": lambda v: v.isoformat(),
    "datetime.time": lambda v: v.isoformat(),
    "datetime.timedelta": lambda v: [v.days, v.seconds, v.microseconds],
    "array.array": lambda v: [v.typecode, v.tolist()],
}


class Malformed(Exception):
    """The other side sent something that is not a value."""


class Graph:
    """The numbered mutable objects of one exchange."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}

    def add(self, value: Any) -> Any:
        self.numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        return value


class Codec:
    """Encodes and decodes values.

    `export(value)` gives the encoding of what is not plain; `resolve(tag, payload)` the object of
    such an encoding. `classes` are the helper classes that both sides know by name, whose
    instances cross as their attributes.
    """

    def __init__(self, export: Callable[[Any], Json], resolve: Callable[[str, Any], Any]) -> None:
        self._export = export
        self._resolve = resolve
        self.classes: dict[str, type] = {}

    def encode(self, value: Any, graph: Graph) -> Json:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_PLAIN_INT < value < _PLAIN_INT else ["int", hex(value)]
        if kind is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        number = graph.numbers.get(id(value))
        if number is not None:
            return ["ref", number]
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.encode(item, graph) for item in value]]
        if self._is_mutable(kind):
            graph.add(value)
            return self.body(value, graph)
        return self._encode_rare(value, kind, graph)

    def _is_mutable(self, kind: type) -> bool:
        return (
            issubclass(kind, list | dict | set | bytearray)
            or _qualified(kind) == "collections.deque"
            or (kind.__name__ in self.classes and not issubclass(kind, int | float | str | tuple | bytes | frozenset))
        )

    def body(self, value: Any, graph: Graph) -> Json:
        """The encoding of a mutable object's present content."""
        kind = type(value)
        if issubclass(kind, list):
            return ["list", [self.encode(item, graph) for item in list.__iter__(value)]]
        if issubclass(kind, dict):
            name = _qualified(kind)
            tag = (
                name
                if name in ("collections.Counter", "collections.OrderedDict", "collections.defaultdict")
                else "dict"
            )
            items = list(dict.items(value))
            return [tag, [[self.encode(key, graph), self.encode(item, graph)] for key, item in items]]
        if issubclass(kind, set):
            return ["set", [self.encode(item, graph) for item in set.__iter__(value)]]
        if issubclass(kind, bytearray):
            return ["bytearray", bytes(value).hex()]
        if _qualified(kind) == "collections.deque":
            return ["collections.deque", [value.maxlen, [self.encode(item, graph) for item in value]]]
        attributes = vars(value)
        return ["instance", [kind.__name__, [[name, self.encode(item, graph)] for name, item in attributes.items()]]]

    def _encode_rare(self, value: Any, kind: type, graph: Graph) -> Json:
        named = _NAMED_BY_VALUE.get(_qualified(kind))
        if named is not None:
            return [_qualified(kind), named(value)]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind is complex:
            return ["complex", [repr(value.real), repr(value.imag)]]
        if kind is range:
            return ["range", [hex(value.start), hex(value.stop), hex(value.step)]]
        if kind in (type({}.keys()), type({}.items())):
            return [kind.__name__, [self.encode(item, graph) for item in value]]
        if value is Ellipsis or value is NotImplemented:
            return ["constant", repr(value)]
        if kind is type:
            name: str = value.__name__
            if getattr(builtins, name, None) is value:
                return ["type", name]
            if self.classes.get(name) is value:
                return ["class", name]
        return self._encode_subclass(value, kind, graph)

    def _encode_subclass(self, value: Any, kind: type, graph: Graph) -> Json:
        if issubclass(kind, tuple):
            items = [self.encode(item, graph) for item in tuple.__iter__(value)]
            fields = getattr(kind, "_fields", None)
            if isinstance(fields, tuple) and len(fields) == len(items):
                return ["namedtuple", [kind.__name__, list(fields), items]]
            return ["tuple", items]
        if issubclass(kind, frozenset):
            return ["frozenset", [self.encode(item, graph) for item in frozenset.__iter__(value)]]
        for base, plain in _SCALAR_BASES:
            if issubclass(kind, base):
                return self.encode(plain(value), graph)
        return self._export(value)

    def decode(self, data: Json, graph: Graph) -> Any:
        """The value of `data`. Raises `Malformed` whatever is wrong with it."""
        try:
            return self._decode(data, graph)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError) as error:
            raise Malformed(f"{type(error).__name__}: {error}") from error

    def assign(self, target: Any, data: Json, graph: Graph) -> None:
        """Give a mutable object the content of `data`, as `body` encoded it."""
        try:
            tag, payload = data
            if tag == "instance":
                content = {_attribute(type(target), name): self._decode(item, graph) for name, item in payload[1]}
                vars(target).clear()
                vars(target).update(content)
            elif isinstance(target, dict):
                items = [(self._decode(key, graph), self._decode(item, graph)) for key, item in payload]
                target.clear()
                dict.update(target, items)
            elif isinstance(target, bytearray):
                target[:] = bytes.fromhex(payload)
            else:
                values = payload[1] if tag == "collections.deque" else payload
                content_list = [self._decode(item, graph) for item in values]
                target.clear()
                (target.update if isinstance(target, set) else target.extend)(content_list)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise Malformed(f"{type(error).__name__}: {error}") from error

    def _decode(self, data: Json, graph: Graph) -> Any:
        if not isinstance(data, list):
            if isinstance(data, dict):
                raise ValueError("an object is no value")
            return data
        tag, payload = data
        if tag == "ref":
            return graph.objects[_count(payload)]
        decoder = _DECODERS.get(tag)
        if decoder is not None:
            return decoder(self, payload, graph)
        return self._resolve(tag, payload)

    def _all(self, payload: Iterable[Json], graph: Graph) -> list[Any]:
        return [self._decode(item, graph) for item in payload]

    def _list(self, payload: Json, graph: Graph) -> Any:
        made = graph.add([])
        made.extend(self._all(payload, graph))
        return made

    def _set(self, payload: Json, graph: Graph) -> Any:
        made = graph.add(set())
        made.update(self._all(payload, graph))
        return made

    def _pairs(self, made: Any, payload: Json, graph: Graph) -> Any:
        graph.add(made)
        for key, item in payload:
            made[self._decode(key, graph)] = self._decode(item, graph)
        return made

    def _deque(self, payload: Json, graph: Graph) -> Any:
        maxlen, items = payload
        made = graph.add(_load("collections.deque")([], maxlen))
        made.extend(self._all(items, graph))
        return made

    def _instance(self, payload: Json, graph: Graph) -> Any:
        name, attributes = payload
        made = graph.add(object.__new__(self.classes[name]))
        for attribute, item in attributes:
            vars(made)[_attribute(type(made), attribute)] = self._decode(item, graph)
        return made

    def _namedtuple(self, payload: Json, graph: Graph) -> Any:
        name, fields, items = payload
        return _load("collections.namedtuple")(name, fields)(*self._all(items, graph))


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _load(qualified: str) -> Any:
    module, _, name = qualified.partition(".")
    return getattr(importlib.import_module(module), name)


def _count(payload: Json) -> int:
    if type(payload) is not int or payload < 0:
        raise ValueError("not a number of an object")
    return payload


def _attribute(kind: type, name: Json) -> str:
    """An attribute that an instance may carry: never one that hides a method of its class."""
    if not isinstance(name, str) or callable(getattr(kind, name, None)):
        raise ValueError("not an attribute of an instance")
    return name


def _builtin_type(name: str) -> Any:
    found = getattr(builtins, name)
    if not isinstance(found, type):
        raise TypeError(f"{name} is no type")
    return found


_SCALAR_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, lambda v: bytes(bytes.__iter__(v))),
    (complex, lambda v: complex(complex.__complex__(v)) if sys.version_info >= (3, 11) else complex(v)),
)
_Decoder = Callable[[Codec, Json, Graph], Any]
_DECODERS: Mapping[str, _Decoder] = {
    "int": lambda codec, payload, graph: int(payload, 16),
    "float": lambda codec, payload, graph: float(payload),
    "complex": lambda codec, payload, graph: complex(float(payload[0]), float(payload[1])),
    "bytes": lambda codec, payload, graph: bytes.fromhex(payload),
    "bytearray": lambda codec, payload, graph: graph.add(bytearray.fromhex(payload)),
    "range": lambda codec, payload, graph: range(*(int(part, 16) for part in payload)),
    "tuple": lambda codec, payload, graph: tuple(codec._all(payload, graph)),
    "frozenset": lambda codec, payload, graph: frozenset(codec._all(payload, graph)),
    "dict_keys": lambda codec, payload, graph: dict.fromkeys(codec._all(payload, graph)).keys(),
    "dict_items": lambda codec, payload, graph: dict(codec._all(payload, graph)).items(),
    "constant": lambda codec, payload, graph: {"Ellipsis": ..., "NotImplemented": NotImplemented}[payload],
    "type": lambda codec, payload, graph: _builtin_type(payload),
    "class": lambda codec, payload, graph: codec.classes[payload],
    "list": Codec._list,
    "set": Codec._set,
    "dict": lambda codec, payload, graph: codec._pairs({}, payload, graph),
    "collections.Counter": lambda codec, payload, graph: codec._pairs(_load("collections.Counter")(), payload, graph),
    "collections.OrderedDict": lambda codec, payload, graph: codec._pairs(
        _load("collections.OrderedDict")(), payload, graph
    ),
    "collections.defaultdict": lambda codec, payload, graph: codec._pairs(
        _load("collections.defaultdict")(), payload, graph
    ),
    "collections.deque": Codec._deque,
    "instance": Codec._instance,
    "namedtuple": Codec._namedtuple,
    "fractions.Fraction": lambda codec, payload, graph: _load("fractions.Fraction")(
        int(payload[0], 16), int(payload[1], 16)
    ),
    "decimal.Decimal": lambda codec, payload, graph: _load("decimal.Decimal")(payload),
    "datetime.date": lambda codec, payload, graph: _load("datetime.date").fromisoformat(payload),
    "datetime.datetime": lambda codec, payload, graph: _load("datetime.datetime").fromisoformat(payload),
    "datetime.time": lambda codec, payload, graph: _load("datetime.time").fromisoformat(payload),
    "datetime.timedelta": lambda codec, payload, graph: _load("datetime.timedelta")(*payload),
    "array.array": lambda codec, payload, graph: _load("array.array")(payload[0], payload[1]),
}
