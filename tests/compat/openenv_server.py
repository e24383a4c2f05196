"""The official OpenEnv server, alone, with a small env of plain fields: `openenv_server.py PORT`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Action, Environment, Observation, State


class Say(Action):  # type: ignore[misc]  # its package is in the venv of this script alone
    message: str


class Said(Observation):  # type: ignore[misc]
    said: str = ""
    count: int = 0


class Sayer(Environment):  # type: ignore[misc]
    """Says the message back; the third one ends the episode with a reward. `boom` fails."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Said:
        self._state = State(episode_id=episode_id, step_count=0)
        return Said(said=f"seed {seed}")

    def step(self, action: Say, timeout_s: float | None = None, **more: Any) -> Said:
        if action.message == "boom":
            raise ValueError("it broke")
        self._state.step_count += 1
        count = self._state.step_count
        return Said(said=action.message, count=count, done=count == 3, reward=1.0 if count == 3 else None)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(Sayer, Say, Said, env_name="sayer", max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
