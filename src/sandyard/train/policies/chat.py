"""What a chat template says about tokens: the prompt, the end of a turn, and the glue around tool answers.

Everything is derived from the template by rendering, and checked when the object is made: the prompt,
a sampled turn, `close_turn` and `observation` concatenated must be what the template renders for the
same conversation. A template for which that does not hold is refused with the reason.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sandyard.errors import ConfigError
from sandyard.train.policies.base import Message

# ChatML with tools in the Hermes style, for models whose own template knows no tools (opt-in).
HERMES_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif -%}
You may call these tools:
<tools>
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools>' }}
To call one, write:
<tool_call>
{"name": "the tool", "arguments": {"argument": "value"}}
</tool_call><|im_end|>
{% elif messages[0]['role'] == 'system' %}<|im_start|>system
{{ messages[0]['content'] }}<|im_end|>
{% endif -%}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif not (loop.first and message['role'] == 'system') %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n' if message['content'] or not loop.first }}
{{- '<tool_call>\\n' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

TEMPLATES: Mapping[str, str] = {"hermes": HERMES_TEMPLATE}

_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
# A tool's name in an answer may come from the policy, which must not write template glue through it.
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PROBE_USER: Message = {"role": "user", "content": "Go."}


def choose_template(tokenizer: Any, name: str | None) -> str:
    """The template to use: the built-in one called `name`, else the tokenizer's own.

    Raises `ConfigError` for an unknown name, or where there is neither.
    """
    if name is not None:
        if name not in TEMPLATES:
            known = ", ".join(sorted(TEMPLATES))
            raise ConfigError(f"chat template {name!r} does not exist", remedy=f"choose one of: {known}")
        return TEMPLATES[name]
    own = tokenizer.chat_template
    if not isinstance(own, str):
        raise ConfigError("the tokenizer has no chat template", remedy="use --chat-template hermes or another model")
    return own


class ChatFormat:
    """Renders one tokenizer's conversations. Raises `ConfigError` for a template that cannot carry tool calls."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.template = choose_template(tokenizer, None) if template is None else template
        self._specials = [token for token in tokenizer.get_added_vocab() if token]
        self._observation_text = functools.lru_cache(maxsize=64)(self._render_observation)
        self._check_tools()
        turn = self._ids(self._text([_PROBE_USER, _assistant(1)]))
        self.end_of_turn = self._find_end(turn)
        self.after_turn = turn[_last_index(turn, self.end_of_turn) + 1 :]
        self._check_glue()

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of the conversation up to where the assistant begins."""
        return self._ids(self._text(messages, tools, generation=True))

    def close_turn(self, token_ids: Sequence[int]) -> list[int]:
        ended = bool(token_ids) and token_ids[-1] == self.end_of_turn
        return [*self.after_turn] if ended else [self.end_of_turn, *self.after_turn]

    def observation(self, tool_names: Sequence[str], observations: Sequence[str]) -> list[int]:
        """Token ids of tool answers and the next generation prompt.

        A special token's text inside an answer is encoded as plain characters: an observation cannot
        end its own message or start another one.
        """
        marks = tuple(f"@@answer-{index}@@" for index in range(len(observations)))
        names = tuple(name if _TOOL_NAME.fullmatch(name) else "unknown" for name in tool_names)
        rest = self._observation_text(names, marks)
        hostile = any(special in answer for special in self._specials for answer in observations)
        ids: list[int] = []
        text = ""
        for mark, answer in zip(marks, observations, strict=True):
            before, _, rest = rest.partition(mark)
            text += before
            if hostile:
                ids += self._ids(text) + self._plain(answer)
                text = ""
            else:
                text += answer
        return ids + self._ids(text + rest)

    def encode_turn(self, text: str) -> list[int]:
        """Token ids of an assistant's turn with this text, its end included."""
        return [*self._ids(text), self.end_of_turn]

    def _render_observation(self, tool_names: tuple[str, ...], answers: tuple[str, ...]) -> str:
        before: list[Message] = [_PROBE_USER, _assistant(len(answers), tool_names)]
        after = [
            {"role": "tool", "name": name, "tool_call_id": f"call{index:05d}", "content": answer}
            for index, (name, answer) in enumerate(zip(tool_names, answers, strict=True))
        ]
        head, whole = self._text(before), self._text([*before, *after], generation=True)
        if not whole.startswith(head):
            raise ConfigError("the chat template renders a turn differently once it is answered", remedy=_REMEDY)
        return whole[len(head) :]

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (_PROBE_TOOL,), generation: bool = False
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self.template,
            add_generation_prompt=generation,
            tokenize=False,
        )
        return text

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _plain(self, text: str) -> list[int]:
        ids = list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        if any(token in ids for token in self._tokenizer.get_added_vocab().values()):
            # The tokenizer ignores split_special_tokens: break the marks instead of letting them through.
            for special in self._specials:
                text = text.replace(special, special[:1] + " " + special[1:])
            ids = self._ids(text)
        return ids

    def _check_tools(self) -> None:
        plain = self._text([_PROBE_USER], (), generation=True)
        offered = self._text([_PROBE_USER], generation=True)
        called = self._text(
            [_PROBE_USER, _assistant(1), {"role": "tool", "name": "probe_tool", "content": "answer-17"}]
        )
        if plain == offered or "probe_tool" not in offered:
            raise ConfigError("the chat template does not show tools to the model", remedy=_REMEDY)
        if "answer-17" not in called or called.count("probe_tool") <= offered.count("probe_tool"):
            raise ConfigError("the chat template does not render tool calls and their answers", remedy=_REMEDY)

    def _find_end(self, turn: Sequence[int]) -> int:
        """The end-of-turn token: the tokenizer's eos if the turn has it, else its last special token."""
        eos = self._tokenizer.eos_token_id
        if eos in turn:
            return int(eos)
        special = set(self._tokenizer.all_special_ids)
        end = next((token for token in reversed(turn) if token in special), None)
        if end is None:
            raise ConfigError("the chat template ends a turn without a special token", remedy=_REMEDY)
        return end

    def _check_glue(self) -> None:
        """Prompt + turn + glue + answer must be the template's own rendering, token for token."""
        assistant = _assistant(1)
        prompt_text = self._text([_PROBE_USER], generation=True)
        turn_text = self._text([_PROBE_USER, assistant])
        answered = [_PROBE_USER, assistant, {"role": "tool", "name": "probe_tool", "content": "line 1\nline 2"}]
        whole = self._ids(self._text(answered, generation=True))
        if not turn_text.startswith(prompt_text):
            raise ConfigError("the chat template's generation prompt is not how it begins a turn", remedy=_REMEDY)
        turn = self._ids(turn_text[len(prompt_text) :])
        sampled = turn[: _last_index(turn, self.end_of_turn) + 1]
        built = [
            *self.render_prompt([_PROBE_USER], [_PROBE_TOOL]),
            *sampled,
            *self.close_turn(sampled),
            *self.observation(["probe_tool"], ["line 1\nline 2"]),
        ]
        if built != whole:
            at = next((i for i, (a, b) in enumerate(zip(built, whole, strict=False)) if a != b), -1)
            raise ConfigError(f"the chat template's turns do not join token for token (token {at})", remedy=_REMEDY)


_REMEDY = "use --chat-template hermes, or a model whose template carries tool calls"


def _assistant(count: int, names: Sequence[str] = ("probe_tool",)) -> Message:
    calls = [
        {
            "id": f"call{index:05d}",
            "type": "function",
            "function": {"name": names[index % len(names)], "arguments": {"code": "x = 1"}},
        }
        for index in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _last_index(ids: Sequence[int], token: int) -> int:
    return len(ids) - 1 - list(reversed(ids)).index(token)


def render_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of one Hermes tool call, as demonstrations write it and `parse_hermes` reads it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"
