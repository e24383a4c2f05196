"""Deltas: whatever was written comes back, and what was changed since is refused."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import composite

from sandyard.runtimes.container.derived import parent_of
from sandyard.runtimes.deltas import (
    Chain,
    Delta,
    DeltaDamaged,
    Placed,
    differing,
    index_delta,
    materialise,
    merged,
    write_delta,
)
from sandyard.runtimes.deltas.chain import merged_runs
from sandyard.runtimes.deltas.format import RUN_BYTES, parent_name, write_runs

BLOCK = 4096
States = list[dict[int, int]]  # for each state after the first: block -> byte that fills it


@composite
def histories(draw: st.DrawFn) -> tuple[int, States]:
    blocks = draw(st.integers(1, 40))
    changes = st.dictionaries(st.integers(0, blocks - 1), st.integers(0, 3), max_size=12)
    return blocks, draw(st.lists(changes, min_size=1, max_size=5))


def _fill(path: Path, blocks: int, tail: int = 0) -> bytearray:
    content = bytearray(blocks * BLOCK - tail)
    for number in range(0, blocks, 3):
        content[number * BLOCK : number * BLOCK + 8] = number.to_bytes(8, "little")
    path.write_bytes(content)
    return content


def _record(folder: Path, states: States, content: bytearray) -> list[Path]:
    """A delta for each state, by comparing its image with the chain before."""
    base, deltas = folder / "base", list[Path]()
    for at, changes in enumerate(states):
        for number, byte in changes.items():
            end = min((number + 1) * BLOCK, len(content))
            content[number * BLOCK : end] = bytes([byte]) * (end - number * BLOCK)
        image = folder / f"image{at}"
        image.write_bytes(content)
        target = folder / f"{at}.delta"
        with Chain(base, deltas) as chain:
            blocks = differing(image, chain)
            write_delta(target, blocks, block_size=BLOCK, size=len(content), parent="base", durable=False)
        deltas.append(target)
    return deltas


@settings(max_examples=60, deadline=None)
@given(history=histories(), tail=st.sampled_from([0, 1, 4000]))
def test_a_chain_is_the_image_it_was_made_from(
    tmp_path_factory: pytest.TempPathFactory, history: tuple[int, States], tail: int
) -> None:
    folder = tmp_path_factory.mktemp("chain")
    content = _fill(folder / "base", history[0], tail)
    deltas = _record(folder, history[1], content)
    materialise(folder / "base", deltas, folder / "whole")
    assert (folder / "whole").read_bytes() == content
    with Chain(folder / "base", deltas) as chain:
        for offset, length in ((0, len(content)), (len(content) // 3, len(content) // 2), (len(content) - 1, 1)):
            target = bytearray(length)
            chain.read(offset, memoryview(target))
            assert target == content[offset : offset + length]
    opened = [Delta(path) for path in deltas]
    one = folder / "one.delta"
    write_delta(one, merged(opened), block_size=BLOCK, size=len(content), parent="base", durable=False)
    for delta in opened:
        delta.close()
    materialise(folder / "base", [one], folder / "again")
    assert (folder / "again").read_bytes() == content


def test_a_change_costs_what_it_changed(tmp_path: Path) -> None:
    rng = random.Random(1)
    content = bytearray(rng.randbytes(32 << 20))
    (tmp_path / "base").write_bytes(content)
    content[5 << 20 : 6 << 20] = rng.randbytes(1 << 20)
    (tmp_path / "image").write_bytes(content)
    with Chain(tmp_path / "base", []) as chain:
        taken = write_delta(
            tmp_path / "d",
            differing(tmp_path / "image", chain),
            block_size=BLOCK,
            size=len(content),
            parent="base",
            durable=True,
        )
    assert 1 << 20 <= taken < (1 << 20) + (64 << 10)


def test_holes_are_not_read_and_freed_blocks_are_zero(tmp_path: Path) -> None:
    size = 8 << 30  # reading that much would run into the test's time limit
    for name in ("base", "image"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    with open(tmp_path / "base", "r+b") as file:
        os.pwrite(file.fileno(), b"x" * BLOCK, 5 << 30)
    with Chain(tmp_path / "base", []) as chain:
        assert [(n, bytes(b)) for n, b in differing(tmp_path / "image", chain)] == [((5 << 30) // BLOCK, bytes(BLOCK))]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "d"
    blocks = [(1, b"a" * BLOCK), (2, b"b" * BLOCK), (7, bytes(BLOCK))]
    write_delta(path, blocks, block_size=BLOCK, size=10 * BLOCK, parent="base", durable=False)
    path.chmod(0o600)
    return path


def test_every_flipped_bit_is_found(whole: Path) -> None:
    content = whole.read_bytes()
    for at in range(0, len(content), 37):
        damaged = bytearray(content)
        damaged[at] ^= 1 << (at % 8)
        whole.write_bytes(damaged)
        with pytest.raises(DeltaDamaged), Delta(whole) as delta:
            delta.verify()
    whole.write_bytes(content)
    with Delta(whole) as delta:
        delta.verify()
        assert (delta.parent, delta.data_bytes) == ("base", 2 * BLOCK)


def test_its_parent_is_read_without_its_runs(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a run was made")

    monkeypatch.setattr("sandyard.runtimes.deltas.format.Run", refused)
    content = whole.read_bytes()
    assert parent_name(whole) == "base"
    for at in range(2 * BLOCK, len(content), 11):  # the index, and the footer
        damaged = bytearray(content)
        damaged[at] ^= 1 << (at % 8)
        whole.write_bytes(damaged)
        with pytest.raises(DeltaDamaged):
            parent_name(whole)


def test_the_parent_of_a_layer_is_read_without_its_runs(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandyard.runtimes.deltas.format.Run", None)
    whole.rename(whole.with_name("layer.delta"))
    assert parent_of(whole.with_name("layer")) == whole.with_name("base")


@pytest.mark.parametrize("length", [0, 1, 159, 160, 161, 4096, 8192, -1])
def test_a_cut_file_is_refused(whole: Path, length: int) -> None:
    whole.write_bytes(whole.read_bytes()[:length])
    with pytest.raises(DeltaDamaged, match="d "):
        Delta(whole)


def test_a_delta_of_another_image_is_refused(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "base").write_bytes(bytes(9 * BLOCK))
    with pytest.raises(DeltaDamaged, match="not of this image"):
        Chain(tmp_path / "base", [whole])


@pytest.mark.parametrize(
    "blocks", [[(1, b"x" * BLOCK), (1, b"y" * BLOCK)], [(10, b"x" * BLOCK)], [(0, b"short")]], ids=str
)
def test_blocks_that_do_not_fit_leave_nothing(tmp_path: Path, blocks: list[tuple[int, bytes]]) -> None:
    with pytest.raises(ValueError, match="block"):
        write_delta(tmp_path / "d", blocks, block_size=BLOCK, size=10 * BLOCK, parent="base", durable=False)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_replaced(whole: Path) -> None:
    before = whole.read_bytes()
    with pytest.raises(FileExistsError):
        write_delta(whole, [], block_size=BLOCK, size=BLOCK, parent="base", durable=False)
    assert whole.read_bytes() == before
    assert [path.name for path in whole.parent.iterdir()] == ["d"]


def _placed(draft: Path, blocks: dict[int, int], drop: int | None = None) -> list[Placed]:
    """Blocks of one byte each, neighbours as one run, as they lie in `draft`; `drop` lies there too, in no run."""
    runs: list[Placed] = []
    with open(draft, "wb") as file:
        for number, byte in sorted(blocks.items()):
            offset, data = file.tell(), bytes([byte]) * BLOCK
            file.write(data)
            if number == drop:
                continue
            if runs and runs[-1].first + len(runs[-1].data) // BLOCK == number:
                runs[-1] = runs[-1]._replace(data=runs[-1].data + data)
            else:
                runs.append(Placed(number, offset, data))
    return runs


@settings(max_examples=60, deadline=None)
@given(blocks=st.dictionaries(st.integers(0, 60), st.integers(0, 2), max_size=30), dropped=st.integers(0, 60))
def test_data_that_lies_there_becomes_a_delta_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, blocks: dict[int, int], dropped: int
) -> None:
    folder = tmp_path_factory.mktemp("placed")
    draft, path = folder / "draft", folder / "delta"
    runs = _placed(draft, blocks, dropped)
    index_delta(draft, path, runs, block_size=BLOCK, size=64 * BLOCK, parent="none", durable=False)
    assert [entry.name for entry in folder.iterdir()] == ["delta"]
    with Delta(path) as delta:
        delta.verify()
        kept = {number: byte for number, byte in blocks.items() if number != dropped}
        assert {number: data[0] for number, data in delta.blocks()} == kept
        assert all(bytes(data) == bytes([data[0]]) * BLOCK for _, data in delta.blocks())
        assert delta.data_bytes == sum(byte != 0 for byte in kept.values()) * BLOCK


def test_what_no_run_names_and_what_is_zero_takes_no_place(tmp_path: Path) -> None:
    draft, path = tmp_path / "draft", tmp_path / "delta"
    blocks = {number: int(number >= 200) for number in range(400)} | {number: 7 for number in range(600, 800)}
    runs = [run for run in _split(_placed(draft, blocks)) if run.first < 600]
    index_delta(draft, path, runs, block_size=BLOCK, size=1000 * BLOCK, parent="none", durable=True)
    assert 200 * BLOCK <= path.stat().st_blocks * 512 < 210 * BLOCK
    with open(path, "rb") as file:
        assert file.read(200 * BLOCK) == bytes(200 * BLOCK)  # as whoever has mapped it sees it


def _split(runs: list[Placed]) -> list[Placed]:
    """No longer than a run may be."""
    most = 256 * BLOCK
    return [
        Placed(run.first + at // BLOCK, run.offset + at, run.data[at : at + most])
        for run in runs
        for at in range(0, len(run.data), most)
    ]


@pytest.mark.parametrize(
    "runs",
    [
        [Placed(1, 0, bytes(BLOCK)), Placed(0, BLOCK, bytes(BLOCK))],
        [Placed(1, 0, bytes(2 * BLOCK)), Placed(2, BLOCK, bytes(BLOCK))],
        [Placed(0, 512, b"x" * BLOCK)],
        [Placed(0, 0, b"x" * (257 * BLOCK))],
    ],
)
def test_runs_that_no_delta_can_have_are_refused(tmp_path: Path, runs: list[Placed]) -> None:
    draft, path = tmp_path / "draft", tmp_path / "delta"
    draft.write_bytes(b"x" * (300 * BLOCK))
    with pytest.raises(ValueError, match="draft, behind block"):
        index_delta(draft, path, runs, block_size=BLOCK, size=1000 * BLOCK, parent="none", durable=False)
    assert list(tmp_path.iterdir()) == []


def test_several_are_one_with_the_runs_it_would_have(tmp_path: Path) -> None:
    """Written by runs or by blocks it is the same file, and reading takes no run twice."""
    dice, paths = random.Random(3), []
    for count in range(4):
        chosen = sorted(dice.sample(range(900), 500))
        blocks = [(number, bytes(BLOCK) if number % 7 == count else dice.randbytes(BLOCK)) for number in chosen]
        paths.append(tmp_path / f"{count}.delta")
        write_delta(paths[-1], blocks, block_size=BLOCK, size=900 * BLOCK, parent="base", durable=False)
    with ExitStack() as stack:
        deltas = [stack.enter_context(Delta(path)) for path in paths]
        options: dict[str, Any] = {"block_size": BLOCK, "size": 900 * BLOCK, "parent": "base", "durable": False}
        write_delta(tmp_path / "blocks", merged(deltas), **options)
        write_runs(tmp_path / "runs", merged_runs(deltas), **options)
        assert (tmp_path / "blocks").read_bytes() == (tmp_path / "runs").read_bytes()
        with Delta(tmp_path / "runs") as one:
            assert all(run.blocks * BLOCK <= RUN_BYTES for run in one.runs)


def test_what_is_not_checked_is_read_all_the_same(whole: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    with Delta(whole) as delta:
        base.write_bytes(bytes(delta.size))
        run = next(run for run in delta.runs if run.offset is not None)
        assert delta.peek(run, run.first, run.end) == delta.read(run)
    first, second = bytearray(delta.size), bytearray(delta.size)
    for content, checked in ((first, True), (second, False)):
        with Chain(base, [whole], checked=checked) as chain:
            for at in range(0, delta.size, 5000):  # not as blocks lie
                chain.read(at, memoryview(content)[at : at + 5000])
    assert first == second
    assert any(first)
    with open(whole, "r+b") as file:
        file.seek(run.offset or 0)
        file.write(b"\xa5")
    for checked in (True, False):
        with (
            Chain(base, [whole], checked=checked) as chain,
            nullcontext() if not checked else pytest.raises(DeltaDamaged),
        ):
            chain.read(0, memoryview(first))
