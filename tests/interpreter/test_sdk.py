"""The code interpreter as people use it: the official SDK, a server, real sandboxes of the real template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox
from e2b_code_interpreter.charts import BarChart, ChartType

from sandyard.config import Settings
from sandyard.images.base import build_base
from sandyard.interpreter.template import build_interpreter
from sandyard.server.embedded import EmbeddedServer
from tests.yard import leftovers, node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """Over the host's templates, which are made on first use."""

    async def templates() -> None:
        await build_base(Settings())
        await build_interpreter(Settings())

    asyncio.run(templates())
    with node_home() as home, pytest.MonkeyPatch.context() as patch:
        with EmbeddedServer(node_settings(home)) as running:
            for name, value in running.environment().items():
                patch.setenv(name, value)
            yield running
        assert leftovers(home) == []


@pytest.fixture(scope="module")
def box(server: EmbeddedServer) -> Iterator[Sandbox]:
    made = Sandbox.create(timeout=300)
    yield made
    made.kill()


@pytest_asyncio.fixture
async def async_box(server: EmbeddedServer) -> AsyncIterator[AsyncSandbox]:
    made = await AsyncSandbox.create("code-interpreter", timeout=120)
    yield made
    await made.kill()


def test_a_fresh_sandbox_runs_code_within_seconds(server: EmbeddedServer) -> None:
    began = time.monotonic()
    with Sandbox.create(timeout=60) as fresh:
        assert fresh.run_code("x = 20; x + 1").text == "21"
        assert time.monotonic() - began < 20  # 1 s on an idle machine


def test_output_results_and_errors(box: Sandbox) -> None:
    heard: list[str] = []
    execution = box.run_code(
        "import sys\nprint('out'); print('err', file=sys.stderr)\n'end'",
        on_stdout=lambda message: heard.append(message.line),
        on_result=lambda result: heard.append(str(result.text)),
    )
    assert (execution.text, execution.logs.stdout, execution.logs.stderr) == ("end", ["out\n"], ["err\n"])
    assert heard == ["out\n", "end"]
    assert execution.execution_count is not None
    error = box.run_code("1 / 0").error
    assert error is not None
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "1 / 0" in error.traceback


def test_figures_and_tables(box: Sandbox) -> None:
    (figure,) = box.run_code("import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2])\nplt.show()").results
    assert figure.png is not None
    assert figure.png.startswith("iVBOR")
    assert isinstance(figure.chart, BarChart)
    assert figure.chart.type is ChartType.BAR
    assert [bar.label for bar in figure.chart.elements] == ["a", "b"]
    (table,) = box.run_code("import pandas as pd\npd.DataFrame({'a': [1, None], 'b': ['x', 'y']})").results
    assert table.data == {"a": [1.0, None], "b": ["x", "y"]}
    assert set(table.formats()) == {"text", "html", "data"}


def test_the_usual_libraries_are_there_for_code_and_for_commands(box: Sandbox) -> None:
    libraries = "numpy, pandas, scipy.stats, matplotlib, PIL, requests, bs4, openpyxl, pytest, numpy.testing"
    assert box.run_code(f"import {libraries}").error is None
    assert box.commands.run(f"python3 -c 'import {libraries}'").exit_code == 0


def test_contexts(box: Sandbox) -> None:
    one, two = box.create_code_context(), box.create_code_context(cwd="/tmp", language="python")
    box.run_code("x = 1", context=one)
    error = box.run_code("x", context=two).error
    assert error is not None
    assert error.value == "name 'x' is not defined"
    assert box.run_code("import os; os.getcwd()", context=two).text == "/tmp"
    assert [context.id for context in box.list_code_contexts()][-2:] == [one.id, two.id]
    assert {"python", "javascript", "bash"} <= {context.language for context in box.list_code_contexts()}
    box.restart_code_context(one)
    again = box.run_code("x", context=one).error
    assert again is not None
    assert again.name == "NameError"
    box.remove_code_context(one)
    box.remove_code_context(two.id)
    for gone in (box.remove_code_context, box.restart_code_context):
        with pytest.raises(NotFoundException, match=f"Context {one.id} not found"):
            gone(one)
    with pytest.raises(NotFoundException):
        box.run_code("1", context=two)
    with pytest.raises(SandboxException, match="no kernel for language 'cobol'; there are: python"):
        box.run_code("1", language="cobol")
    with pytest.raises(SandboxException, match="'/nowhere' is no directory"):
        box.create_code_context(cwd="/nowhere")


def test_bash_javascript_and_typescript(box: Sandbox) -> None:
    assert box.run_code("cd /tmp; x=5; pwd", language="bash").logs.stdout == ["/tmp\n"]
    assert box.run_code("echo $x", language="bash").logs.stdout == ["5\n"]
    failed = box.run_code("(exit 3)", language="bash").error
    assert failed is not None
    assert failed.value == "3"
    assert box.run_code("console.log('a'); await Promise.resolve(6 * 7)", language="js").text == "42"
    assert box.run_code("process.cwd()", language="javascript").text == "/home/user"
    assert box.run_code("const x: string = 'typed'; x", language="ts").text == "typed"
    thrown = box.run_code("throw new TypeError('no')", language="js").error
    assert thrown is not None
    assert (thrown.name, thrown.value) == ("TypeError", "no")


SHOW = {
    "python": "import os; print(os.environ.get('FOO', 'none'))",
    "bash": "echo ${FOO:-none}",
    "js": "console.log(process.env.FOO ?? 'none')",
}


@pytest.mark.parametrize("language", SHOW)
def test_variables_of_one_execution(box: Sandbox, language: str) -> None:
    def shown(**envs: str) -> list[str]:
        return list(box.run_code(SHOW[language], language=language, envs=envs).logs.stdout)

    assert shown(FOO="a'b") == ["a'b\n"]
    assert shown() == ["none\n"]


def test_variables_of_the_sandbox(server: EmbeddedServer) -> None:
    with Sandbox.create(timeout=60, envs={"FOO": "given"}) as given:
        for language, code in SHOW.items():
            assert given.run_code(code, language=language).logs.stdout == ["given\n"]
            assert given.run_code(code, language=language, envs={"FOO": "other"}).logs.stdout == ["other\n"]
            assert given.run_code(code, language=language).logs.stdout == ["given\n"]


def test_a_client_that_gives_up_frees_the_kernel(box: Sandbox) -> None:
    box.run_code("kept = 1")
    with pytest.raises(TimeoutException, match="Execution timed out"):
        box.run_code("import time; time.sleep(300)", timeout=2)
    began = time.monotonic()
    assert box.run_code("kept", timeout=20).text == "1"
    assert time.monotonic() - began < 10


def test_a_server_that_was_killed_comes_back(server: EmbeddedServer) -> None:
    with Sandbox.create(timeout=60) as hurt:
        hurt.run_code("x = 1")
        hurt.commands.run("pkill -9 -f 'python3 -m program'", user="root")
        deadline = time.monotonic() + 20
        while True:
            assert time.monotonic() < deadline
            try:
                error = hurt.run_code("x").error
                break
            except (TimeoutException, SandboxException):
                time.sleep(0.1)
        assert error is not None
        assert error.name == "NameError"


def test_memory_that_runs_out_ends_the_kernel_and_not_the_server(server: EmbeddedServer) -> None:
    with Sandbox.create(timeout=120) as small:
        error = small.run_code("x = bytearray(4 << 30)\nfor i in range(0, len(x), 4096): x[i] = 1").error
        assert error is not None
        assert error.name in ("KernelDied", "MemoryError")
        assert small.run_code("1 + 1").text == "2"


def test_a_sandbox_that_is_gone_is_told_from_a_slow_one(server: EmbeddedServer) -> None:
    gone = Sandbox.create(timeout=60)
    gone.kill()
    with pytest.raises(TimeoutException, match="sandbox"):
        gone.run_code("1")


async def test_executions_side_by_side(async_box: AsyncSandbox) -> None:
    contexts = await asyncio.gather(*(async_box.create_code_context() for _ in range(3)))
    code = "import time\nfor i in range(5):\n    print({0}, flush=True); time.sleep(0.1)\n{0}"
    began = time.monotonic()
    executions = await asyncio.gather(
        *(async_box.run_code(code.format(n), context=context) for n, context in enumerate(contexts)),
        *(async_box.run_code(f"n = {n}; n") for n in range(3)),
    )
    assert time.monotonic() - began < 40
    assert [execution.text for execution in executions] == ["0", "1", "2", "0", "1", "2"]
    for n, execution in enumerate(executions[:3]):
        assert "".join(execution.logs.stdout) == f"{n}\n" * 5


async def test_closed_to_the_public(server: EmbeddedServer) -> None:
    """The traffic token goes with every call of the SDK."""
    closed = await AsyncSandbox.create(timeout=60, network={"allow_public_traffic": False})
    try:
        context = await closed.create_code_context()
        assert (await closed.run_code("1 + 1", context=context)).text == "2"
    finally:
        await closed.kill()
