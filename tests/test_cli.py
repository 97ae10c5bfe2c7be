"""The commands, with a fake at the public seam: what a user types, and what comes out where."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from edgekv import methods
from edgekv.base import folders, text
from edgekv.chat.drafts import Drafting
from edgekv.choice.config import KVConfig
from edgekv.commands import chat, load, options, report, slash, terminal
from edgekv.commands.conversation import Conversation
from edgekv.commands.saved import messages_of
from edgekv.commands.stream import Piece, Stream
from edgekv.commands.wrap import Wrap
from edgekv.documents import plain
from edgekv.errors import BadInput, Unsupported
from edgekv.llama.pack import said
from edgekv.methods.budget import BUDGETS
from edgekv.models import demo
from edgekv_lab.commands.docs import page
from tests.cli import refused
from tests.cli import typed as call
from tests.fakes import FakeLlama

ROOT = Path(__file__).resolve().parent.parent
FIELDS = """
    text model kv_method kv_ratio kv_bytes kv_bytes_used kv_bytes_peak kv_bytes_full
    kv_bytes_limit kv_bytes_reserved kv_bytes_checkpoints kv_bytes_archive kv_bytes_index
    kv_bytes_recalled kv_bytes_draft type_k type_v
    prompt_n kept_n gen_n prefill_ms compress_ms decode_ms prefill_tps decode_tps rss_peak_bytes
""".split()


@pytest.fixture
def fake(monkeypatch):
    """The model that the next command loads; `fake.options` says how."""
    llm = FakeLlama()

    def load_llama(engine, later=None, documents=None):
        llm.options = engine
        llm.kv_set(ratio=engine.kv.ratio)
        return llm

    monkeypatch.setattr(load, "load_llama", load_llama)
    monkeypatch.setattr(load, "end_tokens", lambda llm: [7, 9])
    monkeypatch.setattr(load, "learn", lambda options, *_: llm.learned.append(options.kv.ratio))
    for name in [n for n in os.environ if n.startswith(("LLAMA_ARG_", "EDGEKV_"))]:
        monkeypatch.delenv(name)
    return llm


# ---- help and errors


@pytest.mark.parametrize(
    "args", [["--help"], ["chat", "--help"], ["eval", "needle", "-h"], ["methods"]]
)
def test_help_and_methods_load_no_library(args):
    code = (
        "import sys; sys.argv[0] = 'edgekv'\nfrom edgekv.commands import main\n"
        "try: main()\nfinally: assert 'llama_cpp' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run", "-p", "x"], "-m"),
        (["run", "-m", "no-such"], "no model 'no-such'"),
        (["run", "-m", "m", "-p", " "], "empty"),
        (["run", "-m", "m", "-f", "a", "-"], "not both"),
        (["run", "-m", "m", "-p", "x", "y"], "once"),
        (["run", "-m", "m", "--raw", "-sys", "s", "-p", "x"], "--raw"),
        (["run", "-m", "m", "--no-such"], "--no-such"),
        (["run", "-m", "m", "-p", "x", "-n", "0"], "-1"),
        (["run", "-m", "m", "-p", "x", "-ctk", "q3"], "q4_0"),
        (["run", "-m", "m", "-p", "x", "-fa", "maybe"], "on, off or auto"),
        (["run", "-m", "m", "-p", "x", "-ngl", "many"], "'all'"),
        (["run", "-m", "m", "-p", "x", "--kv-ratio", "20"], "write 0.2 "),
        (["run", "-m", "m", "-p", "x", "--kv-ratio", "0"], "0.2"),
        (["run", "-m", "m", "-p", "x", "--kv-ratio", "-1"], "0.2"),
        (["run", "-m", "m", "-p", "x", "--kv-ratio", "abc"], "0.2"),
        (["run", "-m", "m", "-p", "x", "--kv-method", "magic"], "snapkv"),
        (["run", "-m", "m", "-p", "x", "--kv-budget-mb", "inf"], "--kv-budget-mb"),
        (["run", "-m", "m", "-p", "x", "--kv-sink", "2147483648"], "--kv-sink"),
        (["run", "-m", "m", "-p", "x", "--kv-window", "2147483648"], "--kv-window"),
        (["run", "-m", "m", "-p", "x", "-b", "2147483647"], "--batch-size"),
        (["run", "-m", "m", "-p", "x", "-c", "9" * 20], "--ctx-size"),
        (["run", "-m", "m", "-p", "x", "-t", "2147483647"], "--threads"),
        (["run", "-m", "m", "-p", "x", "-tb", "2147483647"], "--threads-batch"),
        (["run", "-m", "m", "-p", "x", "-ngl", "9" * 20], "'all'"),
        (["run", "-m", "m", "-p", "x", "-s", "9" * 20], "--seed"),
        (["run", "-m", "m", "-p", "x", "-n", "9" * 20], "--predict"),
        (["run", "-m", "m", "-p", "x", "--temp", "nan"], "--temp"),
        (["run", "-m", "m", "-f", "a" * 300], "too long"),
        (["run", "-m", "m", "-f", "~nouser/x"], "~nouser/x"),
        (["run", "-m", "m", "-f", "/dev/zero"], "device"),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(fake, args, says):
    assert says in refused(call(*args))


def test_a_missing_prompt_is_said_with_what_else_there_is(fake, tiny):
    model = str(tiny("llama-gqa"))
    for words in (["-m", model], [model]):
        said = refused(call("run", *words))
        assert "-p TEXT" in said and f"edgekv chat {model}" in said
    assert "edgekv run" in refused(call("chat -m m -p", "a question"))
    assert "edgekv run" in refused(call("chat -m m -f", "a file"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ps", "edgekv serve"),
        ("rm m", "edgekv models"),
        ("stop m", "Ctrl-C"),
        ("ps", "/api/ps"),
        ("stop m", "/models/unload"),
        ("launch claude", "examples/agent.md"),
        ("signin", "accounts"),
        ("create m -f x", "edgekv pack"),
        ("version", "edgekv --version"),
        ("pull qwen3:4b", "ollama pull qwen3:4b"),
    ],
)
def test_ollamas_words_say_what_there_is_instead(line, says):
    assert says in refused(call(line))


def test_ollamas_words_that_mean_the_same(monkeypatch):
    assert call("help").stdout == call("--help").stdout
    assert "'list'" in call("--help").stdout
    assert call("help run").stdout == call("run --help").stdout
    assert "no such" in refused(call("help nonsense")).lower()
    for word, own in (("ls", "list"), ("show", "info")):
        first, second = (call(f"{x} --help").stdout.partition("\n")[2] for x in (word, own))
        assert first == second


def test_what_the_engine_refuses_is_one_line(fake, monkeypatch):
    def load_llama(engine, later=None, documents=None):
        raise Unsupported("no such luck; try another")

    monkeypatch.setattr(load, "load_llama", load_llama)
    for command in (["chat"], ["run", "-p", "x"]):
        assert "no such luck" in refused(call(*command, "-m", "m"))


def test_the_docs_are_the_help():
    assert (ROOT / "docs" / "cli.md").read_text() == page(), (
        "run: python -m edgekv_lab.commands.docs"
    )


# ---- options


def test_defaults_are_llama_cpps(fake):
    assert call("run -m m -p x").exit_code == 0
    assert fake.options == options.EngineOptions(
        model="m",
        ctx_size=0,
        batch_size=2048,
        ubatch_size=512,
        threads=None,
        threads_batch=None,
        gpu_layers=-1,
        flash_attn="auto",
        cache_type_k=None,
        cache_type_v=None,
        seed=-1,
        verbose=False,
        kv=fake.options.kv,
        drafts=Drafting("auto"),
    )
    assert fake.options.kv.arguments() == KVConfig().arguments()
    sampling = {k: v for k, v in fake.calls[0].items() if k != "messages"}
    assert sampling == {
        "max_tokens": None,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "repeat_penalty": 1.0,
        "logit_bias": None,
    }


def test_short_flags_of_several_letters(fake):
    line = (
        "-m m -c 4096 -b 64 -ub 32 -t 2 -tb 3 -ngl 5 -fa off -ctk q8_0 -ctv q4_0 -n 3 -s 7 --temp 0"
        " --top-k 1 --top-p 0.5 --min-p 0.1 --repeat-penalty 1.1 --ignore-eos -sys Hello -v"
        " --kv-ratio 0.2 --kv-budget 64 --kv-budget-mb 1.5 --kv-method streaming --kv-sink 2"
        " --kv-window 8 --kv-min-tokens 16 --kv-hidden disk --kv-tail 99"
    )
    assert call("run", *line.split(), "-p", "x").exit_code == 0
    assert fake.options == options.EngineOptions(
        "m",
        4096,
        64,
        32,
        2,
        3,
        5,
        "off",
        "q8_0",
        "q4_0",
        7,
        True,
        fake.options.kv,
        drafts=fake.options.drafts,
    )
    assert (
        fake.options.kv.arguments()
        == KVConfig(0.2, 64, 1.5, None, "streaming", None, 2, 8, 16, "disk", 99).arguments()
    )
    assert fake.calls[0]["logit_bias"] == {7: float("-inf"), 9: float("-inf")}
    assert fake.calls[0]["max_tokens"] == 3
    assert fake.calls[0]["messages"][0] == {"role": "system", "content": "Hello"}


def test_flag_before_environment_before_default(fake, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_MODEL", "from-env")
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_K", "q8_0")
    monkeypatch.setenv("LLAMA_ARG_FLASH_ATTN", "1")
    monkeypatch.setenv("EDGEKV_KV_RATIO", "0.5")
    monkeypatch.setenv("EDGEKV_KV_MIN_TOKENS", "5")
    assert call("run -p x --kv-ratio 0.25").exit_code == 0
    chosen = fake.options
    assert (
        chosen.model,
        chosen.cache_type_k,
        chosen.flash_attn,
        chosen.kv.ratio,
        chosen.kv.min_tokens,
    ) == ("from-env", "q8_0", "on", 0.25, 5)
    monkeypatch.setenv("EDGEKV_KV_RATIO", "20")
    assert "write 0.2 " in refused(call("run -p x"))


def test_threads():
    assert load.count_threads(3) == 3
    assert 1 <= load.count_threads(None) <= load.count_threads(0)


# ---- run


def test_run_prints_only_the_answer(fake):
    words = "word " * 17 + "what is this"
    result = call("run -m m --kv-ratio 0.5 -p", words)
    assert result.stdout == "WORD WORD WHAT IS THIS\n"
    assert "25 tokens seen, 48 % kept; KV 48 %: 0.0 of 0.0 MiB; wrote" in result.stderr
    assert "\x1b" not in result.stderr


def test_run_json_has_exactly_the_fields(fake):
    result = call("run -m m -p", "one two three", "--json", "--kv-ratio", "0.5")
    answer = json.loads(result.stdout)
    assert list(answer) == FIELDS and result.stderr == ""
    assert answer["text"] == "ONE TWO THREE" and answer["prompt_n"] == 3 and answer["gen_n"] == 3
    assert answer["kv_ratio"] == 0.5 and answer["kept_n"] == 3 and answer["rss_peak_bytes"] > 10**6


def test_an_uncompressed_cache_is_said_once(fake):
    fake.mode, fake.note = "uncompressed", "runs uncompressed: because"
    assert "6 tokens seen, all kept" in call("run -m m -p", "what is this").stderr
    assert "because" in call("run -m m -p x").stderr
    assert call("chat -m m", stdin="one\ntwo\nthree\n").stderr.count("because") == 1


@pytest.mark.parametrize("mode", [[], ["--json"]])
def test_raw_gives_the_prompt_as_it_is(fake, mode):
    assert "A B" in call("run -m m -p", "a b", "--raw", *mode).stdout
    assert fake.calls[0]["prompt"] == "a b" and "messages" not in fake.calls[0]


def test_run_reads_files_and_standard_input(fake, tmp_path):
    (tmp_path / "doc.txt").write_text("a text\n")
    call(f"run -m m -f {tmp_path / 'doc.txt'} -p", "a question")
    call("run -m m -", stdin="piped\n")
    call("run -m m -f - -p", "a question", stdin="piped\n")
    call(f"run -m m -f {tmp_path / 'doc.txt'}", "as with Ollama")
    assert [c["messages"][-1]["content"] for c in fake.calls] == [
        "a text\n\na question",
        "piped",
        "piped\n\na question",
        "a text\n\nas with Ollama",
    ]


def test_a_prompt_too_long_is_one_line(fake):
    assert "1001 tokens" in refused(call("run -m m -p", "x " * 1001))
    assert "1001 tokens" in refused(call("run -m m --json -p", "x " * 1001))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no file"),
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"%PDF\x00\xff", "no text"),
        (b"caf\xe9\x07", "no text"),
    ],
)
def test_files_that_are_no_documents(tmp_path, content, says):
    path = tmp_path / "f.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=says):
        plain.read_document(str(path))
    with pytest.raises(BadInput, match="directory"):
        plain.read_document(str(tmp_path))


def test_what_is_piped_in_goes_in_front_of_the_prompt(fake, tmp_path):
    (tmp_path / "doc.txt").write_text("a text\n")
    call("run -m m -p", "a question", stdin="piped\n")
    call("run -m m", "a question", stdin="piped\n")
    call("run -m m", stdin="piped\n")
    call(f"run -m m -f {tmp_path / 'doc.txt'} -p", "a question", stdin="piped\n")
    call("run -m m -p", "a question", stdin=" \n")
    assert [c["messages"][-1]["content"] for c in fake.calls] == [
        "piped\n\na question",
        "piped\n\na question",
        "piped",
        "a text\n\npiped\n\na question",
        "a question",
    ]


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo terminal")
def test_a_terminal_is_not_waited_for_and_a_pipe_is_with_a_line():
    import pty

    command = [
        *(sys.executable, "-c"),
        CHILD.format(args=["run", "-m", "m", "-p", "a question"], step_s=0),
    ]
    screen, inner = pty.openpty()
    with_pipes = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    done = subprocess.run(command, stdin=inner, timeout=60, **with_pipes)
    os.close(screen)
    os.close(inner)
    assert done.stdout == "A QUESTION\n"
    with subprocess.Popen(command, stdin=subprocess.PIPE, **with_pipes) as process:
        assert "waiting for standard input" in process.stderr.readline()
        assert process.communicate("piped")[0] == "PIPED A QUESTION\n"


@pytest.mark.parametrize("data", ["<p>caf\u00e9 &amp; tea".encode(), b"<p>caf\xe9 &amp; tea"])
def test_all_doors_read_a_document_likewise(fake, tmp_path, data):
    page, plain = tmp_path / "page.html", tmp_path / "plain.txt"
    for path in (page, plain):
        path.write_bytes(data)
    said = [
        call(f"run -m m -f {page}"),
        call("chat -m m", stdin=f"/file {page} caf\u00e9\n"),
        call("run -m m -", stdin=b"<!doctype html>" + data),
        call(f"run -m m -f {plain}"),
    ]
    contents = [c["messages"][-1]["content"] for c in fake.calls]
    assert contents == [
        "caf\u00e9 & tea",
        with_document("caf\u00e9 & tea", "caf\u00e9"),
        "caf\u00e9 & tea",
        "<p>caf\u00e9 &amp; tea",
    ]
    guessed = b"\xe9" in data
    assert all(("is read as Latin-1" in one.stderr) is guessed for one in said)


def test_text_with_a_damaged_place_stays_what_it_is(fake, tmp_path):
    path = tmp_path / "x"
    path.write_bytes("\u00e9\u00e8\u00ea\u00eb na\u00efve".encode() + b" \xff end")
    result = call(f"run -m m -f {path}")
    assert fake.calls[0]["messages"][-1]["content"].endswith("\u00eb na\u00efve \ufffd end")
    assert "1 places that are no UTF-8" in result.stderr


def test_more_than_any_context_holds_is_refused(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(plain, "DOCUMENT_MAX", 2**20)
    with open(tmp_path / "long", "wb") as file:
        file.truncate(2**21)
    assert "1 MiB" in refused(call(f"run -m m -f {tmp_path / 'long'}"))
    assert "1 MiB" in refused(call("run -m m -", stdin="x" * (2**20 + 1)))
    assert "1 MiB" in call("chat -m m", stdin="x" * (2**20 + 1) + "\none\n").stderr


@pytest.mark.skipif(os.name == "nt", reason="needs named pipes")
def test_a_pipe_is_read_where_a_shell_makes_one(fake, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe" in call("chat -m m", stdin=f"/file {tmp_path / 'pipe'}\n").stderr
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=["from a pipe"])
    writer.start()
    assert call(f"run -m m -f {tmp_path / 'pipe'}").stdout == "FROM A PIPE\n"
    writer.join()


@pytest.mark.parametrize(
    "line", ["/file ~nouser", "/file " + "a" * 300, "/file \0", "/file /dev/zero"]
)
def test_a_file_that_cannot_be_is_one_line(fake, line):
    result = call("chat -m m", stdin=f"{line}\none\n")
    assert result.exit_code == 2 and result.stdout == "ONE\n"
    assert "Traceback" not in result.stderr and result.stderr.startswith("edgekv: '")


@pytest.mark.parametrize("base", ["~nouser", "relative", ""])
def test_a_folder_that_cannot_be_is_not_taken(monkeypatch, base):
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, base)
    if sys.platform == "linux":
        assert folders.cache() == Path("~/.cache/edgekv").expanduser()
        assert folders.data() == Path("~/.local/share/edgekv").expanduser()
    assert folders.cache().is_absolute()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full disk")
@pytest.mark.parametrize("args", [["run", "-m", "m", "-p", "one"], ["methods"]])
def test_a_full_disk_is_one_line(args):
    command = [sys.executable, "-c", CHILD.format(args=args, step_s=0)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "No space left" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize(
    "data", ["é\r\nb\n".encode(), "é\nb".encode("utf-8-sig"), "é\nb\n".encode("utf-16")]
)
def test_files_that_are_documents(tmp_path, data):
    (tmp_path / "f").write_bytes(data)
    assert plain.read_document(str(tmp_path / "f")) == "é\nb"


# ---- chat, piped


def test_each_piped_line_is_a_turn(fake):
    result = call("chat -m m -sys", "be brief", stdin="hello there\n\nand again\n")
    assert result.stdout == "HELLO THERE\nAND AGAIN\n" and result.exit_code == 0
    assert result.stderr.count("tokens seen") == 2 and "\x1b" not in result.stderr
    assert [m["role"] for m in fake.calls[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert fake.calls[1]["messages"][2]["content"] == "HELLO THERE"


@pytest.mark.parametrize(
    ("words", "most"), [("", 1024), ("-n -1", None), ("-n 7", 7), ("-n 1024", 1024)]
)
def test_a_reply_ends_where_nobody_can_stop_it(fake, words, most):
    call(f"chat -m m {words}", stdin="one\n")
    assert fake.calls[-1]["max_tokens"] == most


def test_a_reply_that_was_ended_says_so(fake, monkeypatch):
    monkeypatch.setattr(chat, "PIPED_MAX", 2)
    said = call("chat -m m", stdin="one two three\n")
    assert said.stdout == "ONE TWO\n" and "stopped after 2 tokens; -n -1" in said.stderr
    assert "stopped after" not in call("chat -m m", stdin="one\n").stderr
    assert "stopped after" not in call("chat -m m -n 1", stdin="one two\n").stderr


def test_the_demo_proposes_what_it_can_answer(fake, monkeypatch):
    monkeypatch.setattr(terminal, "is_interactive", lambda: True)
    monkeypatch.setattr(terminal, "typed_lines", lambda *_: iter([]))
    assert demo.proposal() in call("chat -m demo").stderr
    assert demo.QUESTION not in call("chat -m m").stderr


@pytest.mark.slow
def test_the_demo_answers_what_it_proposes(demo_model):
    words = "chat -m demo -c 4096 --temp 0 -n 16 --kv-ratio 0.2"
    assert "83 kilometres" in call(words, stdin=f"{demo.proposal()}\n").stdout


def test_a_file_goes_in_front_of_the_next_message(fake, tmp_path):
    doc = tmp_path / "my notes.txt"
    doc.write_text("some notes")
    result = call("chat -m m", stdin=f"/file {doc}\nwhat\n/file '{doc}' and now\n")
    assert [c["messages"][-1]["content"] for c in fake.calls] == [
        with_document("some notes", "what"),
        with_document("some notes", "and now"),
    ]
    assert "2 tokens" in result.stderr and result.exit_code == 0


def test_a_document_that_waits_is_not_put_there_twice(fake, tmp_path):
    (tmp_path / "doc").write_text("word " * 600)
    line = f"/file {tmp_path / 'doc'}"
    assert call("chat -m m", stdin=f"{line}\n{line}\n{line} what\n").exit_code == 0
    contents = [m["content"] for m in fake.calls[-1]["messages"]]
    assert contents == [with_document(("word " * 600).strip("\n"), "what")]


def test_documents_that_wait_are_listed_and_dropped(fake, tmp_path):
    doc = tmp_path / "doc"
    doc.write_text("some notes")
    result = call("chat -m m", stdin=f"/file\n/file {doc}\n/file\n/file -\n/file\none\n")
    lines = [line for line in result.stderr.splitlines() if "tokens seen" not in line]
    assert lines == [
        "no file in front of your next message",
        f"{doc} (2 tokens): read with your next message",
        f"{doc} (2 tokens) in front of your next message",
        f"{doc} (2 tokens) dropped",
        "no file in front of your next message",
    ]
    assert fake.calls[-1]["messages"][-1]["content"] == "one"


@pytest.mark.parametrize("end", ["", "/quit\n"])
def test_a_chat_that_ends_says_which_documents_nobody_read(fake, tmp_path, end):
    doc = tmp_path / "doc"
    doc.write_text("some notes")
    result = call("chat -m m", stdin=f"one\n/file {doc}\n{end}")
    last = f"edgekv: no message followed, so this was not read: {doc} (2 tokens)"
    assert result.stderr.splitlines()[-1] == last
    assert "not read" not in call("chat -m m", stdin=f"/file {doc} one\n{end}").stderr


def test_a_refused_turn_says_which_documents_wait(fake, tmp_path):
    doc = tmp_path / "doc"
    doc.write_text("some notes")
    result = call("chat -m m", stdin=f"/file {doc}\n{'word ' * 1000}\ntwo\n")
    assert f"your next message begins with {doc} (2 tokens): '/file -' drops that" in result.stderr
    assert fake.calls[-1]["messages"][-1]["content"] == with_document("some notes", "two")


def test_a_reply_is_written_anew(fake, tmp_path):
    (tmp_path / "doc").write_text("some notes")
    result = call(
        "chat -m m", stdin=f"/regen\none\n/file {tmp_path / 'doc'} what\n/regen\n/regen\nlast\n"
    )
    assert "no reply" in result.stderr and result.stdout.count("SOME NOTES WHAT\n") == 3
    assert [m["content"] for m in fake.calls[-1]["messages"]] == [
        "one",
        "ONE",
        with_document("some notes", "what"),
        "SOME NOTES WHAT",
        "last",
    ]
    assert [m["content"] for m in fake.calls[-2]["messages"]] == [
        "one",
        "ONE",
        with_document("some notes", "what"),
    ]


def test_the_speed_of_reading_is_left_out_for_a_few_tokens(fake):
    """Such as the one that is read again for another reply: its time is that of anything else."""
    result = call("chat -m m", stdin=f"{'word ' * 15}\n{'word ' * 15}\n/regen\n")
    with_speed = ["read " in line for line in result.stderr.splitlines() if "wrote" in line]
    assert with_speed == [False, True, True]  # this model reads everything again


def test_a_conversation_with_a_document_is_saved_and_loaded(fake, tmp_path):
    (tmp_path / "doc").write_text("some notes")
    call("chat -m m", stdin=f"/file {tmp_path / 'doc'} what\n/save {tmp_path / 'talk'}\n")
    call("chat -m m", stdin=f"/load {tmp_path / 'talk'}\nlast\n")
    assert [m["content"] for m in fake.calls[-1]["messages"]] == [
        with_document("some notes", "what"),
        "SOME NOTES WHAT",
        "last",
    ]


def test_several_lines_between_triple_quotes_are_one_message(fake):
    lines = '"""one\n\n  two\nthree"""\n"""four"""\nfive """\n"""\n/six\n'
    call("chat -m m", stdin=lines)
    assert [c["messages"][-1]["content"] for c in fake.calls] == [
        "one\n\n  two\nthree",
        "four",
        'five """',
        "/six",
    ]


@pytest.mark.parametrize("words", ["-cnv", "--conversation"])
def test_llama_clis_conversation_is_a_chat(fake, words):
    call(f"chat -m m {words} --system-prompt", "be brief", stdin="hello\n")
    assert [x["content"] for x in fake.calls[0]["messages"]] == ["be brief", "hello"]
    assert "'edgekv run'" in refused(call("chat -m m -no-cnv", stdin=""))
    assert "'edgekv chat'" in refused(call(f"run -m m {words} hello"))


@pytest.mark.parametrize("words", ["-no-cnv", "--no-conversation"])
def test_llama_clis_no_conversation_is_a_raw_prompt(fake, words):
    call(f"run -m m {words} -p", "a b")
    assert fake.calls[0]["prompt"] == "a b"


def test_a_system_message_may_lie_in_a_file(fake, tmp_path):
    file = tmp_path / "system.txt"
    file.write_text("be brief\n")
    for line, stdin in (("chat -m m", "hello\n"), ("run -m m hello", "")):
        call(f"{line} -sysf {file}", stdin=stdin)
        assert fake.calls[-1]["messages"][0] == {"role": "system", "content": "be brief"}
    assert "once" in refused(call(f"run -m m hello -sys x --system-prompt-file {file}"))
    assert "no file" in refused(call(f"run -m m hello -sysf {tmp_path}/none"))


@pytest.mark.parametrize("word", ["-cnw", "-xyz", "--conversations"])
def test_an_unknown_option_stays_refused(fake, word):
    assert "--help" in refused(call(f"chat -m m {word}"))


def test_a_model_without_a_template_continues_text(fake, tmp_path):
    fake.chat_template.is_fallback = True
    (tmp_path / "doc").write_text("some notes")
    result = call(
        "chat -m m -sys", "be brief", stdin=f"hello there\n/file {tmp_path / 'doc'} and\n"
    )
    assert result.stderr.count("a base model") == 1
    assert "it continues text" in result.stderr.splitlines()[0]
    first = "be brief\nhello there"
    assert [c["prompt"] for c in fake.calls] == [
        first,
        first + "BE BRIEF HELLO THERE\nsome notes\n\nand",
    ]
    for mode in ([], ["--json"]):
        result = call("run -m m -sys", "be brief", "-p", "a b", *mode)
        assert fake.calls[-1]["prompt"] == "be brief\na b" and "A B" in result.stdout
        assert result.stderr.count("a base model") == 1
    assert "base model" not in call("run -m m -p", "a b", "--raw").stderr


def test_a_broken_template_is_said_at_once(fake):
    fake.template_error = "unexpected end"
    for args in (["chat"], ["run", "-p", "x"]):
        assert "unexpected end" in refused(call(*args, "-m", "m"))
    assert call("run -m m --raw -p x").stdout == "X\n"


def test_what_goes_wrong_inside_a_template_is_one_line(fake):
    def create_chat_completion(**_):
        raise TypeError("can only concatenate str") from None

    broken = compile(
        "def render(**_):\n    raise TypeError('can only concatenate str')", "<template>", "exec"
    )
    exec(broken, names := {})
    fake.create_chat_completion = names["render"]
    assert "can only concatenate" in refused(call("run -m m -p x"))
    fake.create_chat_completion = create_chat_completion
    assert isinstance(call("run -m m -p x").exception, TypeError)


def test_a_context_beyond_the_trained_one_is_said(fake):
    for args in (["chat"], ["run", "-p", "x"]):
        assert (
            "1,000 tokens that this model was trained with"
            in call(*args, "-m", "m", "-c", "2000").stderr
        )
        assert "trained" not in call(*args, "-m", "m", "-c", "1000").stderr


def test_no_advice_of_a_context_beyond_the_trained_one(fake, tmp_path):
    (tmp_path / "doc").write_text("word " * 1000)
    lines = f"{'word ' * 1001}\n/file {tmp_path / 'doc'}\n"
    assert "larger -c" not in call("chat -m m", stdin=lines).stderr
    fake.metadata["fake.context_length"] = "2000"
    assert call("chat -m m", stdin=lines).stderr.count("or start with a larger -c") == 2


def test_thoughts_stand_apart_in_what_comes_and_in_what_is_sent_back(fake, monkeypatch):
    calls = []

    def create_chat_completion(messages, **_):
        calls.append(messages)
        deltas = [{"reasoning_content": "h"}, {"reasoning_content": "m"}, {"content": "yes"}]
        return ({"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas)

    monkeypatch.setattr(fake, "create_chat_completion", create_chat_completion)
    result = call("chat -m m", stdin="one\ntwo\n")
    assert result.stdout == "<think>\nhm\n</think>\n\nyes\n" * 2
    assert calls[1][1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_a_saved_chat_of_an_earlier_version_had_its_thoughts_in_the_text():
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
    ]
    _, reply = messages_of({"messages": turns})
    assert reply == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert messages_of({"messages": [turns[0], reply]})[1] == reply


def test_a_ratio_in_the_chat_makes_the_profile_that_it_needs(fake):
    result = call("chat -m m", stdin="/ratio 0.2\n/ratio 1\n")
    assert fake.learned == [0.2]
    assert "20 % of the memory from the next prompt on; method snapkv" in result.stderr


def test_checkpoints_are_shown_and_can_be_switched_off(fake):
    fake.n_bytes_checkpoints = 3 * 2**20
    assert "3.0 MiB more" in call("chat -m m", stdin="/stats\n").stderr
    assert fake.options.kv.checkpoints
    call("run -m m -p x --no-kv-checkpoints")
    assert not fake.options.kv.checkpoints


def test_a_limit_says_what_is_reserved_and_for_what(fake):
    fake.n_bytes_limit, fake.n_bytes_reserved = 2**20, 2**18
    assert "; limit 1.0 MiB; wrote" in call("run -m m -p x").stderr
    said = "1.0 MiB: 0.8 for kept tokens, 0.2 reserved for new tokens and sliding windows"
    assert said in call("chat -m m", stdin="/stats\n").stderr
    record = json.loads(call("run -m m -p x --json").stdout)
    assert (record["kv_bytes_limit"], record["kv_bytes_reserved"]) == (2**20, 2**18)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "compression: off; --kv-ratio 0.2 keeps a fifth of the cache's memory"),
        ({"ratio": 0.2}, "compression: keeps 20 % of the cache's memory, method snapkv"),
        ({"budget": 1024}, "compression: keeps 1,024 tokens of each KV head, method snapkv"),
        ({"memory": 2**31}, "compression: the cache stays within 2.00 GiB, method snapkv"),
    ],
)
def test_the_banner_says_whether_the_cache_is_compressed(options_of, options, says):
    assert report.compression_line(FakeLlama().kv_stats(), options_of(**options)) == says


def test_the_banner_says_of_auto_what_a_newcomer_needs(options_of):
    stats = replace(FakeLlama(method="score=joint,rows=64").kv_stats(), why="nearest")
    assert report.compression_line(stats, options_of(ratio=0.2)).endswith(", method auto")
    assert "score=joint,rows=64 (nearest)" in report.stats_table(stats)
    twice = replace(stats, method="kvzip", why="prompts are read twice")
    assert "kvzip (prompts are read twice)" in report.compression_line(twice, options_of(ratio=0.2))


def test_a_changed_ratio_says_of_auto_no_more_than_the_banner(fake, monkeypatch):
    stats = FakeLlama.kv_stats
    spelled = {"method": "score=joint,rows=64", "why": "nearest"}
    monkeypatch.setattr(FakeLlama, "kv_stats", lambda self: replace(stats(self), **spelled))
    said = call("chat -m m --kv-ratio 0.2", stdin="/ratio 0.1\n").stderr
    assert "; method auto" in said and "score=" not in said


def test_a_status_line_is_one_line_of_the_terminal():
    stream = Stream(FakeLlama(), lambda: iter(()))
    stream.n_read, stream.read_s, stream.n_decoded, stream.decode_s = 2000, 1.0, 90, 9.0
    stats = replace(FakeLlama().kv_stats(), n_seen=2215, n_kept=842.0, n_bytes=5872026)
    stats = replace(stats, n_bytes_full=27262976, n_bytes_limit=2**26)
    whole = report.status_line(stats, stream, None)
    assert whole == (
        "2,215 tokens seen, 38 % kept; KV 22 %: 5.6 of 26.0 MiB; limit 64.0 MiB;"
        " wrote 10.0 tokens/s; read 2,000 tokens/s"
    )
    assert report.status_line(stats, stream, 80) == whole[:70]
    assert report.status_line(stats, stream, 56).endswith("26.0 MiB")


def test_a_cache_that_is_larger_than_f16s_is_told_as_it_is():
    stats = replace(FakeLlama().kv_stats(), n_seen=9, n_bytes=2**20, n_bytes_full=2**19)
    assert "KV 200 %: 1.0 of 0.5 MiB" in report.cache_parts(stats)


def test_the_banner_says_why_a_cache_is_not_compressed(options_of):
    fake = FakeLlama()
    fake.mode, fake.note = "uncompressed", "runs uncompressed: because"
    assert "because" in report.compression_line(fake.kv_stats(), options_of(ratio=0.2))


@pytest.fixture
def options_of(fake):
    """Makes engine options; of the cache's these differ from the defaults."""
    call("run -m m -p x")
    return lambda **changes: replace(fake.options, kv=KVConfig(**changes))


def with_document(text: str, question: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text + "\n"}, {"type": "text", "text": question}]


@pytest.mark.parametrize(
    "line",
    [
        "/nothing",
        "/file nowhere.txt",
        "/ratio",
        "/ratio 20",
        "/save",
        "/load nowhere",
        "/save /no/such/folder/x",
        "word " * 2000,
    ],
)
def test_a_refused_line_leaves_the_conversation(fake, line):
    result = call("chat -m m", stdin=f"one\n{line}\ntwo\n")
    assert result.exit_code == 2 and result.stdout == "ONE\nTWO\n"
    errors = [e for e in result.stderr.splitlines() if e.startswith("edgekv: ")]
    assert len(errors) == 1
    assert [m["content"] for m in fake.calls[-1]["messages"]] == ["one", "ONE", "two"]


@pytest.mark.parametrize(
    ("n_words", "says"), [(1000, "1,000 tokens, and 998 of"), (990, "has 1003 tokens")]
)
def test_a_document_that_does_not_fit_is_gone_with_its_question(fake, tmp_path, n_words, says):
    (tmp_path / "doc").write_text("word " * n_words)
    result = call(
        "chat -m m",
        stdin=(
            f"one\n/file {tmp_path / 'doc'} with eleven words behind it so that it is too"
            " much\ntwo\n"
        ),
    )
    assert says in result.stderr and result.stdout == "ONE\nTWO\n"
    assert [m["content"] for m in fake.calls[-1]["messages"]] == ["one", "ONE", "two"]


def test_save_and_load(fake, tmp_path):
    path = tmp_path / "talk"
    call("chat -m m", stdin=f"one\n/save {path}\n")
    fake.seen = []
    result = call("chat -m m", stdin=f"/load {path}\ntwo\n")
    assert "2 messages, 2 tokens; the last ones:\n> one\nONE\n" in result.stderr
    assert [m["content"] for m in fake.calls[-1]["messages"]] == ["one", "ONE", "two"]
    assert [p.name for p in tmp_path.iterdir()] == ["talk"]


def test_a_saved_chat_brings_its_cache_along(tiny, tmp_path):
    model, path = str(tiny("llama-gqa")), tmp_path / "talk"
    usual = ["chat", "-m", model, "-c", "2048", "-n", "4", "--kv-method"]
    question = "the rain in the air is an art and the sun is on the ear " * 20
    first = ["snapkv", "--kv-ratio", "0.3", "-ctk", "q8_0", "-ctv", "q4_0"]
    call("", *usual, *first, stdin=f"{question}\n/save {path}\n")
    for words in (["snapkv", "--kv-ratio", "0.3"], ["knorm", "--kv-ratio", "0.8"], ["auto"]):
        result = call("", *usual, *words, stdin=f"/load {path}\n/stats\nand then?\n")
        assert result.exit_code == 0, result.stderr
        assert "as it was saved: keeps 30 % of the memory, as q8_0/q4_0, method snapkv" in (
            result.stderr
        )
    again = call("", *usual, *first, stdin=f"/load {path}\n")
    assert again.exit_code == 0 and "as it was saved" not in again.stderr
    limited = call("", *usual, "auto", "--kv-memory", "64MiB", stdin=f"/load {path}\n/stats\n")
    assert limited.exit_code == 0 and "64.0 MiB: " in limited.stderr, limited.stderr
    smaller = call("", *usual, *first, "-c", "256", stdin=f"/load {path}\n")
    assert smaller.exit_code == 2 and "larger -c, " in smaller.stderr
    other = ["-m", str(tiny("llama-mha"))]
    result = call("", *usual, *first, *other, stdin=f"/load {path}\n")
    assert f"another model, tiny llama-gqa ({Path(model).name}): give" in result.stderr


def chat_of(question: object, role: object = "user", **more: object) -> dict[str, object]:
    """A note with one turn in it."""
    question = {"role": role, "content": question, **more}
    return {"messages": [question, {"role": "assistant", "content": "x"}]}


MESSAGES = [
    None,
    5,
    [],
    {},
    {"messages": None},
    {"messages": {}},
    {"messages": ["x"]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "x"}]},
    chat_of(5),
    chat_of("x", "tool"),
    chat_of("x", ["user"]),
    chat_of("x", more=1),
    chat_of("\ud800"),
    chat_of([]),
    chat_of(["x"]),
    chat_of([{"type": "text", "text": None}]),
    {**chat_of("x"), "cache": 5},
    {**chat_of("x"), "cache": {"ratio": 0.5}},
    {**chat_of("x"), "cache": {**said(KVConfig()), "ratio": 20}},
    {**chat_of("x"), "cache": {**said(KVConfig()), "method": []}},
]


@pytest.mark.parametrize("note", MESSAGES, ids=range(len(MESSAGES)))
def test_damaged_messages_are_one_line_and_the_chat_goes_on(fake, tmp_path, note):
    other = FakeLlama()
    other.kv_save(str(tmp_path / "talk"), note)
    result = call("chat -m m", stdin=f"one\n/load {tmp_path / 'talk'}\ntwo\n")
    assert result.exit_code == 2 and result.stdout == "ONE\nTWO\n"
    assert result.stderr.count("edgekv: ") == 1
    assert [m["content"] for m in fake.calls[-1]["messages"]] == ["one", "ONE", "two"]


def test_a_loaded_chat_shows_its_last_turn_in_short(fake, tmp_path):
    other, path = FakeLlama(), tmp_path / "talk"
    document = {"type": "text", "text": "a document"}
    other.kv_save(
        str(path),
        {
            "messages": [
                {"role": "system", "content": "be kind"},
                *chat_of("early")["messages"],
                {
                    "role": "user",
                    "content": [document, {"type": "text", "text": "and\nwhat\x1b[2J?"}],
                },
                {"role": "assistant", "content": "word " * 1000},
            ]
        },
    )
    shown = call("chat -m m", stdin=f"/load {path}\n").stderr
    assert "> and what[2J?\nword word" in shown and "early" not in shown
    assert "a document" not in shown and "\x1b" not in shown and len(shown) < 800


NAMES = ".", "/", "~no-such-user-here/x", "x" * 256, "a\0b", "report.txt", "pipe", "no/x"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["save", "load"])
def test_names_that_cannot_be_are_one_line(fake, tmp_path, monkeypatch, what, name):
    monkeypatch.chdir(tmp_path)
    Path("report.txt").write_text("the only copy")
    os.mkfifo("pipe")
    result = call("chat -m m", stdin=f"one\n/{what} {name}\ntwo\n")
    assert result.exit_code == 2 and result.stdout == "ONE\nTWO\n"
    assert result.stderr.count("edgekv: ") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"report.txt", "pipe"}
    assert Path("pipe").is_fifo() and Path("report.txt").read_text() == "the only copy"


def test_commands_of_a_chat(fake):
    lines = "/help\none two\n/stats\n/ratio 0.5\n/system be kind\n/reset\nthree\n/quit\nfour\n"
    result = call("chat -m m", stdin=lines)
    assert result.exit_code == 0 and result.stdout == "ONE TWO\nTHREE\n"
    assert (
        "50 % of the memory from the next prompt on: 0.0 of 0.0 MiB, 2 of the 4 tokens seen would"
        " stay" in result.stderr
    )
    assert [m["content"] for m in fake.calls[-1]["messages"]] == ["be kind", "three"]
    assert all(name in result.stderr for name in slash.COMMANDS)
    assert "snapkv" in result.stderr and "tokens kept" in result.stderr


@pytest.mark.parametrize(("leave", "forget"), [("/bye", "/clear"), ("/exit", "/reset")])
def test_commands_as_llama_cpp_and_ollama_call_them(fake, tmp_path, leave, forget):
    (tmp_path / "doc").write_text("a text")
    result = call(
        "chat -m m", stdin=f"one\n{forget}\n/read {tmp_path / 'doc'}\ntwo\n{leave}\nthree\n"
    )
    assert result.exit_code == 0
    assert [m["content"] for m in fake.calls[-1]["messages"]] == [with_document("a text", "two")]
    assert all(name in call("chat -m m", stdin="/?\n").stderr for name in slash.ALIASES)


def test_a_full_context_is_said(fake, monkeypatch):
    chunks = ({"role": "assistant"}, None), ({"content": "x"}, "length")
    monkeypatch.setattr(
        fake,
        "create_chat_completion",
        lambda **_: (
            {"choices": [{"delta": delta, "finish_reason": reason}]} for delta, reason in chunks
        ),
    )
    assert "/reset" in call("chat -m m", stdin="one\n").stderr
    assert "/reset" not in call("chat -m m -n 1", stdin="one\n").stderr


def test_the_turn_behind_a_full_context_says_what_to_do(fake, tmp_path):
    fake.metadata["fake.context_length"] = "4000"
    result = call("chat -m m", stdin="word " * 900 + "\n" + "word " * 99 + "\n")
    assert "/reset starts afresh, or start with a larger -c" in result.stderr
    assert result.stderr.count("1004 tokens, the context 1000") == 1
    fake.seen = []
    first = call("chat -m m", stdin="word " * 1100 + "\n").stderr
    assert "/reset" not in first and "give a shorter prompt" in first
    (tmp_path / "long").write_text("word " * 1100)
    first = call("chat -m m", stdin=f"/file {tmp_path / 'long'}\n").stderr
    assert "/reset" not in first and "give a shorter text" in first


def test_a_real_models_full_context_is_said_in_plain_words(tiny):
    words = ["chat", "-m", str(tiny("llama-gqa")), "-c", "256", "-n", "4", "--ignore-eos"]
    text = "the rain in the air is an art and the sun is on the ear "
    said = call("", *words, stdin=f"{text}\n{text * 20}\n").stderr
    assert "tokens, and the context 256; /reset starts afresh" in said and "Requested" not in said
    assert "-c 200 is taken as 256" in call("", *words, "-c", "200", stdin=f"{text}\n").stderr
    assert "is taken as" not in said


@pytest.mark.parametrize("line", ["/exit now", "/quit x", "/reset all", "/help me", "/regen it"])
def test_words_behind_a_command_that_takes_none_are_not_dropped(fake, line):
    result = call("chat -m m", stdin=f"one\n{line}\ntwo\n")
    assert result.exit_code == 2 and result.stdout == "ONE\nTWO\n"
    assert f"{line.split()[0]} stands alone" in result.stderr


def test_nothing_is_forgotten_where_nothing_is(fake, tmp_path):
    (tmp_path / "doc").write_text("a text")
    lines = f"/reset\n/system be kind\n/reset\n/file {tmp_path / 'doc'}\n/reset\none\n/reset\n"
    said = call("chat -m m", stdin=lines).stderr.splitlines()
    assert said.count("there is nothing to forget") == said.count("forgotten") == 2


def test_a_template_that_refuses_is_one_line(fake):
    fake.create_chat_completion = lambda **_: (_ for _ in ()).throw(
        ValueError("System role\nnot supported")
    )
    assert "System role not supported" in refused(call("chat -m m", stdin="one\n"))


def wrapped(pieces: list[str], columns: int) -> str:
    wrap = Wrap(lambda: columns)
    return "".join(map(wrap.feed, pieces)) + wrap.end()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three", "one two\nthree"),
        ("one\n\n  two three", "one\n\n  two\nthree"),
        ("a much-too-long-word b", "a\nmuch-too-long-word\nb"),
        (
            "```\nx = 1 + 2 + 3 + 4\n```\none two three",
            "```\nx = 1 + 2 + 3 + 4\n```\none two\nthree",
        ),
        ("你好世界你好世界", "你好世界你好世界"),
        ("123456789 two", "123456789\ntwo"),
        ("1234 6789 two", "1234 6789\ntwo"),
    ],
)
def test_words_are_whole_at_the_edge(text, shown):
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        assert wrapped(pieces, 9) == shown or "-" in text, pieces
    assert "".join(wrapped(list(text), 9).split()) == "".join(text.split())


def test_thoughts_are_dim_for_a_person_and_plain_elsewhere(capsys):
    pieces = [Piece("hm, ", True), Piece("so", True), Piece("yes")]
    for person, expected in (
        (True, "\x1b[2m<think>\nhm, so\n</think>\n\n\x1b[0myes\n"),
        (False, "<think>\nhm, so\n</think>\n\nyes\n"),
    ):
        reply = terminal.ReplyPrinter(person)
        for piece in pieces:
            reply.write(piece)
        reply.end()
        assert capsys.readouterr().out.replace("\x1b[0m\x1b[2m", "") == expected


def test_a_reply_cannot_steer_the_terminal():
    assert text.printable("a\x1b[2Jb\x9bc\td\n") == "a[2Jbc\td\n"


# ---- chat, with signals and a terminal

CHILD = """
import sys, time
from edgekv import commands
from edgekv.commands import load
from tests.fakes import FakeLlama
class Llama(FakeLlama):
    def eval(self, prompt):
        print("begins", file=sys.stderr, flush=True)
        super().eval(prompt)
    def tokenize(self, *args, **more):
        print("counts", file=sys.stderr, flush=True)
        time.sleep(10 * self.step_s)
        return super().tokenize(*args, **more)
load.load_llama = lambda options, *_, **__: Llama(step_s={step_s})
load.end_tokens = lambda llm: []
commands.main({args!r}, prog_name="edgekv")
"""


@pytest.mark.parametrize(
    "args", [["chat", "-m", "m"], ["run", "-m", "m", "-"], ["run", "-m", "m", "-", "--json"]]
)
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_without_a_terminal_ends_the_program(args):
    command = [sys.executable, "-c", CHILD.format(args=args, step_s=0.3)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdin.write("hello there\n")
        process.stdin.flush() if args[0] == "chat" else process.stdin.close()
        assert "begins" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert "Traceback" not in process.stderr.read() and process.stdout.read() == ""


@pytest.mark.parametrize("moment", ["bar", "clear", "begin"])
@pytest.mark.parametrize("args", ["chat -m m", "run -m m -", "run -m m - --json"])
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_before_reading_begins_is_not_lost(fake, monkeypatch, args, moment):
    def interrupted(call):
        def interrupt(*values, **more):
            if moment == "begin":
                os.kill(os.getpid(), signal.SIGINT)
            done = call(*values, **more)
            if moment != "begin":
                os.kill(os.getpid(), signal.SIGINT)
            return done

        return interrupt

    if moment == "bar":
        bar = terminal.ReadingBar
        monkeypatch.setattr(bar, "__init__", interrupted(bar.__init__))
    else:
        name = "kv_cancel" if moment == "clear" else "create_chat_completion"
        monkeypatch.setattr(fake, name, interrupted(getattr(fake, name)))
    result = call(args, stdin="one\n")
    if moment == "clear" and "--json" in args:
        assert result.exit_code == 0, "it takes no wish back"
    else:
        assert result.exit_code == 130 and fake.n_evaluated == 0 and result.stdout == ""


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_that_came_too_late_stops_no_later_turn(fake, monkeypatch):
    conversation = Conversation(fake, {"max_tokens": None})
    stop, n_late = terminal.ReadingBar.stop, []

    def late(bar):
        stop(bar)
        if conversation.messages:  # the reply is complete
            n_late.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(terminal.ReadingBar, "stop", late)
        chat.answer(conversation, "one", typed=True)
    assert n_late
    chat.answer(conversation, "two", typed=True)
    assert conversation.messages[-1]["content"] == "TWO"


LOADING = """
import os, runpy, signal, sys
class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
sys.argv = ["edgekv", "run", "-m", {model!r}, "-p", "a", "-n", "1"]
runpy.run_module("edgekv", run_name="__main__", alter_sys=True)
"""


HELP = """
import sys
from edgekv.__main__ import main
sys.argv = ["edgekv", "--help"]
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def test_help_loads_nothing_that_takes_long():
    done = subprocess.run(
        [sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "Usage: edgekv" in done.stdout
    heavy = {"numpy", "gguf", "jinja2", "torch", "edgekv.llama_cpp", "edgekv.native", "fastapi"}
    assert not heavy & set(done.stderr.split())


@pytest.mark.parametrize(
    "module", ["edgekv.errors", "edgekv.__main__", "click", "numpy", "edgekv.llama.llama", "jinja2"]
)
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_while_modules_load_is_silent(tiny, module):
    code = LOADING.format(module=module, model=str(tiny("llama-gqa")))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (130, -signal.SIGINT), done
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


ENDING = """
import os, runpy, signal, sys
set_handler, n_ignored = signal.signal, []
def ends(number, handler):
    n_ignored.append(handler is signal.SIG_DFL)
    if sum(n_ignored) == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return set_handler(number, handler)
signal.signal = ends
sys.argv = ["edgekv", "--version"]
runpy.run_module("edgekv", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_while_the_program_ends_is_silent():
    done = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "edgekv" in done.stdout and done.stderr == "" and done.returncode == -signal.SIGINT


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo terminal")
def test_ctrl_c_on_a_terminal_stops_the_reply_only(tmp_path):
    with Terminal(["chat", "-m", "m"], 0.2, tmp_path) as talk:
        talk.until(">")
        talk.send("first one\r")
        talk.until("begins")  # the prompt takes 2 s to read
        talk.send("\x03")
        talk.until("as it was before this turn")
        talk.until(">")
        talk.send("a second message of five\r")
        talk.until("SECOND")
        talk.send("\x03")
        talk.until("tokens seen")
        talk.until(">")
        talk.send("unfinished\x03")
        talk.send("\x04")
        assert talk.wait() == 0
        assert "FIVE" not in talk.seen and "Traceback" not in talk.seen
    assert (tmp_path / "edgekv" / "history").read_text().count("\n+") == 2


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo terminal")
def test_ctrl_c_while_a_file_is_read_does_not_end_the_chat(tmp_path):
    (tmp_path / "doc").write_text("some notes")
    with Terminal(["chat", "-m", "m"], 0.2, tmp_path) as talk:
        talk.until(">")
        talk.send(f"/file {tmp_path / 'doc'}\r")
        talk.until("counts")
        talk.send("\x03")
        talk.until("edgekv: stopped")
        talk.until(">")
        talk.send("/file\r")
        talk.until("no file in front of your next message")
        talk.until(">")  # Ctrl-D between two prompts is the terminal's, not the chat's
        talk.send("\x04")
        assert talk.wait() == 0 and "Traceback" not in talk.seen


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo terminal")
def test_a_person_completes_paths_and_types_several_lines(tmp_path):
    (tmp_path / "some notes.txt").write_text("notes")
    (tmp_path / "doc.txt").write_text("some notes")
    with Terminal(["chat", "-m", "m"], 0, tmp_path) as talk:
        talk.until("compression: off; --kv-ratio 0.2 keeps")
        talk.until(">")
        talk.send(f"/fi\t {tmp_path}/do\t\r")
        talk.until("read with your next message")
        talk.send('"""and\rmore"""\r')
        talk.until("SOME NOTES AND MORE")
        talk.until(">")
        talk.send("/regen\r")
        talk.until("SOME NOTES AND MORE")
        talk.until(">")
        talk.send(f"/file {tmp_path}/doc.txt\r")
        talk.until("read with your next message")
        talk.until(">")
        talk.send("\x04")
        talk.until("not read")
        assert talk.wait() == 0


class Terminal:
    """A chat on a pseudo terminal."""

    def __init__(self, args: list[str], step_s: float, data: Path) -> None:
        import pty

        self.seen = ""
        self._at = 0
        self._screen, inner = pty.openpty()
        # so that Ctrl-C becomes a signal
        own = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        env = {
            **os.environ,
            "XDG_DATA_HOME": str(data),
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",
        }
        command = [sys.executable, "-c", own + CHILD.format(args=args, step_s=step_s)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=env,
            start_new_session=True,
        )
        os.close(inner)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._screen)

    def send(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def until(self, text: str, seconds: float = 20) -> None:
        """Waits for `text` on the screen, behind what was waited for before."""
        import select

        end = time.monotonic() + seconds
        while (at := self.seen.find(text, self._at)) < 0:
            ready, _, _ = select.select([self._screen], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen[self._at :]!r}"
            self.seen += os.read(self._screen, 4096).decode(errors="replace")
        self._at = at + len(text)

    def wait(self) -> int:
        return self._process.wait(20)


# ---- info and methods

SHAPE = {
    "arch": "llama",
    "n_layer": 2,
    "n_head": 9,
    "n_head_kv": [3, 3],
    "d_head_k": 64,
    "d_head_v": 64,
    "v_in_k": False,
    "n_ctx_train": 8192,
    "n_params": 134515008,
    "size_bytes": 91739136,
    "mode": "layers",
    "note": "",
}


def test_info_says_what_memory_a_process_can_still_get(monkeypatch):
    from edgekv.base import machine

    monkeypatch.setattr(machine, "memory_free", lambda: 123 * 2**20)
    monkeypatch.setattr(machine, "memory_total", lambda: 456 * 2**20)
    assert re.search(r"device +CPU: .*, 123\.0 of 456\.0 MiB free", call("info").stdout)
    (device,) = [
        x for x in json.loads(call("info --json").stdout)["build"]["devices"] if x["name"] == "CPU"
    ]
    assert (device["memory_free"], device["memory_total"]) == (123 * 2**20, 456 * 2**20)


def test_info(monkeypatch):
    devices = [
        {"name": "CPU", "description": "a processor", "memory_total": 2**30, "memory_free": 2**29}
    ]
    build = {
        "edgekv": "0.1.0",
        "llama_cpp_commit": "abc",
        "llama_cpp_python": "1",
        "patches": ["a", "b"],
        "lib": "l",
        "instructions": ["AVX2", "FMA"],
        "devices": devices,
        "passed_over": ["vulkan: no driver"],
    }
    monkeypatch.setattr(load, "build_info", lambda: build)
    monkeypatch.setattr(load, "model_info", lambda path: SHAPE)
    monkeypatch.setattr(
        load, "cache_types", lambda: {"f16": (1, 1, 2), "q8_0": (8, 32, 34), "odd": (0, 48, 5)}
    )
    plain = call("info -m m.gguf")
    assert plain.exit_code == 0
    assert "512.0 of 1,024.0 MiB free" in plain.stdout
    assert "vulkan: no driver" in plain.stdout
    assert "1,536 bytes per token" in plain.stdout
    record = json.loads(call("info -m m.gguf --json").stdout)
    assert record["model"]["kv_bytes_per_token"] == {"f16": 1536, "q8_0": 816, "odd": None}
    assert json.loads(call("info", "--json").stdout)["model"] is None


def test_methods_lists_every_preset():
    plain, records = call("methods").stdout, json.loads(call("methods", "--json").stdout)
    assert [r["name"] for r in records] == list(methods.presets())
    assert all(f"\n{name} " in plain for name in BUDGETS), "those in no preset too"
    assert all(r["name"] in plain and r["title"] in plain for r in records)
    assert "The default is auto" in plain
    assert next(r for r in records if r["name"] == "snapkv")["params"] == {"kernel": 7}
    assert "evicted tokens are folded into the kept ones they resemble [D2O" in plain
    assert {r["merge"] for r in records} == {"none", "d2o", "summary"} == set(methods.MERGES)
    assert next(r for r in records if r["name"] == "kvzap-summary")["merge_params"]["rows"] == 16


def test_tables_line_up():
    assert (
        report.table([("a", "long cell", "x"), ("bcd", "e", "y")])
        == "a    long cell  x\nbcd  e          y"
    )
