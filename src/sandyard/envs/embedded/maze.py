"""A grid maze: walk from the north-west corner to the south-east one."""

from __future__ import annotations

from sandyard.envs.base import StepResult, ToolSpec
from sandyard.envs.embedded.base import GameEnv
from sandyard.errors import BadRequest

MOVES = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
WALK = ToolSpec(
    "walk",
    "Walk one cell.",
    {
        "type": "object",
        "properties": {"direction": {"type": "string", "enum": list(MOVES)}},
        "required": ["direction"],
        "additionalProperties": False,
    },
)
Cell = tuple[int, int]


class MazeEnv(GameEnv):
    """`walk(direction)` in a maze of `size` x `size` cells, every cell of which can be reached.

    Reward 1 at the goal; 0 after `turns` moves (truncated; by default four for every cell). A move
    into a wall uses a turn.
    """

    def __init__(self, *, size: int = 5, turns: int | None = None) -> None:
        super().__init__()
        if not 2 <= size <= 30:
            raise BadRequest(f"size must be 2 to 30, not {size}", field="size")
        self.size = size
        self.turns = turns or 4 * size * size
        self._doors: set[frozenset[Cell]] = set()
        self._at: Cell = (0, 0)
        self._left = 0
        self.register_tool(WALK, lambda env, arguments: self._walk(arguments["direction"]))

    def deal(self) -> None:
        self._at, self._left = (0, 0), self.turns
        self._doors = set()
        seen, path = {(0, 0)}, [(0, 0)]
        while path:
            fresh = [cell for cell in self._around(path[-1]) if cell not in seen]
            if not fresh:
                path.pop()
                continue
            cell = self.random.choice(fresh)
            self._doors.add(frozenset((path[-1], cell)))
            seen.add(cell)
            path.append(cell)

    def opening(self) -> str:
        goal = self.size - 1
        return f"A maze of {self.size} x {self.size} cells. The goal is row {goal}, column {goal}. {self._view()}"

    def _around(self, cell: Cell) -> list[Cell]:
        steps = [(cell[0] + down, cell[1] + right) for down, right in MOVES.values()]
        return [(row, column) for row, column in steps if 0 <= row < self.size and 0 <= column < self.size]

    def _toward(self, direction: str) -> Cell:
        down, right = MOVES[direction]
        return self._at[0] + down, self._at[1] + right

    def _view(self) -> str:
        ways = [name for name in MOVES if frozenset((self._at, self._toward(name))) in self._doors]
        return f"You are at row {self._at[0]}, column {self._at[1]}. Ways: {', '.join(ways)}."

    def _walk(self, direction: str) -> StepResult:
        self._left -= 1
        cell = self._toward(direction)
        wall = frozenset((self._at, cell)) not in self._doors
        if not wall:
            self._at = cell
        if self._at == (self.size - 1, self.size - 1):
            return StepResult("You are at the goal.", reward=1.0, terminated=True)
        text = f"A wall. {self._view()}" if wall else self._view()
        if self._left == 0:
            return StepResult(f"{text} That was the last move.", reward=0.0, truncated=True)
        return StepResult(text)
