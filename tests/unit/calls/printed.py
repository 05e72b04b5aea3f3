"""Small chat templates that print tools and calls as the real ones of each format do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2

from orchestrator.types import CallFormat

Calls = list[tuple[str, dict[str, Any]]]

# name: (its format, the template, what ends a turn)
TEMPLATES: Mapping[str, tuple[CallFormat, str, str]] = {
    "hermes": (
        "hermes",
        """{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ content }}
{%- for call in calls %}{{ '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}<|im_end|>""",
        "<|im_end|>",
    ),
    "qwen3_coder": (
        "qwen3_coder",
        """{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ content }}{{ '\\n' }}
{%- for call in calls %}{{ '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments.items() %}{{ '<parameter=' + key + '>\\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}<|im_end|>""",
        "<|im_end|>",
    ),
    "llama3": (
        "llama3",
        """{% if tools %}Environment: ipython{{ tools | tojson }}{% endif %}
{%- for call in calls %}{{ '; ' if not loop.first }}{{ '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}' }}{% endfor %}<|eot_id|>""",
        "<|eot_id|>",
    ),
    "mistral_array": (
        "mistral",
        """{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{{ content }}
{{- '[TOOL_CALLS] [' }}{% for call in calls %}{{ (call | tojson)[:-1] }}{{ ', "id": "abcdefghi"}' }}
{{- ', ' if not loop.last }}{% endfor %}]</s>""",
        "</s>",
    ),
    "mistral_args": (
        "mistral",
        """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{{ content }}
{%- for call in calls %}{{ '[TOOL_CALLS]' + call.name + '[CALL_ID]abcdefghi[ARGS]' }}
{{- call.arguments | tojson }}{% endfor %}</s>""",
        "</s>",
    ),
    "deepseek_v3": (
        "deepseek",
        """{% if tools %}{{ tools | tojson }}{% endif %}{{ content + '<｜tool▁calls▁begin｜>' }}
{%- for call in calls %}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name + '\\n```json\\n' }}
{{- call.arguments | tojson }}{{ '\\n```<｜tool▁call▁end｜>' }}{{ '\\n' if not loop.last }}{% endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}""",
        "<｜end▁of▁sentence｜>",
    ),
    "deepseek_v31": (
        "deepseek",
        """{% if tools %}{{ tools | tojson }}{% endif %}{{ content + '<｜tool▁calls▁begin｜>' }}
{%- for call in calls %}{{ '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' }}
{{- call.arguments | tojson }}{{ '<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}""",
        "<｜end▁of▁sentence｜>",
    ),
    "gpt_oss": (
        "gpt_oss",
        """{% if tools %}{{ tools | tojson }}{% endif %}
{%- if content %}{{ '<|channel|>commentary<|message|>' + content + '<|end|>' }}{% endif %}
{%- for call in calls %}{{ '<|start|>assistant to=' }}
{{- 'functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}{% endfor %}""",
        "<|call|>",
    ),
}
_ENVIRONMENT = jinja2.Environment()
_ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
_COMPILED = {name: _ENVIRONMENT.from_string(template) for name, (_, template, _) in TEMPLATES.items()}


def printed(name: str, content: str, calls: Calls) -> str:
    """What the template prints of an assistant's turn, up to its end."""
    said = [{"name": called, "arguments": arguments} for called, arguments in calls]
    return _COMPILED[name].render(tools=[], content=content, calls=said).removesuffix(TEMPLATES[name][2])


def tool(name: str, /, **types: Any) -> dict[str, Any]:
    """A tool whose arguments have these JSON types."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
