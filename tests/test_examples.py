"""The examples that talk to a server, with the real packages, against `edgekv serve`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import PATIENCE, until

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TALKING = ("langchain_ask.py", "llm.md", "agent.md")
USUAL = "http://127.0.0.1:8080"
"""The address that the examples name."""
WORDS = " ".join(f"The costs of year {year} were high." for year in range(1980, 2000))

pytestmark = [
    pytest.mark.slow,  # each client takes seconds to start
    pytest.mark.skipif(os.name == "nt", reason="the examples are for a shell of Unix"),
]


def text_of(name: str) -> str:
    return (EXAMPLES / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with two documents, which is the working and the home folder of all commands."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "report.txt").write_text(f"A report. {WORDS}", encoding="utf-8")
    (folder / "instructions.txt").write_text(f"You write code. {WORDS}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def environment(home) -> dict[str, str]:
    """Nothing of the user's: no keys, no settings, no folder of llm's."""
    prefixes = ("LLM_", "LLAMA_", "OPENAI_", "ANTHROPIC_", "LANGCHAIN_", "LANGSMITH_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    places = {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_DATA_HOME": str(home / "data"),
        "LLM_USER_PATH": str(home / "llm"),
        # The demo model's package is a plugin of llm whose own needs are not installed.
        "LLM_LOAD_PLUGINS": "",
    }
    return {**kept, **places, "PATH": path}


@pytest.fixture(scope="module")
def server(tiny, home, environment) -> Iterator[str]:
    """The address of a server that is started as all examples say, but for its port."""
    (line,) = {
        line.strip()
        for name in TALKING
        for line in re.findall(r"^    (edgekv serve .*)$", text_of(name), re.MULTILINE)
    }
    words = shlex.split(line.replace("model.gguf", str(tiny("llama-32k"))))[1:]
    command = [sys.executable, "-m", "edgekv", *words, "--port", "0", "--kv-method", "snapkv"]
    said = home / "server.txt"
    with said.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file)

    def address() -> list[str]:
        assert process.poll() is None, said.read_text(encoding="utf-8")
        return re.findall(r" at (http://\S+)$", said.read_text(encoding="utf-8"), re.MULTILINE)

    try:
        until(address)
        yield address()[0]
    finally:
        process.terminate()
        process.wait(PATIENCE)


def run(command: list[str], home: Path, environment: dict[str, str]) -> str:
    """What a command prints."""
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=5 * PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_page(name: str, server: str, home: Path, environment: dict[str, str]) -> str:
    """What the commands of a page print, all in one shell, in their order."""
    commands = re.findall(r"^```sh\n(.*?)^```$", text_of(name), re.MULTILINE | re.DOTALL)
    script = "\n".join(["set -eu", *commands])
    assert USUAL in script
    return run(["sh", "-c", script.replace(USUAL, server)], home, environment)


def known_before(printed: str) -> list[tuple[int, int]]:
    """(tokens, of them known before) of each answer."""
    found = re.findall(r"(\d+) tokens, (\d+) of them known before", printed)
    return [(int(n), int(known)) for n, known in found]


def test_langchain_reads_a_document_once(server, home, environment):
    pytest.importorskip("langchain_openai")
    script = str(EXAMPLES / "langchain_ask.py")
    questions = ["Who wrote it?", "What does it say about costs?"]
    command = [sys.executable, script, "--url", f"{server}/v1", "report.txt", *questions]
    printed = run(command, home, environment)
    (n, _), (_, known) = known_before(printed)
    assert n > 200 and known > 0.9 * n
    assert re.findall(r"^> (.*)$", printed, re.MULTILINE) == questions
    assert re.search(r"^> .*\n\S", printed, re.MULTILINE)  # an answer


def test_llm_reads_a_document_once(server, home, environment):
    pytest.importorskip("llm")
    printed = run_page("llm.md", server, home, environment)
    (usage,) = re.findall(r"^Token usage: ([\d,]+) input.*?(\{.*\})$", printed, re.MULTILINE)
    n = int(usage[0].replace(",", ""))
    (known,) = re.findall(r'"cached_tokens": (\d+)', usage[1])
    assert n > 200 and int(known) > 0.9 * n
    assert re.search(r'\{\s*"costly"\s*:\s*(true|false)\s*\}', printed)
    assert (home / "llm" / "extra-openai-models.yaml").exists()


def test_clients_of_both_protocols_read_the_instructions_of_an_agent_once(
    server, home, environment
):
    printed = run_page("agent.md", server, home, environment)
    answers = known_before(printed)
    assert len(answers) == 4
    for n, known in (answers[1], answers[3]):
        assert n > 200 and known > 0.9 * n
