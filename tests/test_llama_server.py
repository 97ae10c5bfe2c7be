"""llama-server's own options: taken, or answered with one line that says what to write."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from edgekv import commands
from tests.test_serve_worker import said

MISSING = "/no/model"
LOOK = {"chat": [], "look": ["--kv-ratio", "0.2", "-o", "/tmp/page.html", __file__]}


def outcome(*words: str, command: str = "serve") -> str:
    """The line that ends a command whose model is not there."""
    words = (command, "-m", MISSING, *words)
    done = CliRunner().invoke(commands.main, list(words), prog_name="edgekv")
    assert done.exit_code == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "--jinja",
        "--no-warmup",
        "--no-webui",
        "-cb",
        "-nocb",
        "--cont-batching",
        "--no-context-shift",
        "--threads-http 4",
        "--timeout 600",
        "-to 600",
        "--log-disable",
        "--reasoning-budget -1",
        "--chat-template chatml",
        "--cache-reuse 256",
        "-bs",
        "--no-perf",
        "-fa",
        "-fa on",
        "-fa --jinja -c 512 -cb --no-webui",
    ],
)
def test_what_changes_nothing_is_taken(words):
    assert MISSING in outcome("--port", "0", *words.split())


@pytest.mark.parametrize("command", ["chat", "look"])
def test_flash_attention_without_a_word_is_on(command):
    assert MISSING in outcome("-fa", "-c", "512", *LOOK[command], command=command)


@pytest.mark.parametrize(
    "words, way",
    [
        ("--context-shift", "-c"),
        ("--reasoning-budget 0", "--reasoning off"),
        ("--chat-template llama3", "--chat-template-file"),
        ("--models-preset x.ini", "start a server for each"),
        ("--ssl-key-file key.pem", "proxy"),
        ("--mmproj x.gguf", "leave --mmproj out"),
        ("--sleep-idle-seconds 5", "--keep-alive"),
    ],
)
def test_what_is_done_otherwise_says_how(words, way):
    line = outcome(*words.split())
    assert way in line and MISSING not in line


def test_a_template_is_a_text_a_name_or_a_file(tmp_path):
    text = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (file := tmp_path / "template").write_text(text)
    assert said("--chat-template", text).chat_template == text
    assert said("--chat-template", "chatml").chat_template == "chatml"
    assert said("--chat-template-file", str(file)).chat_template == text


def test_they_are_not_in_the_help():
    done = CliRunner().invoke(commands.main, ["serve", "--help"], prog_name="edgekv")
    assert "--ctx-size" in done.output and "--jinja" not in done.output
