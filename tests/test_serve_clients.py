"""A library that programs ask models with; it sends and reads what the protocols' own clients do
not.
"""

from __future__ import annotations

import asyncio

import anthropic
import openai
import pytest
from pydantic import BaseModel

from edgekv.serve.options import ServeOptions
from tests.chats import TEMPLATE
from tests.serving import serving

ai = pytest.importorskip("pydantic_ai")

INSTRUCTIONS = "You read reports. " * 20
SETTINGS = {"temperature": 0, "max_tokens": 300}
PROFILE = {"supports_json_schema_output": True}
"""Of a name that is not known."""


class Costs(BaseModel):
    """What the model can write in few letters."""

    are_high: bool


@pytest.fixture(scope="module")
def url(tiny):
    options = ServeOptions(alias="tiny", chat_template=TEMPLATE)
    with serving(tiny("llama-gqa"), options, n_ctx=8192) as (url, _):
        yield url


def openai_client(url):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def anthropic_client(url):
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


def chat(client):
    from pydantic_ai.models.openai import OpenAIChatModel as Model
    from pydantic_ai.providers.openai import OpenAIProvider

    return Model("any", provider=OpenAIProvider(openai_client=client), profile=PROFILE)


def responses(client):
    from pydantic_ai.models.openai import OpenAIResponsesModel as Model
    from pydantic_ai.providers.openai import OpenAIProvider

    return Model("any", provider=OpenAIProvider(openai_client=client), profile=PROFILE)


def ollama(client):
    from pydantic_ai.models.ollama import OllamaModel as Model
    from pydantic_ai.providers.ollama import OllamaProvider

    return Model("any", provider=OllamaProvider(openai_client=client), profile=PROFILE)


def messages(client):
    from pydantic_ai.models.anthropic import AnthropicModel as Model
    from pydantic_ai.providers.anthropic import AnthropicProvider

    return Model("any", provider=AnthropicProvider(anthropic_client=client), profile=PROFILE)


@pytest.mark.parametrize("protocol", [chat, responses, ollama, messages])
def test_pydantic_ai(url, protocol):
    """A conversation goes on without being read again, a stream says what the whole answer says,
    answers have a form, and the result of a call is read.
    """

    async def all_of_it():
        make = anthropic_client if protocol is messages else openai_client
        async with make(url) as client:
            await talk(protocol(client))

    asyncio.run(all_of_it())


async def talk(model):
    agent = ai.Agent(model, instructions=INSTRUCTIONS, model_settings=SETTINGS)
    done = await agent.run("abc def")
    more = await agent.run("ghi", message_history=done.all_messages())
    assert more.usage.cache_read_tokens >= done.usage.input_tokens > 200
    async with agent.run_stream("abc def") as stream:
        assert await stream.get_output() == done.output

    for form in (Costs, ai.NativeOutput(Costs)):  # a tool's arguments, a schema of the text
        found = await agent.run("abc def", output_type=form)
        assert isinstance(found.output, Costs)

    call, result = ("read", {"path": "/a"}, "c1"), ("read", "nothing", "c1")
    history = [
        *done.all_messages(),
        ai.ModelRequest.user_text_prompt("read /a"),
        ai.ModelResponse([ai.ToolCallPart(*call)]),
        ai.ModelRequest([ai.ToolReturnPart(*result)]),
    ]
    assert (await agent.run(message_history=history)).output
