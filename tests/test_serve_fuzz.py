"""Malformed requests, made from the server's own description of itself: none is a fault of the
server, and it goes on answering.

Seeded: a request that fails is named by its number, and is the same every time. EDGEKV_FUZZ is how
many there are, EDGEKV_FUZZ_FROM the first one's number; `tests/fuzz.py` makes many.
"""

from __future__ import annotations

import json
import logging
import os
import random
from copy import deepcopy
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from edgekv.serve.options import ServeOptions
from tests.serving import PATIENCE, serving

N_REQUESTS = int(os.environ.get("EDGEKV_FUZZ", "100"))
FIRST = int(os.environ.get("EDGEKV_FUZZ_FROM", "0"))
# its text does not match the server's --ignore-prefix: another conversation's may stand in for that
FINE = {"model": "m", "messages": [{"role": "user", "content": "rain"}], "max_tokens": 6}
FINE |= {"temperature": 0}
CACHE: dict[str, Any] = dict(kv_ratio=0.3, kv_method="snapkv", kv_min_tokens=16)
NUMBERS = (
    10**9,
    0,
    -1,
    1,
    2,
    0.5,
    -0.0,
    1e-320,
    1e308,
    -1e308,
    2**31,
    -(2**31) - 1,
    2**32,
    2**64,
    10**400,
)
TEXTS = (
    "",
    "a",
    "hello",
    "the rain",
    "\0",
    "\ud800",
    "a{1,999999999}",
    "\u202e",
    "9" * 5000,
    "\U0001f600",
    "none",
)
TEXTS += ("user", "assistant", "system", "tool", "developer", "required", "auto", "null", "-1", "7")
TEXTS += ("{", "{}", "[1]", '{"a": 1}', "root ::= root", 'root ::= "a"', "root ::= [", "<think>")
TEXTS += ('root ::= "a"{1,999999999}', "root ::= (" * 300, "[" * 100_000, "^(a+)+$", "http://a/b")
TEXTS += ("text", "image_url", "function", "tool_use", "tool_result", "thinking", "input_text")
TEXTS += ("message", "function_call", "function_call_output", "reasoning", "json_schema")
TEXTS += ("object", "array", "string", "integer", "#", "#/$defs/a", "#/", "input_image", "any")
KEYS = ("type", "text", "role", "content", "function", "name", "arguments", "parameters", "schema")
KEYS += (
    "tool_calls",
    "id",
    "call_id",
    "input",
    "output",
    "tool_use_id",
    "image_url",
    "url",
    "$ref",
)
KEYS += ("properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "pattern")
KEYS += ("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "format", "$defs")
KEYS += ("additionalProperties", "prefixItems", "budget_tokens", "summary", "disable", "a", "")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^[a-z]{1,4}$"},
        "b": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1, "maxItems": 3},
        "c": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"const": "c"}]},
    },
    "required": ["a"],
    "$defs": {"x": {"enum": ["p", 1, None]}},
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "d"},
]
DRAWN = {"temperature": 0.5, "seed": 1, "logit_bias": {"7": 1}, "repeat_penalty": 1.1}
MESSAGES: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"text": "b"}]}]},
    ],
    "system": [{"type": "text", "text": "a"}],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
}
SEEDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": CHAT,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"a": 1},
        **DRAWN,
    },
    "/v1/completions": {"prompt": ["a", "b"], "logprobs": 1, "stop": ["x"], **DRAWN},
    "/completion": {"prompt": "a", "json_schema": SCHEMA, "n_probs": 2, **DRAWN},
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "b"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {**MESSAGES, "max_tokens": 2, "stop_sequences": ["x"]},
    "/v1/messages/count_tokens": MESSAGES,
    "/slots/0": {"filename": "hello"},
    "/apply-template": {"messages": CHAT, "tools": [{"type": "function", "function": FUNCTION}]},
}
"""Requests that are fine, by their path."""


PLACES = ("a", "0", "0", "1", "-1", "9" * 5000, "%00", "%ff", "..%2f", "a" * 3000)
QUERIES = (
    "save",
    "restore",
    "erase",
    "",
    "0",
    "1",
    "-1",
    "9" * 5000,
    "a",
    "\0",
    "\ud800",
    "é",
    "1.5",
)
QUERIES += ("{handle}",)


def anything(rng: random.Random, depth: int = 3) -> Any:
    """Some JSON."""
    kind = rng.randrange(8 if depth else 4)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind < 4:
        return rng.choice([None, True, False, *NUMBERS])
    if kind == 4:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): anything(rng, depth - 1) for _ in range(rng.randrange(6))}


def some(schema: dict[str, Any], whole: dict[str, Any], rng: random.Random) -> Any:
    """A value that a schema allows, and sometimes another."""
    if rng.random() < 0.03:
        return anything(rng)
    if "$ref" in schema:
        return some(whole["components"]["schemas"][schema["$ref"].split("/")[-1]], whole, rng)
    if "anyOf" in schema:
        return some(rng.choice(schema["anyOf"]), whole, rng)
    if "const" in schema or "enum" in schema:
        return rng.choice(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object" if "properties" in schema:
            needed = schema.get("required", ())
            return {
                name: some(one, whole, rng)
                for name, one in schema["properties"].items()
                if rng.random() < (0.99 if name in needed else 0.15)
            }
        case "object":
            values = schema.get("additionalProperties")
            one = (lambda: some(values, whole, rng)) if isinstance(values, dict) else None
            return {
                rng.choice(KEYS + TEXTS): one() if one else anything(rng)
                for _ in range(rng.randrange(6))
            }
        case "array":
            items = schema.get("items") or {}
            return [some(items, whole, rng) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        case "string":
            return rng.choice(TEXTS)
        case "integer" | "number" as kind:
            usual = (0, 1, 2) if kind == "integer" else (0, 0.5, 1)
            return rng.choice(NUMBERS if rng.random() < 0.2 else usual)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return anything(rng)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in some JSON."""
    if not isinstance(value, (dict, list)):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [one for key in keys for one in [(value, key), *places(value[key])]]


def changed(value: Any, rng: random.Random) -> Any:
    """A request that is fine but for one or two places."""
    value = deepcopy(value)
    for _ in range(rng.choice([1, 1, 2])):
        where, key = rng.choice(places(value))
        if rng.random() < 0.15 and isinstance(where, dict):
            where[rng.choice(KEYS)] = where.pop(key)
        else:
            where[key] = rng.choice([rng.choice(TEXTS), rng.choice(NUMBERS), anything(rng), [], {}])
    return value


def bytes_of(body: Any, rng: random.Random) -> bytes:
    """JSON, of which one in ten is damaged."""
    data = json.dumps(body).encode()
    match rng.randrange(40):
        case 0:
            return data[: rng.randrange(len(data) + 1)]
        case 1:
            return data.replace(b'"', b"\xff", 1)
        case 2:
            return data.replace(b"null", b"NaN").replace(b"1", b"1e999")
        case 3:
            return b"[" * 100_000
    return data


def request_of(description: dict[str, Any], number: int) -> tuple[str, str, bytes | None]:
    """(method, path, body) of a request by its number."""
    rng = random.Random(number)
    asks = [(m, p, o) for p, ways in description["paths"].items() for m, o in ways.items()]
    posts = [one for one in asks if "requestBody" in one[2]]
    method, path, what = rng.choice(posts if rng.random() < 0.95 else asks)
    for name in ("name", "id"):
        path = path.replace(f"{{{name}}}", rng.choice(PLACES))
    asked = {
        one["name"]: rng.choice(QUERIES)
        for one in what.get("parameters", ())
        if one["in"] == "query" and rng.random() < 0.9
    }
    path += f"?{urlencode(asked, errors='replace')}" if asked else ""
    if "requestBody" not in what:
        return method, path, None
    if path in SEEDS and rng.random() < 0.7:
        return method, path, bytes_of(changed(SEEDS[path], rng), rng)
    schema = what["requestBody"]["content"]["application/json"]["schema"]
    return method, path, bytes_of(some(schema, description, rng), rng)


@pytest.fixture(scope="module", params=[{}, CACHE], ids=["whole", "compressed"])
def server(request, tiny, tmp_path_factory):
    options = ServeOptions(
        max_tokens=2,
        max_request=1 << 20,
        metrics=True,
        slot_save_path=str(tmp_path_factory.mktemp("slots")),
        ignore_prefix="(a|hello|the )+",
    )
    with serving(tiny("llama-gqa"), options, n_ctx=1024, **request.param) as (url, _):
        yield url


class Faults(logging.Handler):
    """What was logged with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.said.append(self.format(record))


@pytest.fixture
def faults():
    handler, loggers = Faults(), [logging.getLogger(name) for name in ("", "uvicorn")]
    for logger in loggers:  # uvicorn's go no further than itself
        logger.addHandler(handler)
    yield handler.said
    for logger in loggers:
        logger.removeHandler(handler)


def test_malformed_requests_are_no_fault_of_the_server(server, faults):
    failed, statuses = [], set()
    with httpx.Client(base_url=server, timeout=PATIENCE) as client:
        first = client.post("/v1/chat/completions", json=FINE).json()
        before, handle = first["choices"], first["kv"]["conversation"]
        description = client.get("/openapi.json").json()
        for number in range(FIRST, FIRST + N_REQUESTS):
            method, path, body = request_of(description, number)
            path = path.replace("%7Bhandle%7D", handle)
            try:
                answer = client.request(method, path, content=body)
            except httpx.HTTPError as error:
                failed.append((number, path, repr(error), body))
                continue
            statuses.add(answer.status_code)
            if answer.status_code == 500 or "the server has a fault" in answer.text:
                failed.append((number, path, answer.text[:200], body))
            elif answer.status_code >= 400 and not answer.text.isprintable():
                failed.append((number, path, f"not one line: {answer.text[:200]}", body))
        assert not failed, "\n".join(str(x)[:1500] for x in failed)
        assert not faults, "\n".join(faults)[:9000]
        assert {200, 400} <= statuses, "the requests reach all that is there"
        assert client.post("/v1/chat/completions", json=FINE).json()["choices"] == before


TOOL = {"type": "function", "function": {"name": "f"}}


def called(call: Any) -> dict[str, Any]:
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "b"}]
    return {"messages": FINE["messages"] + turns}


def asks_for(**schema: Any) -> dict[str, Any]:
    return {"prompt": "a", "json_schema": schema}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {**FINE, "logit_bias": {"9" * 5000: 1}}, 200),
        ("/v1/chat/completions", called({"function": 5}), 400),
        ("/v1/chat/completions", called({"function": "abc"}), 400),
        ("/v1/chat/completions", {**called({"a": 1}), "tools": [TOOL], "max_tokens": 1}, 400),
        ("/apply-template", called({"function": [[]]}), 400),
        ("/v1/messages", {**FINE, "tool_choice": {"type": {}}}, 400),
        ("/completion", asks_for(type="string", minLength=10**9), 400),
        ("/completion", asks_for(type="string", maxLength=10**9), 400),
        ("/completion", asks_for(type="array", items={"type": "null"}, minItems=10**9), 400),
        ("/completion", asks_for(type="string", pattern="^a{1000000000}$"), 400),
        ("/completion", asks_for(type="string", pattern="^(ab){1,1000000000}$"), 400),
        ("/completion", asks_for(type="string", minLength=2, maxLength=9), 200),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_at_once(server, path, body, status):
    answer = httpx.post(server + path, json=body, timeout=10)
    assert answer.status_code == status, answer.text
