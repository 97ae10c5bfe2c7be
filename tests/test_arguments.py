"""What editors and type checkers know of `Llama`: its arguments, one by one."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import edgekv
from edgekv.choice.config import KVConfig
from edgekv.llama.arguments import Arguments
from edgekv.llama_cpp import Llama as Parent
from edgekv_lab.commands import docs

ROOT = Path(__file__).resolve().parent.parent
SNIPPET = """
import edgekv

edgekv.Llama("model.gguf", n_ctx=4096, kv_ratio=0.2, kv_method="auto", kv_memory="2GiB")
edgekv.Llama("model.gguf", kv_budget=100, type_k=8, verbose=False, chat_format="chatml")
edgekv.Llama("model.gguf", kv_ratio="much")
edgekv.Llama("model.gguf", kv_ration=0.2)
"""

SCRIPT = """
import sys
from pathlib import Path

from edgekv import Cancelled, KVStats, Llama, has_profile, make_profile


def progress(done: int, total: int) -> None:
    print(f"{done}/{total}", file=sys.stderr)


def main(model: str, document: str, kept: Path) -> None:
    if not has_profile(model):
        make_profile(model, progress, n_threads=4)
    with Llama(model, n_ctx=8192, kv_ratio=0.2, kv_progress=progress) as llm:
        messages = [{"role": "user", "content": f"{document}: who is it about?"}]
        answer = llm.create_chat_completion(messages, max_tokens=64)
        print(answer["choices"][0]["message"]["content"])
        for chunk in llm.create_chat_completion(messages, stream=True):
            print(chunk["choices"][0]["delta"].get("content") or "", end="")
        for piece in llm.create_completion("Once", max_tokens=8, stream=True):
            print(piece["choices"][0]["text"], end="")
        print(llm("Twice", max_tokens=8)["choices"][0]["text"])
        stats: KVStats = llm.kv_stats()
        print(f"{stats.n_kept:.0f} of {stats.n_seen} tokens, {stats.n_bytes_used} bytes")
        llm.kv_save(str(kept), {"messages": messages})
        assert llm.kv_load(str(kept))["messages"] == messages
        llm.kv_cancel()
        try:
            llm.eval(llm.tokenize(b"more"))
        except Cancelled as error:
            print(error)


main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
"""
"""What a user writes."""


def test_the_signature_has_every_option_with_its_default():
    shown = inspect.signature(edgekv.Llama).parameters
    parents = inspect.signature(Parent).parameters
    assert set(shown) >= {*KVConfig.names(), *parents} - {"kwargs"}
    assert shown["kv_ratio"].default == 1.0 and shown["n_batch"].default == 512
    assert "kwargs" not in shown and next(iter(shown)) == "model_path"


def test_type_checkers_have_the_same_arguments():
    """Those that `__init__` writes out, and those of the TypedDict."""
    code = edgekv.Llama.__init__.__code__
    explicit = set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    by_name = set(Arguments.__annotations__)
    assert by_name >= set(KVConfig.names()) and not by_name & explicit
    assert by_name | explicit == set(inspect.signature(edgekv.Llama).parameters)


def test_what_type_checkers_have_of_an_option_is_generated():
    path = "edgekv/llama/cache_arguments.py"
    text = (ROOT / path).read_text(encoding="utf-8")
    assert text == docs.arguments(), "run: python -m edgekv_lab.commands.docs"


def test_the_package_says_that_it_has_types():
    assert (Path(edgekv.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
def test_a_type_checker_finds_wrong_arguments(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    words = ["--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "snippet.py")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True
    )
    found = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(found) == 2 and '"kv_ratio"' in found[0] and '"kv_ration"' in found[1], done.stdout


@pytest.mark.slow
def test_a_script_passes_a_strict_type_checker(tmp_path):
    """As a user has it: what the package's own files lack is not their business."""
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(SCRIPT)
    cache = str(ROOT / ".mypy_cache" / "strict")
    words = ["--strict", "--config-file=", "--follow-imports=silent", "--cache-dir", cache]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words, str(tmp_path / "script.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
