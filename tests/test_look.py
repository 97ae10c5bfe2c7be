"""edgekv look: a page that shows which tokens stay."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from edgekv.kept import look_page
from tests import recurrent
from tests.cli import refused, typed
from tests.engine import load

TEXT = "the rain in the air <is> an art & the sun\nis on the ear. " * 12
CACHE = "--kv-ratio 0.3 --kv-method snapkv -ctk f16 -ctv f16 -c 2048 -t 1"


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def document(tmp_path) -> Path:
    path = tmp_path / "rain.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def look(model: Path, document: Path, to: Path, options: str = CACHE) -> Any:
    return typed(f"look -m {model} {options}", str(document), "-o", str(to))


def shown(page: Path) -> list[tuple[str, int, int]]:
    """(text, heads that kept it, heads) of each token of a page."""
    main = page.read_text(encoding="utf-8").split("<main>")[1]
    found = re.findall(r'<b class="k\d+" title="(\d+) of (\d+) heads">(.*?)</b>', main, re.DOTALL)
    return [(html.unescape(text), int(n), int(n_heads)) for n, n_heads, text in found]


def test_the_page_shows_the_document_and_the_heads_that_kept_each_token(tiny, document, tmp_path):
    made = look(tiny("llama-gqa"), document, tmp_path / "kept.html")
    assert made.exit_code == 0, made.stderr
    tokens = shown(tmp_path / "kept.html")
    assert "".join(text for text, *_ in tokens).removeprefix("<s>").strip() == TEXT.strip()
    assert {n_heads for *_, n_heads in tokens} == {6}

    llm = load(tiny("llama-gqa"), kv_ratio=0.3, n_threads_batch=1)
    llm.eval(llm.tokenize(TEXT.encode(), add_bos=True))
    stats = llm.kv_stats()
    assert len(tokens) == stats.n_seen
    assert sum(n for _, n, _ in tokens) == stats.kept.sum()
    assert tokens[-1][1] == 6 and min(n for _, n, _ in tokens) == 0  # snapkv keeps the end
    assert f"{stats.n_seen:,} tokens" in made.stdout and "snapkv" in made.stdout


def test_layers_with_a_sliding_window_do_not_count(tiny, document, tmp_path):
    made = look(tiny("gemma3"), document, tmp_path / "kept.html")
    assert made.exit_code == 0, made.stderr
    assert {n_heads for *_, n_heads in shown(tmp_path / "kept.html")} == {2}


def test_the_page_loads_nothing(tiny, document, tmp_path):
    look(tiny("llama-gqa"), document, tmp_path / "kept.html")
    page = (tmp_path / "kept.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|src=|href=|url\(|https?:", page)


def test_another_page_is_replaced_and_another_file_is_not(tiny, document, tmp_path):
    page = tmp_path / "kept.html"
    for _ in range(2):
        assert look(tiny("llama-gqa"), document, page).exit_code == 0
    assert "exists" in refused(look(tiny("llama-gqa"), document, document))
    assert document.read_text(encoding="utf-8") == TEXT


def test_what_cannot_be_shown_is_refused_in_one_line(tiny, document, tmp_path):
    page, model = tmp_path / "kept.html", tiny("llama-gqa")
    assert "--kv-ratio" in refused(look(model, document, page, "-c 2048"))
    assert "start with -c " in refused(look(model, document, page, f"{CACHE} -c 256"))
    assert "no file" in refused(look(model, tmp_path / "missing.txt", page))
    assert "folder" in refused(look(model, document, tmp_path / "missing" / "kept.html"))
    assert not page.exists()


def test_a_model_without_a_kv_cache_is_refused_in_one_line(document, tmp_path):
    model = recurrent.write(tmp_path / "mamba.gguf")
    said = refused(look(model, document, tmp_path / "kept.html", "-c 1024 -t 1 --kv-ratio 0.2"))
    assert "recurrent layers hold no KV cache" in said, said
    assert not (tmp_path / "kept.html").exists()


def test_tokens_that_share_a_character_are_one():
    pieces = [b"a", b"\xc3", b"\xa4", b"b\xff", b"\xe2"]
    assert list(look_page.texts(pieces, [1, 0, 5, 2, 3])) == [
        ("a", 1),
        ("\u00e4", 5),
        ("b\ufffd", 2),
        ("\ufffd", 3),
    ]


def test_no_head_and_all_heads_have_colours_of_their_own():
    levels = [look_page.level(n, 300) for n in range(301)]
    assert levels[0] == 0 and levels[1] == 1 and levels[-1] == look_page.LEVELS
    assert levels == sorted(levels)
