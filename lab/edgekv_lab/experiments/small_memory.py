"""A prompt with a model that is larger than memory: seconds, and what is read from the disk.

Make a control group first, such as /sys/fs/cgroup/memory/small with 450M in memory.limit_in_bytes.
Each side is a process in that group, after the system has dropped its cached files (so it is for
root). Neither side repacks weights: both are ended by the system if they do. The prompt's tokens
are any.
"""

from __future__ import annotations

import os
from pathlib import Path

from edgekv.commands.declare import option
from edgekv_lab.experiments.checkout import side
from edgekv_lab.experiments.experiment import (
    METHOD,
    MODEL,
    THREADS,
    Options,
    experiment,
    sheet,
    tokens,
)

COLUMNS = (
    ("side", ""),
    ("first word, s", "{:.1f}"),
    ("read from disk, MiB", "{:,.0f}"),
    ("s a token", "{:.2f}"),
    ("read a token, MiB", "{:,.0f}"),
    ("peak, MiB", "{:,.0f}"),
)


@experiment(
    MODEL,
    option("--group", required=True, help="Folder of a control group with a limit."),
    tokens(4000, "the prompt"),
    METHOD,
    THREADS,
)
def command(o: Options) -> None:
    ours = {"kv_ratio": 0.2, "kv_method": o.method}
    with sheet(*COLUMNS) as table:
        for name, cache in {"unpatched, f16": None, "edgekv": ours}.items():
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
            request = {"model": o.model, "group": o.group, "tokens": o.tokens}
            request |= {"threads": o.threads, "cache": cache}
            got = side("small_memory:measured", request, cache is None)
            read, each = got["prompt_bytes"] / 2**20, got["each_bytes"] / 2**20
            table.add(name, got["first"], read, got["each"], each, got["peak"] / 2**20)
