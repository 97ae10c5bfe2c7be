"""A long text with an archive in less memory than its full cache takes: are answers right?

    GROUP=/sys/fs/cgroup/small
    mkdir $GROUP && echo 300M > $GROUP/memory.max        # version 1: memory.limit_in_bytes
    python benchmarks/archive_limited.py -m MODEL.gguf --group $GROUP [--tokens 32000]

A text with needles is read by a process in that control group, page cache counted in (so it is for
root, or for a group of one's own). Then each needle is asked for, and the conversation goes back to
the text's end. Printed are needles that were found, the limit and the full f16 cache, the process's
own memory at its peak, and what of the group is page cache at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from process import heading, python  # noqa: E402

MIB = 2**20
CITIES = (
    "Oslo Lima Cairo Quito Riga Accra Hanoi Sofia Tunis Baku Dakar Seoul Minsk Havana Nairobi"
    " Lisbon Vienna Dublin Prague Rome"
).split()
NEEDLE = "The special magic number for {} is {}."
QUESTION = "What is the special magic number for {} mentioned in the text? Answer with the number."
HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(measured(json.load(sys.stdin))))
        return
    print(heading("archive_limited.py"))
    got = json.loads(python([__file__, "--child"], json.dumps(vars(options))))
    print("| what | |\n| --- | ---: |")
    for name, value in got.items():
        print(f"| {name} | {value} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--group", help="folder of a control group with a limit; none: no limit")
    parser.add_argument("--folder", default="temporary", help="of the archive, on a disk")
    parser.add_argument("--tokens", type=int, default=32000)
    parser.add_argument("-n", type=int, default=20, help="needles")
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--recall", type=float, default=0.0)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true")
    return parser.parse_args()


def measured(o: dict[str, Any]) -> dict[str, str]:
    if o["group"]:
        (Path(o["group"]) / "cgroup.procs").write_text("0")
    import edgekv
    from edgekv.base.machine import rss_peak

    llm = edgekv.Llama(
        o["model"],
        n_ctx=-(-o["tokens"] // 256) * 256 + 512,
        n_threads=o["threads"],
        verbose=False,
        repack=False,
        kv_ratio=o["ratio"],
        kv_method=o["method"],
        kv_archive=o["folder"],
        kv_recall=o["recall"],
    )
    rng = Random(1)
    numbers = {city: str(rng.randrange(1_000_000, 10_000_000)) for city in CITIES[: o["n"]]}
    text = haystack(llm, numbers, o["tokens"] - 100, rng)
    begin = time.perf_counter()
    found = sum(number in answer(llm, text, city) for city, number in numbers.items())
    seconds, stats = time.perf_counter() - begin, llm.kv_stats()
    return {
        "needles found": f"{found} of {len(numbers)}",
        "tokens": f"{stats.n_seen:,}",
        "limit, MiB": limit_of(o["group"]),
        "full f16 cache, MiB": f"{stats.n_bytes_full / MIB:,.0f}",
        "cache in memory, MiB": f"{stats.n_bytes / MIB:,.1f}",
        "archive, MiB": f"{stats.n_bytes_archive / MIB:,.0f}",
        "process at its peak, with the model's pages, MiB": f"{(rss_peak() or 0) / MIB:,.0f}",
        "page cache of the group at the end, MiB": cached_of(o["group"]),
        "reading and all answers, s": f"{seconds:,.0f}",
    }


def haystack(llm: Any, numbers: dict[str, str], n_tokens: int, rng: Random) -> str:
    n_each = len(llm.tokenize(HAY.encode(), add_bos=False))
    needles = [NEEDLE.format(*x) for x in numbers.items()]
    n_hay = (n_tokens - 24 * len(needles)) // (n_each + 1)
    lines = [HAY] * n_hay
    for place, needle in zip(sorted(rng.sample(range(n_hay), len(needles)), reverse=True), needles):
        lines.insert(place, needle)
    return "\n".join(lines)


def answer(llm: Any, text: str, city: str) -> str:
    question = QUESTION.format(city)
    message = [{"type": "text", "text": text}, {"type": "text", "text": "\n\n" + question}]
    reply = llm.create_chat_completion(
        [{"role": "user", "content": message}], max_tokens=24, temperature=0
    )
    return str(reply["choices"][0]["message"]["content"])


def limit_of(group: str | None) -> str:
    for name in ("memory.max", "memory.limit_in_bytes"):
        if group and (Path(group) / name).exists():
            return f"{int((Path(group) / name).read_text()) / MIB:,.0f}"
    return "none"


def cached_of(group: str | None) -> str:
    if not group:
        return "-"
    said = dict(line.split() for line in (Path(group) / "memory.stat").read_text().splitlines())
    return f"{int(said.get('file', said.get('cache', 0))) / MIB:,.0f}"


if __name__ == "__main__":
    main()
