"""The interpreter's server with real kernels: what code says, what contexts keep, what is survived."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.interpreter.conftest import Interpreter


def test_output_and_the_last_expression(interpreter: Interpreter) -> None:
    said = interpreter.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    kinds = [item["type"] for item in said]
    assert kinds[0] == "number_of_executions"
    assert sorted(kinds[1:-1]) == ["stderr", "stdout"]
    assert {item["type"]: item["text"] for item in said if "text" in item} == {
        "stdout": "out\n",
        "stderr": "err\n",
        "result": "42",
    }
    assert said[-1]["is_main_result"] is True
    assert abs(next(item for item in said if item["type"] == "stdout")["timestamp"] / 1e9 - time.time()) < 10


def test_executions_are_counted_by_those_of_the_user(interpreter: Interpreter) -> None:
    first = interpreter.run("1", env_vars={"A": "1"})[0]["execution_count"]
    assert interpreter.run("2")[0]["execution_count"] == first + 1


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("'text'", {"text": "text"}),
        ("[1, {'a': None}]", {"text": "[1, {'a': None}]", "json": [1, {"a": None}]}),
        ("[float('nan')]", {"text": "[nan]"}),
        ("{1, 2}", {"text": "{1, 2}"}),
        ("from IPython.display import *\nLatex('$x$')", {"latex": "$x$"}),
        ("from IPython.display import *\nMarkdown('# x')", {"markdown": "# x"}),
        ("from IPython.display import *\nSVG('<svg/>')", {"svg": "<svg/>"}),
        ("from IPython.display import *\nJavascript('1')", {"javascript": "1"}),
        ("from IPython.display import *\ndisplay({'a/b': 1.5}, raw=True)", {"extra": {"a/b": 1.5}}),
        ("from IPython.display import *\ndisplay({'a/b': float('inf')}, raw=True)", {}),
    ],
)
def test_results_by_their_kind(interpreter: Interpreter, code: str, shown: dict[str, Any]) -> None:
    (result,) = (item for item in interpreter.run(code) if item["type"] == "result")
    assert shown.items() <= result.items()


def test_a_figure_is_a_picture_and_a_chart(interpreter: Interpreter) -> None:
    code = "import matplotlib.pyplot as plt\nplt.title('T')\nplt.bar(['a', 'b'], [3, 4])\nplt.show()\n'end'"
    said = interpreter.run(code)
    figure, end = (item for item in said if item["type"] == "result")
    assert [item for item in said if item["type"] == "stderr"] == []
    assert figure["png"].startswith("iVBOR")
    assert (figure["chart"]["type"], figure["chart"]["title"]) == ("bar", "T")
    assert [bar["label"] for bar in figure["chart"]["elements"]] == ["a", "b"]
    assert (figure["is_main_result"], end["text"], end["is_main_result"]) == (False, "end", True)


def test_a_table_has_its_data_without_what_json_lacks(interpreter: Interpreter) -> None:
    code = (
        "import pandas, numpy\n"
        "pandas.DataFrame({'n': [1, None, numpy.inf], 'i': numpy.arange(3), 's': ['a', None, 'c'],"
        " 't': pandas.to_datetime(['2020-01-02', None, '2021-01-01']), 7: [(1, 2), {'a'}, b'x']})"
    )
    (result,) = (item for item in interpreter.run(code) if item["type"] == "result")
    assert result["data"] == {
        "n": [1.0, None, None],
        "i": [0, 1, 2],
        "s": ["a", None, "c"],
        "t": ["2020-01-02T00:00:00", None, "2021-01-01T00:00:00"],
        "7": [[1, 2], "{'a'}", "b'x'"],
    }
    assert "<table" in result["html"]


def test_pictures_are_displayed_when_shown_or_saved(interpreter: Interpreter) -> None:
    code = "from PIL import Image\nimage = Image.new('RGB', (4, 4))\nimage.show()\nimage.save('a.png')"
    results = [item for item in interpreter.run(code) if item["type"] == "result"]
    assert [result["png"][:5] for result in results] == ["iVBOR", "iVBOR"]


def test_errors_tell_name_value_and_plain_traceback(interpreter: Interpreter) -> None:
    error = interpreter.error("def f():\n    return 1 / 0\nf()")
    assert (error["name"], error["value"]) == ("ZeroDivisionError", "division by zero")
    assert "return 1 / 0" in error["traceback"]
    assert "\x1b" not in error["traceback"]
    assert interpreter.error("1 +")["name"] == "SyntaxError"
    assert interpreter.error("raise SystemExit(3)")["name"] == "SystemExit"
    assert interpreter.text("'it lives'") == "it lives"


def test_contexts_keep_apart_what_they_know(interpreter: Interpreter, tmp_path: Path) -> None:
    one, two = interpreter.context(), interpreter.context(language="Python", cwd=str(tmp_path))
    assert (two["language"], two["cwd"]) == ("python", str(tmp_path))
    interpreter.run("x = 1", context_id=one["id"])
    assert interpreter.error("x", context_id=two["id"])["value"] == "name 'x' is not defined"
    assert interpreter.text("import os; print(os.getcwd())", context_id=two["id"]) == f"{tmp_path}\n"
    assert [context["id"] for context in interpreter.http.get("/contexts").json()][-2:] == [one["id"], two["id"]]
    for context in (one, two):
        assert interpreter.http.delete(f"/contexts/{context['id']}").status_code == 200
    gone = interpreter.http.post("/execute", json={"code": "1", "context_id": one["id"]})
    assert (gone.status_code, gone.text) == (404, f"Context {one['id']} not found")
    assert interpreter.http.delete(f"/contexts/{one['id']}").status_code == 404
    assert interpreter.http.post(f"/contexts/{one['id']}/restart").status_code == 404
    assert one["id"] not in interpreter.http.get("/contexts").text


def test_a_restart_or_removal_tells_what_ran_and_what_waited(interpreter: Interpreter) -> None:
    context = interpreter.context()["id"]
    interpreter.run("x = 1", context_id=context)
    for call, name in (("restart", "ContextRestarting"), ("remove", "ContextRemoved")):
        errors: list[str] = []

        def run(code: str, into: list[str] = errors) -> None:
            into.append(interpreter.error(code, context_id=context)["name"])

        threads = [threading.Thread(target=run, args=(code,)) for code in ("import time; time.sleep(60)", "1")]
        for thread in threads:
            thread.start()
            time.sleep(0.5)
        if call == "restart":
            assert interpreter.http.post(f"/contexts/{context}/restart").status_code == 200
        else:
            assert interpreter.http.delete(f"/contexts/{context}").status_code == 200
        for thread in threads:
            thread.join(10)
        assert errors == [name, name]
        if call == "restart":
            said = interpreter.run("x", context_id=context)
            assert [item["type"] for item in said] == ["number_of_executions", "error"]
            assert said[1]["name"] == "NameError"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"code": 1}, 400, "code is not a string"),
        ({"code": "1", "language": "cobol"}, 400, "no kernel for language 'cobol'; there are: python"),
        ({"code": "1", "language": "python", "context_id": "x"}, 400, "Only one of"),
        ({"code": "1", "env_vars": {"A B": "1"}}, 400, "'A B' is not a variable's name"),
        ({"code": "1", "env_vars": {"A": 1}}, 400, "the value of 'A'"),
        ({"code": "1", "env_vars": ["A"]}, 400, "not an object"),
        ([], 400, "not a JSON object"),
    ],
)
def test_bad_executions_are_refused(interpreter: Interpreter, body: Any, status: int, words: str) -> None:
    reply = interpreter.http.post("/execute", json=body)
    assert reply.status_code == status
    assert words in reply.text


def test_bad_contexts_are_refused(interpreter: Interpreter) -> None:
    before = interpreter.http.get("/contexts").json()
    for body, words in (({"cwd": "/nowhere"}, "'/nowhere' is no directory"), ({"language": "cobol"}, "no kernel")):
        reply = interpreter.http.post("/contexts", json=body)
        assert reply.status_code == 400
        assert words in reply.text
    assert interpreter.http.post("/contexts", content=b"{").status_code == 400
    assert interpreter.http.get("/contexts").json() == before
    assert interpreter.http.get("/nothing").status_code == 404


NASTY = {"FOO": "a'b\"c $HOME \\ `id`\n🙂", "HOME": "/elsewhere"}


def test_variables_last_for_one_execution_in_python(interpreter: Interpreter) -> None:
    home = interpreter.text("import os; os.environ['HOME']")
    assert interpreter.text("import os; print(os.environ['FOO'], os.environ['HOME'], end='')", env_vars=NASTY) == (
        f"{NASTY['FOO']} /elsewhere"
    )
    assert interpreter.text("print(os.environ.get('FOO'), os.environ['HOME'])") == f"None {home}\n"
    assert interpreter.error("1 / 0", env_vars={"FOO": "x"})["name"] == "ZeroDivisionError"
    assert interpreter.text("print(os.environ.get('FOO'))") == "None\n"


def test_bash_keeps_its_state_and_its_variables(interpreter: Interpreter) -> None:
    def bash(code: str, **options: Any) -> str:
        return interpreter.text(code, language="bash", **options)

    assert bash("cd /tmp; x=5; echo $x; echo err >&2") == "5\nerr\n"  # a terminal: there is one stream
    assert bash("pwd; echo $x") == "/tmp\n5\n"
    plain = {"FOO": "a'b\"c $HOME \\ `id`", "HOME": "/elsewhere"}
    assert bash('printf "%s|%s\\n" "$FOO" "$HOME"', env_vars=plain) == f"{plain['FOO']}|/elsewhere\n"
    assert bash('echo "${FOO:-none} $HOME"') == f"none {os.environ['HOME']}\n"
    assert interpreter.error("(exit 3)", language="bash")["value"] == "3"


def test_executions_of_a_context_queue_and_contexts_run_side_by_side(interpreter: Interpreter) -> None:
    other = interpreter.context()["id"]
    done: list[str] = []

    def run(name: str, code: str, **options: Any) -> None:
        interpreter.run(code, **options)
        done.append(name)

    threads = [
        threading.Thread(target=run, args=("first", "import time; time.sleep(1); order = [1]")),
        threading.Thread(target=run, args=("second", "order.append(2)")),
        threading.Thread(target=run, args=("other", "1"), kwargs={"context_id": other}),
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join(20)
    assert done == ["other", "first", "second"]
    assert interpreter.text("print(order)") == "[1, 2]\n"
    interpreter.http.delete(f"/contexts/{other}")


def leave(interpreter: Interpreter, code: str, **options: Any) -> None:
    """A client that does not wait for the end."""
    with pytest.raises(httpx.ReadTimeout):
        interpreter.http.post("/execute", json={"code": code, **options}, timeout=1)


@pytest.mark.parametrize(("language", "code"), [("python", "import time; time.sleep(100)"), ("bash", "sleep 100")])
def test_what_runs_for_a_client_that_left_is_interrupted(interpreter: Interpreter, language: str, code: str) -> None:
    interpreter.run("true" if language == "bash" else "kept = 1", language=language)
    began = time.monotonic()
    leave(interpreter, code, language=language, env_vars={"FOO": "x"})
    after = "echo ${FOO:-none}" if language == "bash" else "import os; print(os.environ.get('FOO', 'none'), kept)"
    assert interpreter.text(after, language=language) in ("none\n", "none 1\n")
    assert time.monotonic() - began < 5


def test_a_client_that_left_the_queue_is_not_served(interpreter: Interpreter) -> None:
    busy = threading.Thread(target=lambda: interpreter.run("import time; time.sleep(2); ran = []"))
    busy.start()
    time.sleep(0.2)
    leave(interpreter, "ran.append(1)")
    busy.join(10)
    assert interpreter.text("print(ran)") == "[]\n"


def test_a_kernel_that_does_not_heed_interrupts_is_replaced(interpreter: Interpreter) -> None:
    context = interpreter.context()["id"]
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(100)"
    leave(interpreter, deaf, context_id=context)
    said = interpreter.run("1 + 1", context_id=context)
    assert [item["type"] for item in said] == ["stderr", "number_of_executions", "result"]
    assert "interrupt of a client that went away" in said[0]["text"]
    interpreter.http.delete(f"/contexts/{context}")


def test_a_kernel_that_dies_says_so_and_is_replaced(interpreter: Interpreter) -> None:
    context = interpreter.context()["id"]
    said = interpreter.run(
        "import os, time\nprint('last words', flush=True)\ntime.sleep(0.5)\nos._exit(3)", context_id=context
    )
    assert [item["text"] for item in said if item["type"] == "stdout"] == ["last words\n"]
    error = said[-1]
    assert error["name"] == "KernelDied"
    assert "ended with exit code 3" in error["value"]
    assert interpreter.text("1", context_id=context) == "1"
    error = interpreter.error("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", context_id=context)
    assert "killed by SIGKILL; the sandbox may have run out of memory" in error["value"]
    pid = int(interpreter.text("import os; print(os.getpid())", context_id=context))
    os.kill(pid, signal.SIGKILL)  # while nothing runs: the next execution tells
    until(lambda: not Path(f"/proc/{pid}").exists())
    time.sleep(0.2)
    said = interpreter.run("2", context_id=context)
    assert "what it knew is gone" in said[0]["text"]
    assert said[-1]["text"] == "2"
    interpreter.http.delete(f"/contexts/{context}")


def test_output_without_end_is_cut(interpreter: Interpreter) -> None:
    said = interpreter.run("for _ in range(20): print('x' * (1 << 20))\n'end'")
    told = sum(len(item["text"]) for item in said if item["type"] == "stdout")
    assert told == 16 << 20
    assert "output left out" in next(item["text"] for item in said if item["type"] == "stderr")
    assert said[-1]["text"] == "end"
    said = interpreter.run("for _ in range(4): display({'text/plain': 'x' * (15 << 20)}, raw=True)")
    assert [item["type"] for item in said[1:]] == ["result", "result", "result", "stderr"]
    assert "a result of 15 MiB (text/plain) was left out" in said[-1]["text"]


def test_many_small_displays_all_arrive(interpreter: Interpreter) -> None:
    said = interpreter.run("for i in range(3000): display(i)")
    assert [item["text"] for item in said if item["type"] == "result"] == [str(i) for i in range(3000)]
    assert interpreter.text("seq 1 3000", language="bash") == "".join(f"{i}\n" for i in range(1, 3001))


def test_background_output_of_an_earlier_execution_is_nobody_elses(interpreter: Interpreter) -> None:
    interpreter.run("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()")
    said = interpreter.run("time.sleep(1); 1")
    assert [item["type"] for item in said if item["type"] != "stdout"] == ["number_of_executions", "result"]


def test_a_removed_default_context_is_made_again(interpreter: Interpreter) -> None:
    first = next(c for c in interpreter.http.get("/contexts").json() if c["language"] == "bash")
    assert interpreter.http.delete(f"/contexts/{first['id']}").status_code == 200
    assert interpreter.text("echo 1", language="bash") == "1\n"


def test_kernels_end_with_the_server(tmp_path: Path) -> None:
    import subprocess
    import sys

    from tests.interpreter.conftest import PROGRAM

    code = (
        "import asyncio, os, sys, time\n"
        "from program.kernel import Kernel\n"
        "from program.languages import find\n"
        "async def main():\n"
        "    kernel = await Kernel.start(find('python'), '/', {})\n"
        "    print(kernel.process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=PROGRAM, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.kill()
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes())


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
