"""Chat templates, tools and questions that tests of chats share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib import ROOT

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>"
    "{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% endif %}"
)
"""Calls as Hermes' models write them."""
THINKS = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}",
).replace("<|assistant|>{% endif %}", "<|assistant|>{{ '<think>' if think }}{% endif %}")
"""The same with thoughts; with the variable `think` the prompt opens one."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"$ref": "#/$defs/unit"}, "n": {"type": "boolean"}},
                "required": ["unit", "n"],
                "$defs": {"unit": {"enum": units}},
            },
        },
    }
    for name, units in (("get_weather", ["C", "F"]), ("add", ["one"]))
]
ASK = [{"role": "user", "content": "abc"}]


def upstream_template(name: str) -> str:
    """A template of llama.cpp's own tests, or skip where no build has unpacked them."""
    path = Path(ROOT, "build", "upstream", "models", "templates", f"{name}.jinja")
    if not path.is_file():
        pytest.skip(f"{path.name} is unpacked by a build: build once")
    return path.read_text(encoding="utf-8")
