"""Calls without their format's tags: an answer that is nothing but objects with a tool's name.

Small models leave the tags out, or write a block of code around the object. Llama 3's templates
teach this form, with "parameters".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from edgekv.chat.tools import Call, Tool

TAGS = ("<|python_tag|>", "<|tool_call|>")
"""May stand in front of the first object."""
FENCE = re.compile(r"```(?:json|tool_call)?\s*(.*?)\s*```", re.DOTALL)
BEGINS = ('{"name":', '{"type":"function","name":', '{"type":"function","function":', '[{"name":')
FENCES = ("```json", "```tool_call", "```")


def may_begin(text: str) -> bool:
    """Whether an answer that begins so may become such calls."""
    begin = "".join(text.split())
    starts = [tag + start for tag in ("", *TAGS, *FENCES) for start in BEGINS]
    return any(begin.startswith(start) or start.startswith(begin) for start in starts)


def calls_in(text: str, names: frozenset[str]) -> list[Call]:
    """The calls that a whole answer consists of; none if it is something else."""
    text = text.strip()
    for tag in (*TAGS, "<tool_call>"):
        text = text.removeprefix(tag).removesuffix("</tool_call>").strip()
    if text.startswith("```") and not FENCE.sub("", text).strip():
        text = "\n".join(FENCE.findall(text))
    values = _values(text)
    calls = [call for value in values for call in _call_of(value, names)]
    return calls if calls and len(calls) == len(values) else []


def _values(text: str) -> list[Any]:
    """JSON values that follow each other; none if there is something else."""
    values: list[Any] = []
    while text:
        try:
            value, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(text)
        except (ValueError, RecursionError):
            return []
        values += value if isinstance(value, list) else [value]
        text = text[end:].lstrip("; \n")
    return values


def _refuse(text: str) -> None:
    raise ValueError(text)


def _call_of(value: Any, names: frozenset[str]) -> list[Call]:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or value.get("name") not in names:
        return []
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return [Call(value["name"], arguments)]
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        text = json.dumps(arguments)
    except ValueError:  # a number that is too large
        return []
    return [Call(value["name"], text)]


def schema_of(tools: Sequence[Tool], template: str) -> dict[str, Any]:
    """The schema of such a call, with the key that the template teaches."""
    key = "parameters" if '"parameters"' in template else "arguments"
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, key: tool.parameters},
                "required": ["name", key],
            }
            for tool in tools
        ]
    }
