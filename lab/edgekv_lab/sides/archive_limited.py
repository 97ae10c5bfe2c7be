"""A long text with an archive, in the memory of a control group."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

MIB = 2**20
CITIES = (
    "Oslo Lima Cairo Quito Riga Accra Hanoi Sofia Tunis Baku Dakar Seoul Minsk Havana Nairobi"
    " Lisbon Vienna Dublin Prague Rome"
).split()
NEEDLE = "The special magic number for {} is {}."
QUESTION = "What is the special magic number for {} mentioned in the text? Answer with the number."
HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def measured(o: dict[str, Any]) -> dict[str, str]:
    """What is printed, by its name."""
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
