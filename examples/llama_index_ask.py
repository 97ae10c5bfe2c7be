"""Questions about one document, through LlamaIndex, by OpenAI's protocol and by Ollama's.

pip install llama-index-llms-openai-like llama-index-llms-ollama
edgekv serve -m model.gguf --kv-ratio 0.2 -c 32768
python examples/llama_index_ask.py report.txt "Who wrote it?"

No test of the project's installs LlamaIndex: it wants an older openai than others do, and brings
90 MB. Checked by hand with llama-index-core 0.14.25, in an environment of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llama_index.core.llms import LLM, ChatMessage, TextBlock
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask about a document, through LlamaIndex.")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="of the server")
    parser.add_argument("--key", default="none", help="what edgekv serve got as --api-key")
    parser.add_argument("document", type=Path)
    parser.add_argument("question")
    given = parser.parse_args()
    parts = [given.document.read_text(encoding="utf-8"), given.question]
    blocks = [TextBlock(text=part) for part in parts]
    for model in (by_openai(given.url, given.key), by_ollama(given.url, given.key)):
        print(f"> {type(model).__name__}: {given.question}")
        for part in model.stream_chat([ChatMessage(role="user", blocks=blocks)]):
            print(part.delta, end="", flush=True)
        print()


def by_openai(url: str, key: str) -> LLM:
    return OpenAILike(
        api_base=f"{url}/v1",
        api_key=key,
        model="any",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=32768,
        max_tokens=64,
        temperature=0,
        timeout=1800,
        max_retries=0,
    )


def by_ollama(url: str, key: str) -> LLM:
    return Ollama(
        base_url=url,
        model="any",
        # Without a number it asks the server by name, which here is only a placeholder.
        context_window=32768,
        temperature=0,
        request_timeout=1800,
        additional_kwargs={"num_predict": 64},
        headers={"Authorization": f"Bearer {key}"},
    )


if __name__ == "__main__":
    main()
