"""What coding agents ask of a server, made by hand from their public protocols: which tokens of
each prompt are new, and which are read.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np

from tests import models

Message = dict[str, Any]
DATE, NEXT_DATE = "Today is 2026-11-29.\n", "Today is 2026-11-30.\n"
IGNORED = r"Today is [^\n]*\n"
"""For --ignore-prefix."""
N_SYSTEM, N_SUMMARY, N_TASK = 10_000, 1_000, 200
N_RESULTS = (500, 1000, 2000, 500, 4000, 1000, 500, 8000, 2000, 500) * 2
"""Tokens of what tools return, one result in each turn."""
EDITED, BRANCHED, COMPACTED = 4, 8, 16
"""Turns: whose result is cleared away later, behind which sub-agents run, and behind which the
history becomes a summary."""
PATIENCE = 3600


def text(n_tokens: int, seed: int) -> str:
    """About so many tokens of a tiny model, which takes most letters for one."""
    letters = random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=max(n_tokens, 5))
    return " ".join("".join(letters[i : i + 5]) for i in range(0, len(letters), 6))


CALL: Message = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read", "arguments": '{"path": "/a/b.py"}'},
}


def tools(n_tokens: int) -> list[dict[str, Any]]:
    """Functions whose arguments a model without sense can write."""
    path = {"type": "string", "enum": ["/a/b.py"]}
    parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    return [
        {"name": name, "description": text(n_tokens // 3, i), "parameters": parameters}
        for i, name in enumerate(("read", "edit", "shell"))
    ]


@dataclass
class Talk:
    """A conversation in the form of chat completions."""

    system: str
    tools: list[dict[str, Any]]
    messages: list[Message] = field(default_factory=list)

    @property
    def all(self) -> list[Message]:
        return [{"role": "system", "content": self.system}, *self.messages]


def same_messages(one: list[Message], other: list[Message]) -> int:
    """How many at the front are the same; of the system message the date does not count."""
    n = 0
    for a, b in zip(one, other):
        if json.dumps(a).replace(NEXT_DATE[:-1], DATE[:-1]) != json.dumps(b).replace(
            NEXT_DATE[:-1], DATE[:-1]
        ):
            break
        n += 1
    return n


# ---- protocols: a request's path and body, and an answer's message with (prompt's tokens, known)

Said = tuple[Message, int, int]


def opencode(talk: Talk) -> tuple[str, dict[str, Any]]:
    """OpenAI's chat completions."""
    functions = [{"type": "function", "function": tool} for tool in talk.tools]
    body = {"messages": talk.all, "tools": functions, "tool_choice": "required"}
    return "v1/chat/completions", {**body, "parallel_tool_calls": False, "max_tokens": 200}


def opencode_said(said: dict[str, Any]) -> Said:
    usage = said["usage"]
    known = usage["prompt_tokens_details"]["cached_tokens"]
    return said["choices"][0]["message"], usage["prompt_tokens"], known


def codex(talk: Talk) -> tuple[str, dict[str, Any]]:
    """OpenAI's responses."""
    items: list[dict[str, Any]] = []
    for one in talk.messages:
        if one["role"] == "tool":
            output = {"call_id": one["tool_call_id"], "output": one["content"]}
            items.append({"type": "function_call_output", **output})
        elif one["role"] == "user":
            part = {"type": "input_text", "text": one["content"]}
            items.append({"type": "message", "role": "user", "content": [part]})
        for call in one.get("tool_calls") or ():
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    functions = [{"type": "function", **tool} for tool in talk.tools]
    body = {"instructions": talk.system, "input": items, "tools": functions, "store": False}
    more = {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    return "v1/responses", {**body, **more}


def codex_said(said: dict[str, Any]) -> Said:
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in said["output"]
        if item["type"] == "function_call"
    ]
    usage = said["usage"]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return message, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def claude_code(talk: Talk) -> tuple[str, dict[str, Any]]:
    """Anthropic's messages."""
    messages: list[Message] = []
    for one in talk.messages:
        if one["role"] == "tool":
            result = {"tool_use_id": one["tool_call_id"], "content": one["content"]}
            messages.append({"role": "user", "content": [{"type": "tool_result", **result}]})
        elif one["role"] == "user":
            block = {"type": "text", "text": one["content"]}
            messages.append({"role": "user", "content": [block]})
        else:
            calls = [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in one["tool_calls"]
            ]
            messages.append({"role": "assistant", "content": calls})
    mark = {"cache_control": {"type": "ephemeral"}}
    functions = [
        {"name": x["name"], "description": x["description"], "input_schema": x["parameters"]}
        for x in talk.tools
    ]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {"messages": messages, "tools": functions, "tool_choice": choice, "max_tokens": 200}
    return "v1/messages", {**body, "system": [{"type": "text", "text": talk.system, **mark}]}


def claude_code_said(said: dict[str, Any]) -> Said:
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in said["content"]
        if block["type"] == "tool_use"
    ]
    usage = said["usage"]
    known = usage["cache_read_input_tokens"]
    n = known + usage["input_tokens"] + usage["cache_creation_input_tokens"]
    return {"role": "assistant", "content": None, "tool_calls": calls}, n, known


AGENTS = {
    "Claude Code": (claude_code, claude_code_said),
    "Codex": (codex, codex_said),
    "OpenCode": (opencode, opencode_said),
}


# ---- a session


@dataclass(frozen=True)
class Step:
    """One request. n_new: tokens of its prompt that no request before it had. Answers count as new:
    a model without sense writes calls with blanks that no client keeps.
    """

    name: str
    n_prompt: int
    n_new: int
    n_read: int


class Session:
    """What one agent asks. restart: ends the server and starts it again, returns its address;
    scale: of all numbers of tokens; new: what is new in each request, for a server that does not
    count it.
    """

    def __init__(
        self,
        agent: str,
        url: str,
        restart: Callable[[], str],
        scale: float,
        new: Iterable[int] = (),
    ) -> None:
        self._body, self._said = AGENTS[agent]
        self._url, self._restart, self._scale = url, restart, scale
        self._before: list[list[Message]] = []
        self._tools = tools(self._n(N_SYSTEM) // 2)
        self._new = iter(new)
        self._client = httpx.Client(timeout=PATIENCE)

    def _n(self, n: int) -> int:
        return max(int(n * self._scale), 10)

    def steps(self) -> Iterator[Step]:
        """All requests."""
        system = DATE + text(self._n(N_SYSTEM) // 2, 7)
        main = self._talk(system, 1)
        for i, n in enumerate(N_RESULTS):
            name = f"turn {i + 1}"
            if i == BRANCHED:
                for k in range(2):
                    yield from self._sub_agent(system, k)
                name += ", behind sub-agents"
            if i == BRANCHED + 2:
                self._edit(main)
                name += ", old result cleared away"
            if i == BRANCHED + 4:
                main.system = main.system.replace(DATE, NEXT_DATE)
                name += ", another date at the front"
            if i == BRANCHED + 6:
                self._url = self._restart()
                name += ", behind a restart"
            if i == COMPACTED:
                main.messages = [{"role": "user", "content": text(self._n(N_SUMMARY), 5)}]
                name += ", history is a summary"
            yield self._asked(name, main)
            self._answer(main, text(self._n(n), 100 + i))
        self._client.close()

    def _talk(self, system: str, seed: int) -> Talk:
        task = {"role": "user", "content": text(self._n(N_TASK), seed)}
        return Talk(system, self._tools, [task])

    def _sub_agent(self, system: str, k: int) -> Iterator[Step]:
        talk = self._talk(system, 20 + k)
        for i in range(3):
            yield self._asked(f"sub-agent {k + 1}, turn {i + 1}", talk)
            self._answer(talk, text(self._n(1000), 200 + 10 * k + i))

    def _edit(self, talk: Talk) -> None:
        """An old result is cleared away, as agents do to make room."""
        results = [one for one in talk.messages if one["role"] == "tool"]
        results[EDITED]["content"] = "cleared"

    def _answer(self, talk: Talk, result: str) -> None:
        said = talk.messages[-1]
        if not said.get("tool_calls"):  # a server that did not hold the model to one
            said |= {"content": None, "tool_calls": [CALL]}
        call = said["tool_calls"][0]
        talk.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def _asked(self, name: str, talk: Talk) -> Step:
        n_new = next(self._new, -1)
        if n_new < 0:
            n_new = self._count(talk, talk.all) - self._n_known(talk)
        path, body = self._body(talk)
        reply = self._client.post(f"{self._url}/{path}", json={**body, "model": "x"})
        message, n, n_cached = self._said(reply.raise_for_status().json())
        self._before.append(json.loads(json.dumps(talk.all)))
        talk.messages.append(message)
        return Step(name, n, n_new, n - n_cached)

    def _n_known(self, talk: Talk) -> int:
        n = max((same_messages(one, talk.all) for one in self._before), default=0)
        return self._count(talk, talk.all[:n]) if n else 0

    def _count(self, talk: Talk, messages: list[Message]) -> int:
        functions = [{"type": "function", "function": tool} for tool in talk.tools]
        body = {"messages": messages, "tools": functions}
        reply = self._client.post(f"{self._url}/v1/chat/completions/input_tokens", json=body)
        return int(reply.raise_for_status().json()["input_tokens"])


# ---- a hybrid model that can be talked to


def with_words(path: Path, target: Path, n_ctx: int) -> Path:
    """A model of `tests.archs` with the vocabulary of tests/models.py and a context of n_ctx."""
    reader = gguf.GGUFReader(str(path))
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(str(target), arch)
    left_out = ("GGUF.", "general.", "tokenizer.", f"{arch}.vocab_size", f"{arch}.context_length")
    for name, one in reader.fields.items():
        if not name.startswith(left_out) and one.contents() not in ([], None):
            inner = one.types[1] if len(one.types) > 1 else None
            writer.add_key_value(name, one.contents(), one.types[0], inner)
    writer.add_context_length(n_ctx)
    writer.add_vocab_size(models.N_VOCAB)
    models.add_tokenizer(writer)
    rng = np.random.default_rng(1)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name in ("token_embd.weight", "output.weight"):
            data = rng.standard_normal((models.N_VOCAB, data.shape[1])).astype(np.float32)
        writer.add_tensor(tensor.name, np.array(data), raw_dtype=tensor.tensor_type)
    models.finish(writer)
    return target
