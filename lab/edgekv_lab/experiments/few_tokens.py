"""Products of a quantised weight by their number of tokens: the page docs/results/together.md.

The native program test-product multiplies a weight that is larger than caches, as the CPU backend
keeps it: llama.cpp's product and edgekv's in turns. "reading" is the time that reading the weight
once takes. Milliseconds, the least of the rounds: of one thread those of the processor, of several
those of the clock.
"""

from __future__ import annotations

import json
import subprocess

from edgekv_lab.experiments.checkout import native
from edgekv_lab.experiments.experiment import ROUNDS, THREADS, Options, experiment, sheet

COLUMNS = (
    ("weight", ""),
    ("tokens", "{}"),
    ("reading, ms", "{:.1f}"),
    ("llama.cpp, ms", "{:.1f}"),
    ("edgekv, ms", "{:.1f}"),
    ("x", "{:.2f}"),
)


@experiment(THREADS, ROUNDS)
def command(o: Options) -> None:
    words = [native("test-product"), "--perf", str(o.threads), str(o.rounds)]
    with sheet(*COLUMNS) as table, subprocess.Popen(words, stdout=-1, stderr=-3) as program:
        for line in program.stdout or ():
            x = json.loads(line)
            name = f"{x['type']}, repacked" if x["repacked"] else x["type"]
            theirs, ours = x["llama_cpp_ms"], x["edgekv_ms"]
            table.add(name, x["tokens"], x["read_ms"], theirs, ours, ours and theirs / ours)
