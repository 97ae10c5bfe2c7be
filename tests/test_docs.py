"""Docs that cannot drift: pages that build, links, paths in prose, generated pages, patches."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import click
import pytest

import edgekv
import edgekv.llama_cpp as llama_cpp
from edgekv.commands import load
from edgekv.commands.values import AUTO_STORES
from edgekv_lab import experiments, record
from edgekv_lab.commands import docs_python
from tests import docs_commands, models, support_table
from tests.cli import typed
from tests.test_layers import ROOMS
from tests.test_pack import pdf_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-ins for CUDA and Metal need Linux")
def test_the_table_of_kernels_is_up_to_date():
    text = support_table.PAGE.read_text(encoding="utf-8")
    assert support_table.updated(text) == text and support_table.make() in text, (
        "python -m tests.support_table writes it anew"
    )


def test_the_python_page_is_the_docstrings():
    text = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    assert text == docs_python.page(), "run: python -m edgekv_lab.commands.docs"


def test_every_public_name_is_on_the_python_page():
    text = docs_python.page()
    names = [name for name in edgekv.__all__ if not name.startswith("_")]
    methods = [name for name in dir(edgekv.Llama) if name.startswith("kv_")]
    assert {"kv_cancel", "kv_load", "kv_save", "kv_set", "kv_stats"} <= set(methods)
    assert [n for n in names if f"edgekv.{n}" not in text] == []
    assert [n for n in methods if f"### Llama.{n}\n" not in text] == []


def table_of(section: str, page: str = "docs/architecture.md") -> list[str]:
    """The names in the first column of a section's table."""
    text = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {section}\n")[1]
    rows = re.findall(r"^\| (.*?) \|", text.split("\n## ")[0], re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(.+?)`", row)]


def test_the_table_of_rooms_has_them_in_order():
    places = {name: name.replace("lab/", "../lab/edgekv_lab/") for name in ROOMS}
    rooms = [name for name, place in places.items() if (ROOT / "edgekv" / place).is_dir()]
    assert table_of("Where things lie") == [f"{name}/" for name in rooms]


def test_the_parents_methods_that_are_overridden_are_listed():
    below = edgekv.Llama.__mro__[: edgekv.Llama.__mro__.index(llama_cpp.Llama)]
    own = {name for kind in below for name, value in vars(kind).items() if callable(value)}
    overridden = {name for name in own if hasattr(llama_cpp.Llama, name)}
    assert sorted(table_of("From the command line to tokens")) == sorted(overridden)


@pytest.mark.parametrize("name", ["cli", "memory", "methods", "eval", "bench", "python-api", ""])
def test_what_auto_stores_is_one_sentence_everywhere(name):
    page = f"docs/{name}.md" if name else "README.md"
    text = " ".join((ROOT / page).read_text(encoding="utf-8").replace("`", "").split())
    assert AUTO_STORES in text.replace("'auto'", "auto"), f"{page} lacks: {AUTO_STORES}"
    others = r"auto (?:stores|picks|takes|:)?\s?(?:f16|q8_0)|as auto stores"
    assert not re.search(others, text), f"{page} says it in other words"


OUTSIDE = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "patches/README.md"]
OUTSIDE += ["lab/README.md"]
OUTSIDE += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.md"))
"""Pages that mkdocs does not see."""
PAGES = OUTSIDE + sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))


def test_the_pages_build_and_their_links_lead_somewhere(tmp_path):
    build = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *build], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "results" / "default.html").exists()


@pytest.mark.parametrize("page", OUTSIDE)
def test_links_of_pages_outside_the_site_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        there = (ROOT / page).parent / target
        assert "://" in target or there.exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_prose_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in re.findall(
        r"`((?:edgekv|native|patches|tests|docs|examples|benchmarks)/[\w./-]+\.\w+)`", text
    ):
        assert (ROOT / path).exists() or path.startswith("edgekv/lib/"), f"{page} names {path}"


@pytest.mark.parametrize("page", PAGES)
def test_examples_in_python_are_python(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(example, page, "exec")


GENERATED = {"docs/cli.md", "docs/python-api.md"}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED])
def test_commands_in_blocks_are_what_the_parser_takes(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for words in docs_commands.commands(text):
        try:
            docs_commands.parsed(words)
        except (click.exceptions.NoArgsIsHelpError, click.MissingParameter):
            assert len(words) <= 2, f"{page}: edgekv {' '.join(words)}"  # a command's mere name
        except (click.ClickException, edgekv.EdgeKVError) as error:
            stands_for_a_value = re.search("'[A-Z]+' is not", str(error))
            assert stands_for_a_value, f"{page}: edgekv {' '.join(words)}: {error}"
    for words in docs_commands.commands(text, docs_commands.EXPERIMENTS):
        try:
            docs_commands.parsed(words, experiments.main)
        except click.ClickException as error:
            stands_for_a_value = re.search(r"'[A-Z]+'( is not|\.)", error.format_message())
            assert stands_for_a_value, f"{page}: edgekv-lab {' '.join(words)}: {error}"
    for script in docs_commands.scripts(text):
        assert (ROOT / script).exists(), f"{page} runs {script}"


@pytest.mark.parametrize("page", [page for page in PAGES if "results" not in page])
def test_commands_in_prose_are_there(page):
    for words in docs_commands.quoted((ROOT / page).read_text(encoding="utf-8")):
        try:
            docs_commands.parsed([word for word in words if not word.isupper()])
        except (click.NoSuchOption, click.exceptions.NoSuchCommand) as error:
            raise AssertionError(f"{page}: edgekv {' '.join(words)}: {error}") from None
        except (click.ClickException, click.exceptions.Exit):
            pass  # a part of a command


def test_a_wrong_command_in_a_page_is_found():
    page = "    $ EDGEKV_X=1 python3 cli.py runn x | edgekv run m --kv-ratoi 0.2  # 'text'\n"
    wrong = list(docs_commands.commands(page))
    assert wrong == [["runn", "x"], ["run", "m", "--kv-ratoi", "0.2"]]
    for words in wrong:
        with pytest.raises(click.UsageError, match="No such"):
            docs_commands.parsed(words)


RUN = {"chat", "run", "pack", "look", "fit", "info", "methods"}
"""Commands that a tiny model is quick with."""


WITH_COMMANDS = {"README.md": 5, "docs/usage.md": 5}
WITH_COMMANDS |= {f"docs/{page}.md": 1 for page in ("drafts", "index", "recall", "server")}
"""Pages whose commands run on a tiny model, and how many do at least."""


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_work_as_printed(page, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "learn", lambda *_: None)
    monkeypatch.setenv("LLAMA_ARG_N_PREDICT", "1")
    models.write_adapter(tmp_path / "style.gguf", "llama-gqa")
    (tmp_path / "model.gguf").write_bytes(tiny("llama-gqa").read_bytes())
    (tmp_path / "report.pdf").write_bytes(pdf_of("the costs are high"))
    for name in ("report.txt", "notes.md"):
        (tmp_path / name).write_text("the costs are high " * 9, encoding="utf-8")
    lines = docs_commands.commands((ROOT / page).read_text(encoding="utf-8"))
    of_tiny = {"model.gguf", "report.kvpack"}
    tried = [words for words in lines if words[0] in RUN and of_tiny & {*words}]
    assert len(tried) >= WITH_COMMANDS[page]
    for words in tried:
        if "--override-kv" in words:
            continue  # names a number that the tiny model does not have
        done = typed("", *words)
        assert done.exit_code == 0, f"{page}: edgekv {' '.join(words)}: {done.output}"


@pytest.mark.parametrize(("page", "most"), [("README.md", 150), ("docs/methods.md", 150)])
def test_pages_for_newcomers_stay_short(page, most):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize("page", sorted(path.stem for path in RESULTS.glob("data/*.json")))
def test_tables_of_results_are_what_the_data_give(page):
    make = runpy.run_path(str(RESULTS / "make.py"))
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    assert text == make["updated"](page), "run: python docs/results/make.py"
    data = record.read(RESULTS / "data" / f"{page}.json")
    marks = re.findall(r"<!-- table: (\S+) -->", text)
    assert marks == list(data) and text.count("\n| ---") == len(marks)
    for table in data.values():
        assert all((table.what, table.date, table.commit, table.machine, table.command))
    for picture in make["pictures"](page):
        assert f"({picture}.png)" in text and (RESULTS / f"{picture}.png").exists()


def test_no_page_of_results_has_a_table_without_data():
    pages = {path.stem for path in RESULTS.glob("*.md")}
    with_data = {path.stem for path in RESULTS.glob("data/*.json")}
    assert pages - with_data == {"index"}


def patches() -> dict[str, str]:
    """Name -> text of each patch, in the order in which they are applied."""
    lines = (ROOT / "patches" / "series").read_text(encoding="utf-8").splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    return {name: (ROOT / "patches" / name).read_text(encoding="utf-8") for name in names}


def test_the_patches_are_described():
    text = (ROOT / "patches" / "README.md").read_text(encoding="utf-8")
    found = patches()
    assert found and all(f"`{name}`" in text for name in found)
    for patch in found.values():
        header = patch.split("---", 1)[0]
        assert all(field in header for field in ("Reason:", "Remove-When:", "Test:"))


def test_the_patches_are_counted():
    found = patches().values()
    n_hunks = sum(len(re.findall("^@@ ", patch, re.MULTILINE)) for patch in found)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"There are {len(found)} patches with {n_hunks} hunks" in text
