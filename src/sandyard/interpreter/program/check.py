"""`python3 -m program.check`: run one piece of code in each language, against a server of its own.

Says what failed and ends with 1, or ends with 0. What the kernels and libraries keep of their first start
(bytecode, the list of fonts) is then there for every start that follows.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from . import languages
from .contexts import Contexts
from .output import Output

FIGURE = (
    "import matplotlib.pyplot as plt, numpy.testing, pandas, scipy.stats, PIL.Image, requests\n"
    "plt.plot([1, 2], [3, 4]); plt.show()\n"
    "pandas.DataFrame({'a': [1]})"
)
PIECES = {
    "python": (FIGURE, ["png", "chart", "data"]),
    "bash": ("echo $((6 * 7))", ["42\n"]),
    "javascript": ("6 * 7", ["42"]),
    "typescript": ("const answer: number = 6 * 7; answer", ["42"]),
}


async def check(home: str) -> list[str]:
    """What is wrong, one line each."""
    contexts = Contexts(home)
    wrong = []
    for language in languages.available():
        code, wanted = PIECES[language]
        said = await _run(contexts, language, code)
        text = json.dumps(said)
        if any(item["type"] == "error" for item in said) or not all(json.dumps(word)[1:-1] in text for word in wanted):
            wrong.append(f"{language}: {text[:1000]}")
    for context in contexts.list():
        await contexts.remove(context["id"])
    return wrong


async def _run(contexts: Contexts, language: str, code: str) -> list[dict[str, Any]]:
    output = Output()
    await contexts.default(language).execute(code, {}, output)
    said = []
    while (line := await output.next()) is not None:
        said.append(json.loads(line))
    return said


def main() -> None:
    missing = sorted(set(sys.argv[2:]) - set(languages.available()))
    wrong = [f"{language}: no kernel" for language in missing] + asyncio.run(check(sys.argv[1]))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
