"""The nano policy's chat template: ChatML with Hermes-style tool calls, as short as can be.

Every prompt token is paid for in each rollout, so a tool is shown by its name and the names of its
parameters (`run_python(code)`), not by its JSON schema. A call is
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; its answer is a message of role `tool`.
"""

from __future__ import annotations

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

CHAT_TEMPLATE = """\
{%- macro tool_list() -%}
Tools:
{%- for tool in tools %} {{ (tool.function or tool).name }}(\
{{ (tool.function or tool).parameters.properties | list | join(', ') }}){{ '.' if loop.last else ',' }}{% endfor -%}
{%- endmacro -%}
{%- if tools and (not messages or messages[0].role != 'system') -%}
<|im_start|>system
{{ tool_list() }}<|im_end|>
{{ '' }}
{%- endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- if message.role == 'system' and loop.first and tools %} {{ tool_list() }}{% endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
<tool_call>{"name": {{ function.name | tojson }}, "arguments": \
{{ function.arguments if function.arguments is string else function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{{ '' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{{ '' }}
{%- endif -%}
"""
