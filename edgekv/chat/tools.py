"""Tools that a model may call, and calls."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgekv.errors import BadInput

NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: dict(NO_PARAMETERS))

    def as_openai(self, parameters: Any = None) -> dict[str, Any]:
        """As chat templates expect it. parameters: others than its own."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters if parameters is None else parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Choice:
    """Which tools may be called. name: this one has to be; is_forced: one of them has to be;
    is_none: none may, though the prompt has them.
    """

    tools: tuple[Tool, ...] = ()
    is_forced: bool = False
    is_none: bool = False
    name: str | None = None
    parallel: bool | None = None
    """Several calls in an answer; None: as the template has it."""

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and not self.is_none

    @property
    def wish(self) -> str:
        """llama.cpp's word for it."""
        return "none" if self.is_none else "required" if self.is_forced else "auto"

    def allowed(self) -> list[Tool]:
        """Raises BadInput if the tool that has to be called is none of them."""
        found = [tool for tool in self.tools if self.name in (None, tool.name)]
        if self.is_forced and not found:
            raise BadInput(f"tool_choice names no tool of this request: {self.name}")
        return found


def choice_of(tools: Sequence[Tool], wish: Any, parallel: bool | None = None) -> Choice:
    """OpenAI's tool_choice: 'auto', 'none', 'required' or the tool that has to be called.

    Raises BadInput for another one.
    """
    if not tools:
        if wish not in (None, "none", "auto"):
            raise BadInput("tool_choice asks for a call, but there are no tools")
        return Choice()
    if wish == "none":
        return Choice(tuple(tools), is_none=True)
    if wish in (None, "auto"):
        return Choice(tuple(tools), parallel=parallel)
    if wish == "required":
        return Choice(tuple(tools), is_forced=True, parallel=parallel)
    if isinstance(wish, dict):
        function = wish.get("function")
        name = function.get("name") if isinstance(function, dict) else wish.get("name")
        if isinstance(name, str):
            return Choice(tuple(tools), is_forced=True, name=name, parallel=False)
    raise BadInput("tool_choice is 'auto', 'none', 'required' or the name of a function")


@dataclass(frozen=True)
class Call:
    """A call that is complete. arguments: JSON, as the model wrote it."""

    name: str
    arguments: str
    id: str = ""


def new_id() -> str:
    """For a call that the model gave none."""
    return f"call_{secrets.token_hex(12)}"


def as_value(arguments: str) -> Any:
    """The arguments of a call as JSON; what is none becomes {"raw": the text}.

    Numbers beyond any float stay text: JSON has no word for infinity.
    """
    try:
        return json.loads(arguments or "{}", parse_float=_number, parse_constant=str)
    except (ValueError, RecursionError):
        return {"raw": arguments}


def _number(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text
