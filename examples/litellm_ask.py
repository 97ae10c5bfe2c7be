"""Questions about one document, through litellm, by three protocols of the server.

pip install litellm
edgekv serve -m model.gguf --kv-ratio 0.2 -c 32768
python examples/litellm_ask.py report.txt "Who wrote it?"

Programs that are built on litellm take the same names: `openai/any` with the address and /v1,
`ollama_chat/any` and `anthropic/any` with the address alone.

No test of the project's installs litellm, which brings 250 MB. Checked by hand with version
1.110.2: `pip install litellm` into an environment of its own.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download when it is imported

import litellm  # noqa: E402

litellm.suppress_debug_info = True  # it has no prices of this model
PATHS = {"openai": "/v1", "ollama_chat": "", "anthropic": ""}
"""What each protocol has behind the server's address."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask about a document, through litellm.")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="of the server")
    parser.add_argument("--key", default="none", help="what edgekv serve got as --api-key")
    parser.add_argument("document", type=Path)
    parser.add_argument("question")
    given = parser.parse_args()
    parts = [given.document.read_text(encoding="utf-8"), given.question]
    content = [{"type": "text", "text": part} for part in parts]
    for protocol, path in PATHS.items():
        print(f"> {protocol}: {given.question}")
        ask(
            model=f"{protocol}/any",
            api_base=given.url + path,
            api_key=given.key,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=64,
            timeout=1800,
            num_retries=0,
        )


def ask(**request: object) -> None:
    """Print the answer while it is written, and how many tokens were not read again for it."""
    chunks = []
    options = {"include_usage": True}
    for chunk in litellm.completion(**request, stream=True, stream_options=options):
        for choice in chunk.choices:  # the last one has only the usage
            print(choice.delta.content or "", end="", flush=True)
        chunks.append(chunk)
    usage = litellm.stream_chunk_builder(chunks).usage
    known = getattr(usage.prompt_tokens_details, "cached_tokens", None) or 0
    print(f"\n({usage.prompt_tokens} tokens, {known} of them known before)")


if __name__ == "__main__":
    main()
