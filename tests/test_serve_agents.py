"""Requests as coding agents and web interfaces send them, written by hand from their public
protocols: each is answered, and calls come back.
"""

from __future__ import annotations

import json

import pytest

from edgekv.serve.options import ServeOptions
from tests.chats import TEMPLATE
from tests.serving import post, serving

READ = {
    "type": "object",
    "properties": {
        "file_path": {"type": "string", "description": "The absolute path"},
        "offset": {"type": "integer", "minimum": 0, "title": "Offset"},
    },
    "required": ["file_path"],
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}
SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "timeout_ms": {"type": "number", "exclusiveMinimum": 0},
    },
    "required": ["command"],
    "additionalProperties": False,
}
SYSTEM = "You are a coding agent. " * 20


@pytest.fixture(scope="module")
def url(tiny):
    options = ServeOptions(alias="tiny", chat_template=TEMPLATE)
    with serving(tiny("llama-gqa"), options, n_ctx=8192) as (url, _):
        yield url


def events(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_claude_code(url):
    """Blocks with cache marks, a system message in the middle, tools of Anthropic's own servers."""
    called = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False}
    result["content"] = [{"type": "text", "text": "1\tdef f(): pass"}]
    body = {
        "model": "claude-x",
        "max_tokens": 120,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
            {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Read /a, please."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "I read."}, called]},
            {"role": "user", "content": [result]},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Once more."},
        ],
        "tools": [
            {"name": "Read", "description": "Reads a file", "input_schema": READ},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            {"name": "Ping", "description": "Takes nothing"},
        ],
        "tool_choice": {"type": "tool", "name": "Read"},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "x"},
        "temperature": 1,
        "context_management": {"edits": []},
    }
    answer = post(f"{url}/v1/messages?beta=true", json=body)
    assert answer.status_code == 200, answer.text
    found = events(answer.text)
    blocks = [x["content_block"] for x in found if x["type"] == "content_block_start"]
    assert [(x["type"], x["name"]) for x in blocks] == [("tool_use", "Read")]
    assert any(x["type"] == "content_block_delta" for x in found)


def test_codex(url):
    """/v1/responses with tools that are no functions, and their items in the history."""
    body = {
        "model": "gpt-x",
        "instructions": SYSTEM,
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "d"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ls"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "abc"},
            {
                "type": "function_call",
                "name": "shell",
                "call_id": "c1",
                "arguments": '{"command":["l',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "failed"},
            {
                "type": "custom_tool_call",
                "name": "apply_patch",
                "call_id": "c2",
                "input": "*** Begin",
            },
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
            {"type": "local_shell_call", "call_id": "c3", "action": {"command": ["ls"]}},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        ],
        "tools": [
            {"type": "function", "name": "shell", "strict": False, "parameters": SHELL},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark"},
            },
            {"type": "web_search"},
            {"type": "local_shell"},
            {"type": "namespace", "name": "mcp", "tools": []},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
        "max_output_tokens": 60,
    }
    answer = post(f"{url}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert events(answer.text)[-1]["type"] in ("response.completed", "response.incomplete")
    body |= {"tool_choice": {"type": "function", "name": "shell"}, "max_output_tokens": 300}
    found = events(post(f"{url}/v1/responses", json=body).text)
    begun = [x["item"] for x in found if x["type"] == "response.output_item.added"]
    assert [(x["type"], x["name"]) for x in begun] == [("function_call", "shell")]
    assert any(x["type"] == "response.function_call_arguments.delta" for x in found)


@pytest.mark.parametrize("client", ["opencode", "open-webui"])
def test_opencode_and_open_webui(url, client):
    """/v1/chat/completions with parts, a refusal, a tool without a type, and further options."""
    function = {"name": "read", "description": "Reads", "parameters": READ}
    body = {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [{"type": "text", "text": "Read /a"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "read", "arguments": '{"f'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "nothing"}]},
            {"role": "user", "content": "Again."},
        ],
        "tools": [{"function": function}]
        if client == "opencode"
        else [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "user": "x",
        "metadata": {"chat_id": "y"},
    }
    answer = post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = [choice for x in events(answer.text) for choice in x["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "read" and calls[0]["id"]
    assert events(answer.text)[-1]["usage"]["completion_tokens"] > 0
