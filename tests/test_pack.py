"""Packs: documents are read once, and asked about whenever."""

from __future__ import annotations

import _thread
import json
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgekv import BadInput, commands
from edgekv.commands import load as load_command
from edgekv.commands.conversation import content_of
from edgekv.documents import extract, pdf, watch
from edgekv.documents.extract import document_text
from edgekv.learn import probe_profile
from edgekv.llama import pack as packs
from tests import models
from tests.engine import load
from tests.serving import until

RAIN = "the rain in the air is an art and the sun is on the ear " * 12
TALE = "a fact in an inn on the island is the end of the tale and there " * 12
CACHE = ["--kv-ratio", "0.3", "--kv-method", "snapkv", "-ctk", "f16", "-ctv", "f16"]


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def files(tmp_path) -> list[str]:
    (tmp_path / "rain.txt").write_text(RAIN)
    (tmp_path / "tale.md").write_text(TALE)
    return [str(tmp_path / "rain.txt"), str(tmp_path / "tale.md")]


def call(*args: str, stdin: str = "") -> Any:
    return CliRunner().invoke(
        commands.main, [*args], input=stdin, prog_name="edgekv", catch_exceptions=False
    )


def make(model: Path, files: list[str], to: Path, *options: str, cache: list[str] = CACHE) -> Path:
    made = call("pack", "-m", str(model), *cache, "-c", "2048", *options, *files, "-o", str(to))
    assert made.exit_code == 0, made.stderr
    assert f"{len(files)} document" in made.stdout and "tokens" in made.stdout
    return to


def refused(result: Any) -> str:
    assert result.exit_code == 2, result.output
    assert result.stderr.strip().count("\n") == 0
    return result.stderr


@pytest.mark.parametrize("cache", [CACHE, []], ids=["compressed", "whole"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_a_question_to_a_pack_is_answered_as_if_the_documents_stood_in_front_of_it(
    tiny, files, tmp_path, name, cache
):
    pack = make(tiny(name), files, tmp_path / "pack", cache=cache)
    options: dict[str, Any] = dict(kv_ratio=0.3, kv_min_tokens=128) if cache else {}
    llm, other = (load(tiny(name), n_ctx=2048, **options) for _ in range(2))
    packs.load(llm, str(pack))
    message = {"role": "user", "content": content_of([RAIN, TALE], "who is it?")}

    def ask(model: Any) -> str:
        done = model.create_chat_completion(
            [message], max_tokens=8, temperature=0, logit_bias={models.EOS: -100.0}
        )
        return done["choices"][0]["message"]["content"]

    assert ask(llm) == ask(other)
    assert llm.n_evaluated < 40 and other.n_evaluated > 500


def test_chat_and_run_open_a_pack_at_once_and_take_over_its_settings(tiny, files, tmp_path):
    model, pack = str(tiny("llama-gqa")), str(tmp_path / "pack")
    make(tiny("llama-gqa"), files, tmp_path / "pack", "-sys", "be an ant")
    usual = ["-m", model, "-c", "2048", "-n", "4", "--temp", "0", "--ignore-eos"]
    ran = call("run", *usual, "--pack", pack, "--json", "who is it?")
    assert ran.exit_code == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["kv_ratio"] == 0.3 and said["kv_method"] == "snapkv" and said["type_k"] == "f16"
    assert said["prompt_n"] > 500
    chat = call("chat", *usual, "--pack", pack, stdin="who is it?\nand there?\n")
    assert chat.exit_code == 0, chat.stderr
    assert chat.stdout.startswith(said["text"]), "the same first answer"
    assert "rain.txt" in chat.stderr and "tokens seen" in chat.stderr
    assert "not read" not in call("chat", *usual, "--pack", pack, stdin="").stderr
    assert "system message" in refused(call("run", *usual, "--pack", pack, "-sys", "no", "x"))
    assert "--kv-ratio" in refused(call("run", *usual, "--pack", pack, "--kv-ratio", "0.5", "x"))
    assert "cache type" in refused(call("run", *usual, "--pack", pack, "-ctk", "q8_0", "x"))
    assert "--raw" in refused(call("run", *usual, "--pack", pack, "--raw", "x"))
    said = refused(call("run", "--pack", pack, "who is it?"))
    assert f"edgekv run MODEL --pack {pack} 'who is it?'" in said
    assert f"({tiny('llama-gqa').name}), fingerprint" in said
    for command in ("run", "chat"):
        said = refused(call(command, "--pack", pack))
        assert f"({tiny('llama-gqa').name}), fingerprint" in said and "name it first" in said


def test_a_foreign_pack_is_refused_before_anything_takes_long(tiny, files, tmp_path, monkeypatch):
    model, other, pack = tiny("llama-gqa"), str(tiny("llama-mha")), str(tmp_path / "pack")
    make(model, files, tmp_path / "pack")

    def begun(*_):
        raise AssertionError("the model is prepared or loaded")

    name = f"({model.name})"
    shown = call("pack", "show", pack).stdout
    fingerprint = json.loads(call("pack", "show", pack, "--json").stdout)["model"]["fingerprint"]
    assert name in shown and fingerprint[:16] in shown
    monkeypatch.setattr(load_command, "load_llama", begun)
    for command in ("run", "chat"):
        said = refused(call(command, "-m", other, "--pack", pack, *["x"] * (command == "run")))
        assert "another model" in said and name in said and fingerprint[:16] in said
    overridden = ["--override-kv", "llama.context_length=int:512"]
    assert "another model" in refused(call("chat", "-m", str(model), *overridden, "--pack", pack))


@pytest.mark.parametrize("command", ["pack", "run -f", "look"])
def test_documents_that_are_too_long_are_refused_before_the_model_is_prepared(
    tiny, files, tmp_path, monkeypatch, command
):
    def begun(*_):
        raise AssertionError("the model is prepared")

    monkeypatch.setattr(probe_profile, "cache", begun)
    output = [] if command == "run -f" else ["-o", str(tmp_path / "made")]

    def typed(n_ctx: int, *files: str) -> str:
        size = ["-c", str(n_ctx)] if n_ctx else []
        words = [*command.split(), *files, "-m", str(tiny("llama-gqa")), "--kv-ratio", "0.2"]
        return refused(call(*words, *size, *output))

    said = typed(256, files[0])
    assert "rain.txt' (" in said and "context of 256" in said and "start with -c 768" in said
    Path(files[0]).write_text(RAIN * 20)
    said = typed(0, files[0])
    assert "rain.txt' (" in said and "trained with 4,096" in said and "-c " not in said
    if command == "pack":
        (tmp_path / "a").mkdir()
        other = tmp_path / "a" / "tale.md"
        other.write_text(TALE)
        said = typed(768, files[1], str(other))
        assert f"'{files[1]}' (" in said and f"'{other}' (" in said


def test_a_pack_of_an_earlier_version_has_no_name_of_its_model(tiny, files, tmp_path):
    pack = make(tiny("llama-gqa"), files, tmp_path / "pack")
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    note = llm.kv_load(str(pack))
    llm.kv_save(str(pack), {"pack": note["pack"]})
    assert "a model, fingerprint" in call("pack", "show", str(pack)).stdout
    other = str(tiny("llama-mha"))
    assert ": a model, fingerprint" in refused(call("run", "-m", other, "--pack", str(pack), "x"))


def test_show_prints_what_a_pack_holds(tiny, files, tmp_path):
    pack = make(tiny("llama-gqa"), files, tmp_path / "pack")
    shown = call("pack", "show", str(pack))
    assert shown.exit_code == 0
    for word in ("rain.txt", "tale.md", "snapkv", "30 %", "f16", f"{len(RAIN):,} bytes"):
        assert word in shown.stdout
    said = json.loads(call("pack", "show", str(pack), "--json").stdout)
    assert [x["name"] for x in said["documents"]] == ["rain.txt", "tale.md"]
    assert "text" not in said["documents"][0] and 0 < said["n_bytes"] < said["n_bytes_full"]
    data = bytearray(pack.read_bytes())
    data[-500] ^= 1
    pack.write_bytes(data)
    assert "damaged" in refused(call("pack", "show", str(pack)))


@pytest.mark.parametrize(
    "change",
    [
        lambda pack: pack.clear(),
        lambda pack: pack.update(documents=[]),
        lambda pack: pack.update(documents=[{"name": "x"}]),
        lambda pack: pack["documents"][0].update(text=5),
        lambda pack: pack["documents"][0].update(n_bytes="5"),
        lambda pack: pack.update(method="snap\nkv"),
        lambda pack: pack.update(cache_types=["f16"]),
        lambda pack: pack.update(system=None),
        lambda pack: pack.update(extra=1),
        lambda pack: pack["config"].pop("ratio"),
        lambda pack: pack["config"].update(ratio=[]),
        lambda pack: pack["config"].update(ratio=7),
    ],
)
def test_a_file_with_another_note_is_no_pack(tiny, text, tmp_path, files, change):
    pack = make(tiny("llama-gqa"), files, tmp_path / "pack")
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    note = llm.kv_load(str(pack))
    change(note["pack"])
    llm.kv_save(str(pack), note)
    assert "pack" in refused(call("run", "-m", str(tiny("llama-gqa")), "--pack", str(pack), "x"))


def test_what_is_no_pack_is_refused(tiny, text, tmp_path, files):
    model = str(tiny("llama-gqa"))
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    llm.eval(list(text(50)))
    llm.kv_save(str(tmp_path / "talk"))
    for path in ("talk", "missing", "rain.txt"):
        for words in (["chat", "-m", model, "--pack"], ["pack", "show"]):
            said = refused(call(*words, str(tmp_path / path)))
            assert "saved conversation" not in said and (path == "missing" or "no pack" in said)
    before = (tmp_path / "rain.txt").read_bytes()
    refused(call("pack", "-m", model, *files, "-o", str(tmp_path / "rain.txt")))
    assert (tmp_path / "rain.txt").read_bytes() == before
    small = call("pack", "-m", model, "-c", "256", *files, "-o", str(tmp_path / "p"))
    assert "start with -c 1280" in refused(small) and "rain.txt' (" in small.stderr
    both = call("pack", "-m", model, "-c", "768", *files, "-o", str(tmp_path / "p"))
    assert "rain.txt' (" in refused(both) and "tale.md' (" in both.stderr
    refused(call("pack", "-m", model, str(tmp_path / "missing"), "-o", str(tmp_path / "p")))
    assert not (tmp_path / "p").exists()


# ---- the text in documents


def test_the_text_of_a_page_is_what_a_reader_sees(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<html><head><title>no</title><style>p {x: y}</style></head><body><h1>A &amp; B</h1>"
        "<p>one\n two <b>three</b>.<script>no()</script><ul><li>four<li>five</ul>"
        "<table><tr><td>a<td>b</table><pre>x = 1\n  y</pre></body></html>"
    )
    assert document_text(str(page)).split("\n") == [
        "A & B",
        "",
        "one two three.",
        "",
        "four",
        "five",
        "",
        "a\tb",
        "",
        "x = 1",
        "  y",
    ]
    page.write_bytes(b'<meta charset="latin-1"><p>caf\xe9')
    assert document_text(str(page)) == "caf\u00e9"
    for data in (b'<meta charset="none"><p>caf\xe9', b"<p>caf\xe9"):
        page.write_bytes(data)
        assert document_text(str(page)) == "caf\u00e9"
    for data in (b"", b"<p></p>", b"<p>\0"):
        page.write_bytes(data)
        with pytest.raises(BadInput):
            document_text(str(page))


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>a<!-- <p>b --><p>c", "a\nc"),
        ("a<!-- b", "a"),
        ("<script>'<!--'</script>a", "a"),
        ("<SCRIPT>1 < 2 </p></Script >a", "a"),
        ("<style/>a", "a"),
        ("<head><title>no</title><body>a", "a"),
        ("<a title='1 > 0' href=x>b</a> it's <b title=it's>c</b>", "b it's c"),
        ("1 < 2 &lt; 3 &#233; & &nosuch;", "1 < 2 < 3 \u00e9 & &nosuch;"),
        ("<?xml version='1.0'?><!DOCTYPE html><p>a<br/>b<x:y>c</x:y>", "a\nbc"),
        ("<td>a</td><td>b", "a\tb"),
        ("<noscript>no</noscript>a<template>no</template>", "a"),
        (f"a &#{'9' * 9999}; b", f"a &#{'9' * 9999}; b"),
        ("<p>a<", "a<"),
        ("a</", "a"),
        ("a<b", "a"),
    ],
)
def test_tags_as_they_are_found_in_pages(tmp_path, page, text):
    path = tmp_path / "page.htm"
    path.write_text(page)
    assert document_text(str(path)) == text


BEGUN = ["<!--", "<a ", "<a b='", '<a b="', "</a ", "<?", "<a<", "<script ", "<a b=x ", "<head>\n"]


@pytest.mark.parametrize("begun", BEGUN)
def test_a_page_of_beginnings_is_read_once(tmp_path, begun):
    path, n = tmp_path / "page.html", 1 << 20
    path.write_text("a " + begun * (n // len(begun)))
    before = time.process_time()
    assert document_text(str(path)).startswith("a")
    assert time.process_time() - before < 5


def test_what_takes_too_long_is_refused(tmp_path, monkeypatch):
    ticks = iter(range(0, 10**6, 30))
    monkeypatch.setattr(extract, "Watch", lambda what: watch.Watch(what, lambda: next(ticks)))
    path = tmp_path / "page.html"
    path.write_text("<p>a" * 1000)
    with pytest.raises(BadInput, match="page.html.* more than 120 s"):
        document_text(str(path))


def pdf_of(text: str) -> bytes:
    """A PDF of one page with one line of text."""
    return pdf_with(
        f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode(), b"/Font << /F1 5 0 R >>", FONT
    )


FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def endless_pdf() -> bytes:
    """A PDF of one page, for which pypdf takes half a minute and more."""
    content = zlib.compress(b"BT (a) Tj ET " * 2_000_000)
    return pdf_with(content, b"/Font << /F1 5 0 R >>", FONT, filter=b"/Filter /FlateDecode")


def pdf_with(content: bytes, resources: bytes, *more: bytes, filter: bytes = b"") -> bytes:
    """A PDF of one page. more: objects, from 5 on."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << %s >> >>" % resources,
        b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), filter, content),
        *more,
    ]
    out, places = b"%PDF-1.4\n", []
    for i, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (i, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return out + (
        b"xref\n0 %d\n0000000000 65535 f \n%s"
        b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
        % (len(objects) + 1, table, len(objects) + 1, len(out))
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("ends", ["time", "ctrl-c"])
def test_one_page_of_a_pdf_that_takes_too_long_is_given_up(tmp_path, monkeypatch, ends):
    pytest.importorskip("pypdf")
    path = tmp_path / "report.pdf"
    path.write_bytes(endless_pdf())
    if ends == "time":
        monkeypatch.setattr(watch, "MOST_S", 0.2)
        with pytest.raises(BadInput, match="report.pdf.* more than 0.2 s"):
            document_text(str(path))
    else:
        threading.Timer(0.2, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            document_text(str(path))
    until(lambda: all(thread.name != "pdf" for thread in threading.enumerate()))


def test_the_text_of_a_pdf(tmp_path, monkeypatch):
    pytest.importorskip("pypdf")
    path = tmp_path / "report.pdf"
    path.write_bytes(pdf_of("the sun is on the ear"))
    assert document_text(str(path)) == "the sun is on the ear"
    path.write_bytes(pdf_of(""))
    with pytest.raises(BadInput, match="scanned"):
        document_text(str(path))
    (tmp_path / "report").write_bytes(pdf_of("no name"))
    assert document_text(str(tmp_path / "report")) == "no name"
    with monkeypatch.context() as patch:
        patch.setattr(pdf, "PAGES_MAX", 0)
        with pytest.raises(BadInput, match="has 1 pages, and 0 are the most"):
            document_text(str(path))
    for data in (b"", b"%PDF-1.4\nnothing", pdf_of("x")[:200]):
        path.write_bytes(data)
        with pytest.raises(BadInput, match="PDF"):
            document_text(str(path))
