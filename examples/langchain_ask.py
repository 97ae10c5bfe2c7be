"""Questions about one document, through LangChain. The document is read once.

pip install langchain-openai
edgekv serve -m model.gguf --kv-ratio 0.2 -c 32768
python examples/langchain_ask.py report.txt "Who wrote it?" "What does it say about costs?"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_openai import ChatOpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask about a document, through LangChain.")
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1", help="of the server")
    parser.add_argument("--key", default="none", help="what edgekv serve got as --api-key")
    parser.add_argument("document", type=Path)
    parser.add_argument("question", nargs="+")
    given = parser.parse_args()
    # Any name of a model will do: the server has one. A long document may take minutes to read.
    model = ChatOpenAI(
        base_url=given.url,
        api_key=given.key,
        model="any",
        temperature=0,
        max_completion_tokens=256,
        stream_usage=True,
        timeout=1800,
        max_retries=0,
    )
    document = given.document.read_text(encoding="utf-8")
    for question in given.question:
        print(f"> {question}")
        ask(model, document, question)


def ask(model: ChatOpenAI, document: str, question: str) -> None:
    """Print the answer while it is written, and how many tokens were not read again for it."""
    # The server compresses each part but the last by itself. So only the question is new to it
    # when the same document comes again.
    parts = [{"type": "text", "text": document}, {"type": "text", "text": question}]
    whole = AIMessageChunk("")
    for chunk in model.stream([HumanMessage(parts)]):
        print(chunk.text, end="", flush=True)
        whole += chunk
    usage = whole.usage_metadata or {}
    known = usage.get("input_token_details", {}).get("cache_read", 0)
    print(f"\n({usage.get('input_tokens', 0)} tokens, {known} of them known before)")


if __name__ == "__main__":
    main()
