"""The nano policy's tokenizer and chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sandyard.envs.code import TOOL_SCHEMA
from sandyard.tasks.builtin import builtin_tasks
from sandyard.train.nano.corpus import IGNORED, nano_tokenizer, render, targets
from sandyard.train.nano.demonstrations import (
    RUN_TOOL,
    SUBMIT_TOOL,
    DemonstrationConfig,
    demonstrate,
    opening,
    tool_schemas,
)
from sandyard.train.nano.model import build_model
from sandyard.train.nano.template import IM_START
from sandyard.train.policies.parsers import parse_hermes
from sandyard.train.policies.transformers import TransformersPolicy

TRAIN = builtin_tasks("train")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return nano_tokenizer(TRAIN, 0, DemonstrationConfig())


@pytest.fixture(scope="module")
def policy(tokenizer: PreTrainedTokenizerFast) -> TransformersPolicy:
    model = build_model(len(tokenizer), int(tokenizer.eos_token_id), int(tokenizer.pad_token_id))
    return TransformersPolicy(model, tokenizer)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_a_demonstration_round_trips_and_digits_stand_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    for task in TRAIN[::20]:
        text = render(demonstrate(task, rng, DemonstrationConfig()))
        ids = encode(tokenizer, text)
        assert tokenizer.decode(ids) == text
        assert len(ids) < 200
    digits = [token for token in tokenizer.get_vocab() if any(digit in token for digit in "0123456789")]
    assert sorted(digits) == list("0123456789")


def test_training_the_tokenizer_twice_gives_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    assert nano_tokenizer(TRAIN, 0, DemonstrationConfig()).get_vocab() == tokenizer.get_vocab()


def test_it_survives_save_and_load(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = render(demonstrate(TRAIN[0], random.Random(0), DemonstrationConfig()))
    assert encode(again, text) == encode(tokenizer, text)
    assert again.chat_template == tokenizer.chat_template


def test_the_prompt_shows_the_tools_of_the_code_env_as_the_demonstrations_do(policy: TransformersPolicy) -> None:
    messages = opening("Write a function f.")
    shown = policy.render_prompt(messages, [tool.to_openai() for tool in TOOL_SCHEMA])
    assert shown == policy.render_prompt(messages, tool_schemas())
    text = policy.decode(shown)
    assert "run_python(code), submit_solution(code)" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_a_demonstrated_turn_parses_as_a_sampled_one(policy: TransformersPolicy) -> None:
    code = "def f(s):\n    return s + 'a\"b'"
    call = {"type": "function", "function": {"name": SUBMIT_TOOL, "arguments": {"code": code}}}
    text = render([*opening("x"), {"role": "assistant", "content": "", "tool_calls": [call]}])
    header = f"{IM_START}assistant\n"
    turn = encode(policy.tokenizer, text[text.index(header) + len(header) :])
    parsed = policy.parse_turn(turn[: turn.index(policy.tokenizer.eos_token_id) + 1])
    assert parsed.error is None
    assert [(c.name, dict(c.arguments)) for c in parsed.calls] == [(SUBMIT_TOOL, {"code": code})]


def test_a_whole_demonstration_is_what_the_rollout_engine_would_build(policy: TransformersPolicy) -> None:
    """Prompt, sampled turns, glue and observations, joined by the policy, are the template's own rendering."""
    rng = random.Random(1)
    shown = (demonstrate(task, rng, DemonstrationConfig(tries_first=1.0)) for task in TRAIN[:3])
    for messages in shown:
        ids = policy.render_prompt(messages[:2], tool_schemas())
        for message in messages[2:]:
            if message["role"] == "tool":
                ids += policy.render_observation([RUN_TOOL], [message["content"]])
                continue
            function = message["tool_calls"][0]["function"]
            body = json.dumps({"name": function["name"], "arguments": function["arguments"]})
            turn = policy.chat.encode_turn(f"<tool_call>{body}</tool_call>")
            ids += [*turn, *policy.close_turn(turn)]
        assert ids == encode(policy.tokenizer, render(messages))


def test_targets_are_the_turns_of_the_assistant(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = demonstrate(TRAIN[0], random.Random(1), DemonstrationConfig(tries_first=1.0))
    ids = encode(tokenizer, render(messages))
    labels = targets(ids, encode(tokenizer, f"{IM_START}assistant\n"), int(tokenizer.eos_token_id))
    said = tokenizer.decode([label for label in labels if label != IGNORED])
    turns = said.split("<|im_end|>")
    assert turns.pop() == ""
    assert [parse_hermes(turn).calls[0].name for turn in turns] == [RUN_TOOL, SUBMIT_TOOL]
    assert all(label in (IGNORED, token) for label, token in zip(labels, ids, strict=True))
