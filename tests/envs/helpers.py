"""What several tests of envs need."""

from __future__ import annotations

from sandyard.envs.toolenv import ToolEnv


async def hold_to_its_word(env: ToolEnv, prompt: str) -> None:
    """Every statement of a back end's prompt, tried."""

    async def run(code: str) -> str:
        return (await env.step("run_python", {"code": code})).observation

    assert "fresh process" in prompt
    assert await run("x = 1\nimport math") == "(no output)"
    assert "NameError" in await run("print(x)")
    assert "NameError" in await run("print(math.pi)")
    assert "Files that a program writes stay" in prompt
    await run("open('kept', 'w').write('here')")
    assert await run("print(open('kept').read())") == "here"
    assert "no standard input" in prompt or "and no standard input" in prompt
    assert "EOFError" in await run("input()")
    assert "Python 3" in prompt
    assert await run("import sys; print(sys.version_info[0])") == "3"
    assert "stopped after 1 seconds" in prompt
    assert "[stopped" in await run("while True: pass")
    if "no network" in prompt:
        probe = "import socket\nsocket.create_connection(('{}', 53), timeout=1)"
        for address in ("1.1.1.1", "8.8.8.8", "169.254.169.254"):
            assert "OSError" in await run(probe.format(address)) or "TimeoutError" in await run(probe.format(address))
