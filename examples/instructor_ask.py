"""Values of a document in the form that a class has, through instructor.

pip install instructor
edgekv serve -m model.gguf --kv-ratio 0.2 -c 32768
python examples/instructor_ask.py report.txt "What does it say about costs?"

No test of the project's installs instructor: it wants an older openai, jiter and rich than others.
Checked by hand with version 1.17.0: `pip install instructor` into an environment of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import instructor
import openai
from pydantic import BaseModel, Field


class Costs(BaseModel):
    """What a document says about costs."""

    are_high: bool
    level: int = Field(ge=1, le=5)


def main() -> None:
    parser = argparse.ArgumentParser(description="Read a document's values, through instructor.")
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1", help="of the server")
    parser.add_argument("--key", default="none", help="what edgekv serve got as --api-key")
    parser.add_argument("document", type=Path)
    parser.add_argument("question")
    given = parser.parse_args()
    client = openai.OpenAI(base_url=given.url, api_key=given.key, timeout=1800, max_retries=0)
    parts = [given.document.read_text(encoding="utf-8"), given.question]
    # The server holds the model to the schema either way: as arguments of a tool, or as the answer.
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        found, reply = instructor.from_openai(client, mode=mode).create_with_completion(
            model="any",
            messages=[{"role": "user", "content": [{"type": "text", "text": x} for x in parts]}],
            response_model=Costs,
            temperature=0,
            max_completion_tokens=256,
            max_retries=0,
        )
        usage = reply.usage
        known = usage.prompt_tokens_details.cached_tokens
        print(f"{mode.name}: {found!r}")
        print(f"({usage.prompt_tokens} tokens, {known} of them known before)")


if __name__ == "__main__":
    main()
