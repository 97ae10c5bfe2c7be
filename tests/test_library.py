"""The native library beside a stock llama-cpp-python, and what llama.cpp logs."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgekv.library import lib_dir, library_path
from edgekv.model.facts import instructions
from tests.lib import ROOT


@pytest.fixture(scope="module")
def stock_python(stock_lib, tmp_path_factory):
    """Folder with the stock package `llama_cpp` and its own, unpatched libraries inside."""
    folder = tmp_path_factory.mktemp("stock")
    command = [sys.executable, "native/upstream.py", "bindings", "--stock"]
    subprocess.run([*command, "--out", str(folder / "llama_cpp")], cwd=ROOT, check=True)
    (folder / "llama_cpp" / "lib").symlink_to(stock_lib)
    return folder


def test_the_bindings_say_what_types_they_have_and_what_they_lack(tmp_path):
    command = [sys.executable, "native/upstream.py", "bindings", "--out", str(tmp_path / "made")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "made" / "py.typed").is_file()
    lacking = {name: "reads text only" for name in ("mtmd_cpp", "llava_cpp")}  # of pictures
    for name, why in {**lacking, "server": "edgekv serve"}.items():
        with pytest.raises(ImportError, match=why):
            runpy.run_path(str(tmp_path / "made" / f"{name}.py"))


def python(code: str, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture
def checkout(tmp_path):
    """Folder with the package's sources, unbuilt."""
    built = shutil.ignore_patterns("lib", "llama_cpp", "__pycache__", "data")
    shutil.copytree(ROOT / "edgekv", tmp_path / "checkout" / "edgekv", ignore=built)
    return tmp_path / "checkout"


def test_in_a_checkout_the_installed_libraries_are_used(tiny, checkout):
    code = (
        "import sys, edgekv\n"
        "llm = edgekv.Llama(sys.argv[1], n_ctx=512, kv_ratio=0.5, verbose=False)\n"
        "from edgekv.library import lib_dir\n"
        "print(edgekv.__file__, lib_dir(), sep='\\n')\n"
    )
    sources, libraries = unbuilt(code, checkout, tiny("llama-gqa")).stdout.splitlines()
    assert Path(sources).parent == checkout / "edgekv"
    assert Path(libraries).is_dir() and checkout not in Path(libraries).parents


def test_in_a_checkout_with_nothing_installed_the_right_python_is_named(checkout):
    code = (
        "import os, sys\n"
        "sys.path[1:] = [p for p in sys.path[1:] if not os.path.isdir(os.path.join(p, 'edgekv'))]\n"
        "import edgekv.native\n"
    )
    assert "pip install ." in unbuilt(code, checkout).stderr.splitlines()[-1]
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert f"or call {python}" in unbuilt(code, checkout).stderr.splitlines()[-1]


def unbuilt(code, folder, *words):
    """Run `code` in a folder with sources, as without EDGEKV_LIB."""
    env = {name: value for name, value in os.environ.items() if name != "EDGEKV_LIB"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=folder,
        text=True,
        capture_output=True,
        env=env,
    )


BOTH = """
import sys
{imports}
def answer(kind, **options):
    llm = kind(sys.argv[1], n_ctx=512, n_threads=2, verbose=False, **options)
    return llm.create_completion("the rain", max_tokens=8, temperature=0)["choices"][0]["text"]
stock = answer(llama_cpp.Llama)
ours = answer(edgekv.Llama)
small = answer(edgekv.Llama, kv_ratio=0.5)
again = answer(llama_cpp.Llama)
assert not issubclass(edgekv.Llama, llama_cpp.Llama)
assert "edgekv" not in llama_cpp.llama_cpp._lib._name
print(repr([stock, ours, small, again]))
"""
ORDERS = (
    "import llama_cpp, edgekv",
    "import edgekv, llama_cpp",
    "import edgekv; edgekv.Llama; import llama_cpp",
)


@pytest.mark.parametrize("imports", ORDERS)
def test_a_stock_llama_cpp_lives_in_the_same_process(tiny, stock_python, imports):
    path = os.pathsep.join([str(stock_python), os.environ.get("PYTHONPATH", "")])
    done = python(BOTH.format(imports=imports), tiny("llama-gqa"), PYTHONPATH=path)
    stock, ours, small, again = eval(done.stdout)
    assert stock == ours == small == again


def test_children_of_the_process_find_their_own_library():
    """A variable in the environment would make a child's stock llama_cpp load our library."""
    done = python(
        "import os; before = dict(os.environ); import edgekv.native\n"
        "print(dict(os.environ) == before)"
    )
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("name", ["gemma3", "llama-gqa"])
def test_nothing_is_logged_without_verbose(tiny, name):
    code = (
        "import sys, edgekv\n"
        "for ratio in (1, 0.2):\n"
        "    llm = edgekv.Llama(sys.argv[1], n_ctx=512, kv_ratio=ratio, verbose=False)\n"
        "    llm.create_completion('the rain', max_tokens=4)\n"
    )
    done = python(code, tiny(name))
    assert done.stdout == done.stderr == ""


def test_verbose_logs_each_line_once_on_stderr(tiny):
    code = (
        "import sys, edgekv\n"
        "for i in range(2):\n"
        "    edgekv.Llama(sys.argv[1], n_ctx=512, kv_ratio=0.2, verbose=True)\n"
    )
    done = python(code, tiny("llama-gqa"))
    assert done.stdout == ""
    for line in ("print_info: arch ", "llama_context: n_ctx "):
        assert done.stderr.count(line) == 2, "once for each of the two models"


def test_a_damaged_file_is_refused_with_llama_cpps_reason(tmp_path):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    code = (
        "import sys, edgekv\n"
        "try: edgekv.Llama(sys.argv[1], verbose=False)\n"
        "except edgekv.BadInput as error: print(error)\n"
    )
    done = python(code, path)
    assert "version" in done.stdout and done.stderr == ""


@pytest.mark.skipif(
    not any(lib_dir().glob("*edgekv-ggml-cpu-*")), reason="this build has one CPU library"
)
def test_the_cpu_library_with_the_most_instructions_of_this_processor_is_opened():
    """As ggml says of each library; those for other processors are opened and closed again."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        pytest.skip("asks Linux for the processor's instructions")
    flags = {
        x for line in path.read_text().splitlines() if line[:5] == "flags" for x in line.split()
    }
    for name, flag in (("AVX2", "avx2"), ("AVX512", "avx512f"), ("AVX512_BF16", "avx512_bf16")):
        assert (name in instructions()) == (flag in flags)


def test_llama_links_to_no_kernel_of_the_cpu():
    """So that a build may bring several CPU libraries."""
    library = library_path("llama")
    if shutil.which("nm") is None or library.suffix != ".so":
        pytest.skip("needs nm and an ELF library")
    symbols = subprocess.check_output(["nm", "-D", "--undefined-only", str(library)], text=True)
    assert "ggml_mul_mat" in symbols and "edgekv_cpu" not in symbols
