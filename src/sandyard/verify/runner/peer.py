"""One side of the conversation between box and judge: ask, answer, and ask back while answering."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from sandyard.verify.runner.link import Link
from sandyard.verify.runner.values import Codec, Graph, Json, Malformed

_TEXT = 300


def last_line(error: BaseException) -> str:
    """The last line of the error's traceback, bounded."""
    try:
        text = str(error)
    except BaseException as inner:  # noqa: BLE001 - a solution's __str__ may raise anything
        text = f"<no text: {type(inner).__name__}>"
    name = type(error).__name__
    line = f"{name}: {text}" if text else name
    return " ".join(line.split())[:_TEXT]


class Peer:
    """Holds the objects that it exported (`owned`) and makes stand-ins for the other side's."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.codec = Codec(self.export, self.resolve)
        self.owned: list[Any] = []
        self._owned_numbers: dict[int, int] = {}

    def export(self, value: Any) -> Json:
        number = self._owned_numbers.get(id(value))
        if number is None:
            number = self._owned_numbers[id(value)] = len(self.owned)
            self.owned.append(value)
        return ["own", [number, type(value).__name__[:_TEXT]]]

    def resolve(self, tag: str, payload: Json) -> Any:
        if tag == "your" and type(payload) is int and payload >= 0:
            return self.owned[payload]
        if tag == "own":
            return self.stand_in(int(payload[0]), str(payload[1])[:_TEXT])
        raise ValueError(f"unknown tag {tag!r}")

    def stand_in(self, number: int, label: str) -> Any:
        raise NotImplementedError

    def perform(self, operation: str, operands: Sequence[Any]) -> Any:
        raise NotImplementedError

    def rebuild(self, failure: Json) -> BaseException:
        """The exception that the other side's failure stands for."""
        name, base, arguments, line = failure
        kind = self.exception_class(str(name), str(base))
        values = self.codec.decode(arguments, Graph()) if arguments is not None else (str(line),)
        try:
            return kind(*values)
        except Exception:  # noqa: BLE001 - some constructors want what did not cross
            return kind.__mro__[1](str(line)) if kind.__mro__[1] is not BaseException else Exception(str(line))

    def exception_class(self, name: str, base: str) -> type[BaseException]:
        found = getattr(builtins, base, None)
        return found if isinstance(found, type) and issubclass(found, BaseException) else Exception

    def ask(self, operation: str, *operands: Any) -> Any:
        """Have the other side perform `operation`; raises the exception that it raised."""
        graph = Graph()
        encoded = [self.codec.encode(operand, graph) for operand in operands]
        known = list(graph.objects)
        self.link.send(["ask", operation, encoded])
        while True:
            message = self.link.receive()
            if not isinstance(message, list) or not message:
                raise Malformed("a message without a kind")
            if message[0] == "ask":
                self.answer(message)
            elif message[0] == "answer" and len(message) == 4:
                return self._take_answer(message, known, graph)
            else:
                self.unexpected(message)

    def unexpected(self, message: Sequence[Any]) -> None:
        raise Malformed("an unknown kind of message")

    def _take_answer(self, message: Sequence[Any], known: Sequence[Any], graph: Graph) -> Any:
        _, succeeded, states, result = message
        if not isinstance(states, list) or len(states) != len(known):
            raise Malformed("not one state for each argument")
        for target, state in zip(known, states, strict=True):
            self.codec.assign(target, state, graph)
        if succeeded is True:
            return self.codec.decode(result, graph)
        if not isinstance(result, list) or len(result) != 4:
            raise Malformed("a failure without its parts")
        raise self.rebuild(result)

    def answer(self, message: Sequence[Any]) -> None:
        """Perform what the other side asked for and send the result or the exception."""
        _, operation, encoded = message
        graph = Graph()
        operands = [self.codec.decode(operand, graph) for operand in encoded]
        known = list(graph.objects)
        try:
            result = self.perform(operation, operands)
            states = [self.codec.body(target, graph) for target in known]
            reply = ["answer", True, states, self.codec.encode(result, graph)]
        except BaseException as error:  # noqa: BLE001 - whatever was raised is the answer
            states = [self.codec.body(target, graph) for target in known]
            reply = ["answer", False, states, self.describe(error)]
        self.link.send(reply)

    def describe(self, error: BaseException) -> Json:
        kind = type(error)
        base = next((k.__name__ for k in kind.__mro__ if getattr(builtins, k.__name__, None) is k), "Exception")
        try:
            arguments = self.codec.encode(tuple(error.args), Graph())
        except Exception:  # noqa: BLE001 - arguments that cannot cross are left out
            arguments = None
        return [kind.__name__, base, arguments, last_line(error)]
