"""What a model that was loaded takes of main memory."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgekv_lab.bench import synthetic
from tests import lib
from tests.engine import load, logits
from tests.rpc_server import serving


def resident(path: Path) -> int:
    """Bytes of a file that are mapped into this process and lie in main memory."""
    n, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            here = line.endswith(f" {path}")
        elif here and line.startswith("Rss:"):
            n += 1024 * int(line.split()[1])
    return n


def write(path: Path, weights: str) -> Path:
    shape = replace(synthetic.SHAPES["llama-1b"], n_layer=2, n_vocab=1000, n_embd=1024, n_ff=4096)
    synthetic.write(path, shape, weights)
    return path


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("weights", "is_repacked"), [("q4_0", True), ("f16", False)])
def test_weights_that_were_repacked_are_in_memory_once(tmp_path, weights, is_repacked):
    if is_repacked and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("llama.cpp repacks nothing for this processor")
    path = write(tmp_path / "model.gguf", weights)
    llm = load(path, n_ctx=256)
    share = resident(path) / path.stat().st_size
    assert share < 0.5 if is_repacked else share > 0.8
    llm.eval(range(4))
    other = load(path, n_ctx=256, repack=False, after=range(4))
    assert lib.nmse(logits(llm), logits(other)) < 1e-3, "and all that it needs is there"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_weights_on_a_device_leave_the_process(tmp_path):
    path = write(tmp_path / "model.gguf", "f16")
    with serving() as (endpoint, _):
        llm = load(path, n_ctx=256, kv_ratio=1.0, rpc_servers=endpoint, n_gpu_layers=99)
        assert resident(path) < 0.5 * path.stat().st_size
        llm.close()
