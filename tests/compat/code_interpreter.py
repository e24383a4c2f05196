"""The code interpreter through `e2b-code-interpreter`, alone: E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY lead
to the server. Prints one line a check and ends with 1 if any failed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox


def output_and_the_last_expression(box: Sandbox) -> None:
    execution = box.run_code("import sys\nprint('out'); print('err', file=sys.stderr)\n'end'")
    assert (execution.text, execution.logs.stdout, execution.logs.stderr) == ("end", ["out\n"], ["err\n"])


def an_error_with_its_traceback(box: Sandbox) -> None:
    error = box.run_code("1 / 0").error
    assert error is not None
    assert (error.name, error.value, "1 / 0" in error.traceback) == ("ZeroDivisionError", "division by zero", True)


def a_figure_and_a_table(box: Sandbox) -> None:
    (figure,) = box.run_code("import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2])\nplt.show()").results
    assert str(figure.png).startswith("iVBOR")
    assert figure.chart.to_dict()["type"] == "bar"
    (table,) = box.run_code("import pandas as pd\npd.DataFrame({'a': [1, None]})").results
    assert table.data == {"a": [1.0, None]}


def contexts_keep_apart_restart_and_go(box: Sandbox) -> None:
    one, two = box.create_code_context(), box.create_code_context(cwd="/tmp")
    box.run_code("x = 1", context=one)
    assert box.run_code("x", context=two).error.name == "NameError"
    assert box.run_code("import os; os.getcwd()", context=two).text == "/tmp"
    assert [context.id for context in box.list_code_contexts()][-2:] == [one.id, two.id]
    box.restart_code_context(one)
    assert box.run_code("x", context=one).error.name == "NameError"
    box.remove_code_context(one)
    box.remove_code_context(two)
    refused(NotFoundException, lambda: box.remove_code_context(one))
    refused(SandboxException, lambda: box.run_code("1", language="cobol"))


def languages_and_their_variables(box: Sandbox) -> None:
    show = {
        "python": "import os; print(os.environ.get('FOO', 'none'))",
        "bash": "echo ${FOO:-none}",
        "js": "console.log(process.env.FOO ?? 'none')",
        "ts": "const foo: string = process.env.FOO ?? 'none'; console.log(foo)",
    }
    for language, code in show.items():
        assert box.run_code(code, language=language, envs={"FOO": "bar"}).logs.stdout == ["bar\n"], language
        assert box.run_code(code, language=language).logs.stdout == ["none\n"], language


def a_client_that_gives_up_frees_the_kernel(box: Sandbox) -> None:
    box.run_code("kept = 1")
    refused(TimeoutException, lambda: box.run_code("import time; time.sleep(300)", timeout=2))
    began = time.monotonic()
    assert box.run_code("kept").text == "1"
    assert time.monotonic() - began < 5


def refused(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


CHECKS: list[Callable[[Sandbox], None]] = [
    output_and_the_last_expression,
    an_error_with_its_traceback,
    a_figure_and_a_table,
    contexts_keep_apart_restart_and_go,
    languages_and_their_variables,
    a_client_that_gives_up_frees_the_kernel,
]


def main() -> int:
    began = time.monotonic()
    failed = 0
    with Sandbox.create(timeout=300) as box:
        assert box.run_code("x = 20; x + 1").text == "21"
        print(f"ok   create and the first result: {(time.monotonic() - began) * 1000:.0f} ms")
        for check in CHECKS:
            name = check.__name__.replace("_", " ")
            try:
                check(box)
                print(f"ok   {name}")
            except (AssertionError, AttributeError, SandboxException) as error:
                failed += 1
                print(f"FAIL {name}: {type(error).__name__} {error}")
    print(f"{len(CHECKS) + 1 - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
