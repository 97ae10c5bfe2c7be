"""The commands, with a fake at the public seam: what a user types, and what comes out where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgekv import commands, methods
from edgekv.budget import BUDGETS
from edgekv.commands import load, options, report, slash, text
from edgekv.commands.docs import page
from edgekv.errors import BadInput, Unsupported
from tests.fakes import FakeLlama

ROOT = Path(__file__).resolve().parent.parent
FIELDS = """text model kv_method kv_ratio type_k type_v prompt_n kept_n gen_n kv_bytes kv_bytes_used kv_bytes_peak kv_bytes_full kv_bytes_limit prefill_ms compress_ms
            decode_ms prefill_tps decode_tps rss_peak_bytes""".split()


@pytest.fixture
def fake(monkeypatch):
    """The model that the next command loads; `fake.options` says how."""
    llm = FakeLlama()

    def load_llama(engine):
        llm.options = engine
        llm.kv_set(ratio=engine.kv_ratio)
        return llm

    monkeypatch.setattr(load, "load_llama", load_llama)
    monkeypatch.setattr(load, "end_tokens", lambda llm: [7, 9])
    for name in [n for n in os.environ if n.startswith(("LLAMA_ARG_", "EDGEKV_"))]:
        monkeypatch.delenv(name)
    return llm


def call(*args: str, stdin: str | bytes = ""):
    return CliRunner().invoke(commands.main, args, input=stdin, prog_name="edgekv")


def refused(result) -> str:
    """The one line that a user mistake gives."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("edgekv: "), result.stderr
    return lines[0]


# ---- help and errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--help"], ["chat", "--help"], ["eval", "needle", "-h"], ["methods"]])
def test_help_and_methods_load_no_library(args):
    code = ("import sys; sys.argv[0] = 'edgekv'\nfrom edgekv.commands import main\n"
            "try: main()\nfinally: assert 'llama_cpp' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize(("args", "says"), [
    (["run", "-p", "x"], "--model"),
    (["run", "-m", "m"], "-p TEXT"),
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
    (["nonsense"], "nonsense"),
])
def test_a_mistake_is_one_line_and_code_2(fake, args, says):
    assert says in refused(call(*args))


def test_what_the_engine_refuses_is_one_line(fake, monkeypatch):
    def load_llama(engine):
        raise Unsupported("no such luck; try another")

    monkeypatch.setattr(load, "load_llama", load_llama)
    for command in (["chat"], ["run", "-p", "x"]):
        assert "no such luck" in refused(call(*command, "-m", "m"))


def test_the_docs_are_the_help():
    assert (ROOT / "docs" / "cli.md").read_text() == page(), "run: python -m edgekv.commands.docs"


# ---- options ---------------------------------------------------------------------------------------------------------


def test_defaults_are_llama_cpps(fake):
    assert call("run", "-m", "m", "-p", "x").exit_code == 0
    assert fake.options == options.EngineOptions(
        model="m", ctx_size=0, batch_size=2048, ubatch_size=512, threads=None, threads_batch=None, gpu_layers=-1,
        flash_attn="auto", cache_type_k=None, cache_type_v=None, seed=-1, verbose=False, kv_ratio=1.0, kv_budget=None,
        kv_budget_mb=None, kv_method="auto", kv_sink=4, kv_window=32, kv_min_tokens=128, kv_hidden="f32",
        kv_tail=512)
    sampling = {k: v for k, v in fake.calls[0].items() if k != "messages"}
    assert sampling == {"max_tokens": None, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
                        "repeat_penalty": 1.0, "logit_bias": None}


def test_short_flags_of_several_letters(fake):
    line = ("-m m -c 4096 -b 64 -ub 32 -t 2 -tb 3 -ngl 5 -fa off -ctk q8_0 -ctv q4_0 -n 3 -s 7 --temp 0 --top-k 1 --top-p 0.5 "
            "--min-p 0.1 --repeat-penalty 1.1 --ignore-eos -sys Hello -v --kv-ratio 0.2 --kv-budget 64 --kv-budget-mb 1.5 "
            "--kv-method streaming --kv-sink 2 --kv-window 8 --kv-min-tokens 16 --kv-hidden disk --kv-tail 99")
    assert call("run", *line.split(), "-p", "x").exit_code == 0
    assert fake.options == options.EngineOptions(
        "m", 4096, 64, 32, 2, 3, 5, "off", "q8_0", "q4_0", 7, True, 0.2, 64, 1.5, "streaming", 2, 8, 16, "disk", 99)
    assert fake.calls[0]["logit_bias"] == {7: float("-inf"), 9: float("-inf")}
    assert fake.calls[0]["max_tokens"] == 3 and fake.calls[0]["messages"][0] == {"role": "system", "content": "Hello"}


def test_flag_before_environment_before_default(fake, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_MODEL", "from-env")
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_K", "q8_0")
    monkeypatch.setenv("LLAMA_ARG_FLASH_ATTN", "1")
    monkeypatch.setenv("EDGEKV_KV_RATIO", "0.5")
    monkeypatch.setenv("EDGEKV_KV_MIN_TOKENS", "5")
    assert call("run", "-p", "x", "--kv-ratio", "0.25").exit_code == 0
    chosen = fake.options
    assert (chosen.model, chosen.cache_type_k, chosen.flash_attn, chosen.kv_ratio, chosen.kv_min_tokens) == (
        "from-env", "q8_0", "on", 0.25, 5)
    monkeypatch.setenv("EDGEKV_KV_RATIO", "20")
    assert "write 0.2 " in refused(call("run", "-p", "x"))


def test_threads():
    assert load.count_threads(3) == 3
    assert 1 <= load.count_threads(None) <= load.count_threads(0)


# ---- run -------------------------------------------------------------------------------------------------------------


def test_run_prints_only_the_answer(fake):
    result = call("run", "-m", "m", "-p", "what is this", "--kv-ratio", "0.5")
    assert result.stdout == "WHAT IS THIS\n"
    assert "6 tokens seen; KV 50 % of the memory: 0.0 of 0.0 MiB; 50 % of the tokens, as f16; read" in result.stderr and "\x1b" not in result.stderr


def test_run_json_has_exactly_the_fields(fake):
    result = call("run", "-m", "m", "-p", "one two three", "--json", "--kv-ratio", "0.5")
    answer = json.loads(result.stdout)
    assert list(answer) == FIELDS and result.stderr == ""
    assert answer["text"] == "ONE TWO THREE" and answer["prompt_n"] == 3 and answer["gen_n"] == 3
    assert answer["kv_ratio"] == 0.5 and answer["kept_n"] == 3 and answer["rss_peak_bytes"] > 10**6


def test_an_uncompressed_cache_is_said_once(fake):
    fake.mode, fake.note = "uncompressed", "runs uncompressed: because"
    assert "6 tokens seen, all kept" in call("run", "-m", "m", "-p", "what is this").stderr
    assert "because" in call("run", "-m", "m", "-p", "x").stderr
    assert call("chat", "-m", "m", stdin="one\ntwo\nthree\n").stderr.count("because") == 1


@pytest.mark.parametrize("mode", [[], ["--json"]])
def test_raw_gives_the_prompt_as_it_is(fake, mode):
    assert "A B" in call("run", "-m", "m", "-p", "a b", "--raw", *mode).stdout
    assert fake.calls[0]["prompt"] == "a b" and "messages" not in fake.calls[0]


def test_run_reads_files_and_standard_input(fake, tmp_path):
    (tmp_path / "doc.txt").write_text("a text\n")
    call("run", "-m", "m", "-f", str(tmp_path / "doc.txt"), "-p", "a question")
    call("run", "-m", "m", "-", stdin="piped\n")
    call("run", "-m", "m", "-f", str(tmp_path / "doc.txt"), "as with Ollama")
    assert [c["messages"][-1]["content"] for c in fake.calls] == ["a text\n\na question", "piped", "a text\n\nas with Ollama"]


def test_a_prompt_too_long_is_one_line(fake):
    assert "1001 tokens" in refused(call("run", "-m", "m", "-p", "x " * 1001))
    assert "1001 tokens" in refused(call("run", "-m", "m", "--json", "-p", "x " * 1001))


@pytest.mark.parametrize(("content", "says"), [
    (None, "no file"), (b"", "empty"), (b"\n \n", "empty"), (b"%PDF\x00\xff", "no text"), (b"caf\xe9", "no text"),
])
def test_files_that_are_no_documents(tmp_path, content, says):
    path = tmp_path / "f.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=says):
        text.read_document(str(path))
    with pytest.raises(BadInput, match="directory"):
        text.read_document(str(tmp_path))


@pytest.mark.parametrize("data", ["é\r\nb\n".encode(), "é\nb".encode("utf-8-sig"), "é\nb\n".encode("utf-16")])
def test_files_that_are_documents(tmp_path, data):
    (tmp_path / "f").write_bytes(data)
    assert text.read_document(str(tmp_path / "f")) == "é\nb"


# ---- chat, piped -----------------------------------------------------------------------------------------------------


def test_each_piped_line_is_a_turn(fake):
    result = call("chat", "-m", "m", "-sys", "be brief", stdin="hello there\n\nand again\n")
    assert result.stdout == "HELLO THERE\nAND AGAIN\n" and result.exit_code == 0
    assert result.stderr.count("tokens seen") == 2 and "\x1b" not in result.stderr
    assert [m["role"] for m in fake.calls[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert fake.calls[1]["messages"][2]["content"] == "HELLO THERE"


def test_a_file_goes_in_front_of_the_next_message(fake, tmp_path):
    doc = tmp_path / "my notes.txt"
    doc.write_text("some notes")
    result = call("chat", "-m", "m", stdin=f"/file {doc}\nwhat\n/file '{doc}' and now\n")
    assert [c["messages"][-1]["content"] for c in fake.calls] == ["some notes\n\nwhat", "some notes\n\nand now"]
    assert "2 tokens" in result.stderr and result.exit_code == 0


@pytest.mark.parametrize("line", ["/nothing", "/file", "/file nowhere.txt", "/ratio", "/ratio 20", "/save", "/load nowhere",
                                  "/save /no/such/folder/x", "word " * 2000])
def test_a_refused_line_leaves_the_conversation(fake, line):
    result = call("chat", "-m", "m", stdin=f"one\n{line}\ntwo\n")
    assert result.exit_code == 2 and result.stdout == "ONE\nTWO\n"
    errors = [e for e in result.stderr.splitlines() if e.startswith("edgekv: ")]
    assert len(errors) == 1
    assert [m["content"] for m in fake.calls[-1]["messages"]] == ["one", "ONE", "two"]


@pytest.mark.parametrize(("n_words", "says"), [(1000, "1,000 tokens, and 998 of"), (990, "has 1003 tokens")])
def test_a_document_that_does_not_fit_is_gone_with_its_question(fake, tmp_path, n_words, says):
    (tmp_path / "doc").write_text("word " * n_words)
    result = call("chat", "-m", "m", stdin=f"one\n/file {tmp_path / 'doc'} with eleven words behind it so that it is too much\ntwo\n")
    assert says in result.stderr and result.stdout == "ONE\nTWO\n"
    assert [m["content"] for m in fake.calls[-1]["messages"]] == ["one", "ONE", "two"]


def test_save_and_load(fake, tmp_path):
    path = tmp_path / "talk"
    call("chat", "-m", "m", stdin=f"one\n/save {path}\n")
    fake.seen = []
    result = call("chat", "-m", "m", stdin=f"/load {path}\ntwo\n")
    assert "2 messages, 2 tokens" in result.stderr
    assert [m["content"] for m in fake.calls[-1]["messages"]] == ["one", "ONE", "two"]
    Path(f"{path}.json").write_text('{"format": 99, "messages": []}')
    assert "this version" in call("chat", "-m", "m", stdin=f"/load {path}\n").stderr


def test_commands_of_a_chat(fake):
    lines = "/help\none two\n/stats\n/ratio 0.5\n/system be kind\n/reset\nthree\n/quit\nfour\n"
    result = call("chat", "-m", "m", stdin=lines)
    assert result.exit_code == 0 and result.stdout == "ONE TWO\nTHREE\n"
    assert "50 % of the memory from the next prompt on: 0.0 of 0.0 MiB, 2 of the 4 tokens seen would stay" in result.stderr
    assert [m["content"] for m in fake.calls[-1]["messages"]] == ["be kind", "three"]
    assert all(name in result.stderr for name in slash.COMMANDS)
    assert "snapkv" in result.stderr and "tokens kept" in result.stderr


@pytest.mark.parametrize(("leave", "forget"), [("/bye", "/clear"), ("/exit", "/reset")])
def test_commands_as_llama_cpp_and_ollama_call_them(fake, tmp_path, leave, forget):
    (tmp_path / "doc").write_text("a text")
    result = call("chat", "-m", "m", stdin=f"one\n{forget}\n/read {tmp_path / 'doc'}\ntwo\n{leave}\nthree\n")
    assert result.exit_code == 0 and [m["content"] for m in fake.calls[-1]["messages"]] == ["a text\n\ntwo"]
    assert all(name in call("chat", "-m", "m", stdin="/?\n").stderr for name in slash.ALIASES)


def test_a_full_context_is_said(fake, monkeypatch):
    chunks = ({"role": "assistant"}, None), ({"content": "x"}, "length")
    monkeypatch.setattr(fake, "create_chat_completion", lambda **_: (
        {"choices": [{"delta": delta, "finish_reason": reason}]} for delta, reason in chunks))
    assert "/reset" in call("chat", "-m", "m", stdin="one\n").stderr
    assert "/reset" not in call("chat", "-m", "m", "-n", "1", stdin="one\n").stderr


def test_a_template_that_refuses_is_one_line(fake):
    fake.create_chat_completion = lambda **_: (_ for _ in ()).throw(ValueError("System role\nnot supported"))
    assert "System role not supported" in refused(call("chat", "-m", "m", stdin="one\n"))


def test_a_reply_cannot_steer_the_terminal():
    assert text.printable("a\x1b[2Jb\x9bc\td\n") == "a[2Jbc\td\n"


# ---- chat, with signals and a terminal -------------------------------------------------------------------------------

CHILD = """
import sys
from edgekv import commands
from edgekv.commands import load
from tests.fakes import FakeLlama
class Llama(FakeLlama):
    def eval(self, prompt):
        print("begins", file=sys.stderr, flush=True)
        super().eval(prompt)
load.load_llama = lambda options: Llama(step_s={step_s})
load.end_tokens = lambda llm: []
commands.main({args!r}, prog_name="edgekv")
"""


@pytest.mark.parametrize("args", [["chat", "-m", "m"], ["run", "-m", "m", "-"], ["run", "-m", "m", "-", "--json"]])
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_without_a_terminal_ends_the_program(args):
    command = [sys.executable, "-c", CHILD.format(args=args, step_s=0.3)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        process.stdin.write("hello there\n")
        process.stdin.flush() if args[0] == "chat" else process.stdin.close()
        assert "begins" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert "Traceback" not in process.stderr.read() and process.stdout.read() == ""


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


class Terminal:
    """A chat on a pseudo terminal."""

    def __init__(self, args: list[str], step_s: float, data: Path) -> None:
        import pty

        self.seen = ""
        self._at = 0
        self._screen, inner = pty.openpty()
        own = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # so that Ctrl-C becomes a signal
        env = {**os.environ, "XDG_DATA_HOME": str(data), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        command = [sys.executable, "-c", own + CHILD.format(args=args, step_s=step_s)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=inner, stdout=inner, stderr=inner, env=env,
                                         start_new_session=True)
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
            assert ready, f"no {text!r} in {self.seen[self._at:]!r}"
            self.seen += os.read(self._screen, 4096).decode(errors="replace")
        self._at = at + len(text)

    def wait(self) -> int:
        return self._process.wait(20)


# ---- info and methods ------------------------------------------------------------------------------------------------

SHAPE = {"arch": "llama", "n_layer": 2, "n_head": 9, "n_head_kv": [3, 3], "d_head_k": 64, "d_head_v": 64,
         "n_ctx_train": 8192, "n_params": 134515008, "size_bytes": 91739136, "mode": "layers", "note": ""}


def test_info(monkeypatch):
    devices = [{"name": "CPU", "description": "a processor", "memory_total": 2**30, "memory_free": 2**29}]
    build = {"edgekv": "0.1.0", "llama_cpp_commit": "abc", "llama_cpp_python": "1", "patches": ["a", "b"], "lib": "l", "devices": devices}
    monkeypatch.setattr(load, "build_info", lambda: build)
    monkeypatch.setattr(load, "model_info", lambda path: SHAPE)
    monkeypatch.setattr(load, "cache_types", lambda: {"f16": (1, 1, 2), "q8_0": (8, 32, 34), "odd": (0, 48, 5)})
    plain = call("info", "-m", "m.gguf")
    assert plain.exit_code == 0 and "512.0 of 1,024.0 MiB free" in plain.stdout and "1,536 bytes per token" in plain.stdout
    record = json.loads(call("info", "-m", "m.gguf", "--json").stdout)
    assert record["model"]["kv_bytes_per_token"] == {"f16": 1536, "q8_0": 816, "odd": None}
    assert json.loads(call("info", "--json").stdout)["model"] is None


def test_methods_lists_every_preset():
    plain, records = call("methods").stdout, json.loads(call("methods", "--json").stdout)
    assert [r["name"] for r in records] == list(methods.presets())
    assert all(f"\n{name} " in plain for name in BUDGETS), "those in no preset too"
    assert all(r["name"] in plain and r["title"] in plain for r in records)
    assert "The default is auto" in plain
    assert next(r for r in records if r["name"] == "snapkv")["params"] == {"kernel": 7}
    assert "evicted rows are folded into the kept ones they resemble [D2O" in plain
    assert {r["merge"] for r in records} == {"none", "d2o", "summary"} == set(methods.MERGES)
    assert next(r for r in records if r["name"] == "edgekv")["merge_params"]["rows"] == 16


def test_tables_line_up():
    assert report.table([("a", "long cell", "x"), ("bcd", "e", "y")]) == "a    long cell  x\nbcd  e          y"
