"""What waiting threads cost: processes beside each other, and one that has nothing to do."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.engine import load
from tests.lib import ROOT

DECODE = """
import sys, time
from edgekv import Llama
n = int(sys.argv[2])
llm = Llama(sys.argv[1], n_ctx=512, n_threads=n, n_threads_batch=n, verbose=False)
llm.eval([5])
print("ready", flush=True)
sys.stdin.readline()
begin = time.process_time()
for token in range(20):
    llm.eval([100 + token])
print(time.process_time() - begin)
"""


def seconds(model: os.PathLike[str], n_threads: int, n_processes: int) -> float:
    """Processor time in seconds that each process takes for its tokens, where several write at
    once.
    """
    command = [sys.executable, "-c", DECODE, str(model), str(n_threads)]
    children = [
        subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(n_processes)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    took = [float(child.communicate(timeout=300)[0]) for child in children]
    return max(took)


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is no other core to wait for")
def test_processes_beside_each_other_do_not_burn_the_time_they_wait(demo_model):
    """A thread that spins where another one could run makes both processes several times as
    slow.
    """
    alone, beside = (seconds(demo_model, os.cpu_count(), n) for n in (1, 2))
    assert beside < 2 * alone


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_model_with_nothing_to_do_takes_no_processor_time(tiny, text, ratio):
    llm = load(tiny("llama-gqa"), kv_ratio=ratio, n_threads=2, after=text(300))
    llm.eval([5])
    time.sleep(0.2)
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.05


def test_the_threads_that_write_can_be_changed(tiny, text):
    llm = load(tiny("llama-gqa"), kv_ratio=0.5, after=text(200))
    llm.set_n_threads(2)
    from edgekv.native import llama_cpp as native

    assert native.llama_n_threads(llm.ctx) == 2
    assert native.llama_n_threads_batch(llm.ctx) == llm.context_params.n_threads_batch
