"""Says what it is told: to try a connection or a trainer with."""

from __future__ import annotations

from sandyard.envs.base import StepResult, ToolSpec
from sandyard.envs.embedded.base import GameEnv

_MESSAGE = {
    "type": "object",
    "properties": {"message": {"type": "string"}},
    "required": ["message"],
    "additionalProperties": False,
}
ECHO = ToolSpec("echo", "Say the message back.", _MESSAGE)
STOP = ToolSpec("stop", "End the episode.", {"type": "object", "properties": {}, "additionalProperties": False})


class EchoEnv(GameEnv):
    """`echo(message)` until `stop()`. The reward is 1 if anything was said, else 0."""

    def __init__(self) -> None:
        super().__init__()
        self._said = 0
        self.register_tool(ECHO, lambda env, arguments: self._echo(arguments["message"]))
        self.register_tool(STOP, lambda env, arguments: self._stop())

    def deal(self) -> None:
        self._said = 0

    def opening(self) -> str:
        return "Say something with echo; end with stop."

    def _echo(self, message: str) -> str:
        self._said += 1
        return message

    def _stop(self) -> StepResult:
        return StepResult("Stopped.", reward=float(self._said > 0), terminated=True)
