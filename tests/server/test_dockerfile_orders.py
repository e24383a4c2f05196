"""Orders of Dockerfiles through the API, over the in-memory runtime: what is refused, whose files and names count."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.images.test_build_parts import pack
from tests.server.test_templates import build, ended, other, register

if TYPE_CHECKING:
    from tests.server.conftest import LiveServer

__all__ = ["other"]


def order(api: httpx.Client, made: dict[str, Any], text: str, **body: Any) -> httpx.Response:
    more = {name: body.pop(name) for name in ("contextHash", "buildArgs", "target") if name in body}
    path = f"/v2/templates/{made['templateID']}/builds/{made['buildID']}"
    return api.post(path, json={"dockerfile": {"text": text, **more}, **body})


def built(api: httpx.Client, name: str, text: str, **body: Any) -> dict[str, Any]:
    made = register(api, name)
    assert order(api, made, text, **body).status_code == 202
    return ended(api, made)


@pytest.mark.parametrize(
    ("text", "body", "words"),
    [
        ("FROM base\nNOPE\n", {}, "Dockerfile:2: unknown instruction: NOPE"),
        ("FROM base\n", {"fromTemplate": "base"}, "give one of them"),
        (
            "FROM base\n",
            {"steps": [{"type": "RUN", "args": ["true"]}]},
            "steps and fromImageRegistry do not go with it",
        ),
        ("FROM base\n", {"target": "x"}, "target 'x' is no stage"),
        ("FROM base\0\n", {}, "a NUL character"),
    ],
)
def test_an_order_that_makes_no_sense_leaves_the_build_waiting(
    api: httpx.Client, text: str, body: dict[str, Any], words: str
) -> None:
    made = register(api, "mine")
    reply = order(api, made, text, **body)
    assert reply.status_code == 400
    assert words in reply.json()["message"]
    assert order(api, made, "FROM base\n").status_code == 202
    assert ended(api, made)["status"] == "ready"


def test_files_are_those_of_one_tenant(api: httpx.Client, other: httpx.Client, tmp_path: Path) -> None:
    made = register(api, "mine")
    link = api.get(f"/templates/{made['templateID']}/files/contexthash").json()
    api.put(link["url"], content=pack(tmp_path / "c", ("f", b"1")).read_bytes()).raise_for_status()
    text = "FROM base\nCOPY f /f\n"
    assert order(api, made, text, contextHash="contexthash").status_code == 202
    assert ended(api, made)["status"] == "ready"
    found = built(other, "theirs", text, contextHash="contexthash")
    assert (found["status"], found["reason"]["step"]) == ("error", "base")
    assert "were not uploaded, or are gone" in found["reason"]["message"]
    found = built(api, "none", text)
    assert "Dockerfile:2: it needs files of the build context, and none were sent" in found["reason"]["message"]


def test_what_others_publish_stands_for_no_image(api: httpx.Client, other: httpx.Client) -> None:
    build(other, "python")
    other.patch("/v2/templates/python", json={"public": True}).raise_for_status()
    found = built(api, "mine", "FROM python\nRUN echo x\n")
    assert found["status"] == "error"
    assert "image 'python' names no registry" in found["reason"]["message"]
    build(api, "python")
    assert built(api, "mine", "FROM python\nRUN echo x\n")["status"] == "ready"
    assert built(api, "mine", "FROM python:3\nRUN echo x\n")["status"] == "error"  # it has no such tag


def test_a_failure_names_its_step_and_line_and_its_log_is_kept(server: LiveServer, api: httpx.Client) -> None:
    found = built(api, "mine", "FROM base\nENV A=1\n\nRUN fail 3\n")
    assert (found["status"], found["reason"]["step"]) == ("error", "2")
    assert found["reason"]["message"] == "Dockerfile:4: RUN fail 3: exit status 3"
    assert [line for line in found["logs"] if "network" not in line][:3] == [
        "FROM template base",
        "[1/2] ENV A=1",
        "[2/2] RUN fail 3",
    ]


def test_settings_are_kept_with_the_build(server: LiveServer, api: httpx.Client) -> None:
    text = (
        'FROM base\nENV A=1\nLABEL b=2\nEXPOSE 80\nVOLUME /v\nSTOPSIGNAL SIGINT\nONBUILD ENV C=3\nCMD ["echo", "up"]\n'
    )
    assert built(api, "mine", text)["status"] == "ready"
    catalog = server.app.manager.catalog
    _, made = catalog.resolve("mine", None)
    assert made.config["start_cmd"] == "echo up"
    assert made.rootfs.env["A"] == "1"
    oci = made.config["oci"]
    assert (oci["Labels"], oci["ExposedPorts"], oci["Volumes"]) == ({"b": "2"}, {"80/tcp": {}}, {"/v": {}})
    assert (oci["StopSignal"], oci["OnBuild"], oci["Cmd"]) == ("SIGINT", ["ENV C=3"], ["echo", "up"])
    assert built(api, "child", "FROM mine\n")["status"] == "ready"
    _, child = catalog.resolve("child", None)
    assert child.rootfs.env["C"] == "3"
    assert "OnBuild" not in child.config["oci"]


def test_a_template_of_a_size(api: httpx.Client) -> None:
    register(api, "mine", cpuCount=2, memoryMB=256, diskMB=99)
    (made,) = api.get("/templates/mine").json()["builds"]
    assert (made["cpuCount"], made["memoryMB"], made["diskSizeMB"]) == (2, 256, 99)
    reply = api.post("/v3/templates", json={"name": "mine", "diskMB": 1})
    assert reply.status_code == 400
