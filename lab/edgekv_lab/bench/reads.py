"""What writing a token reads at least: the weights that it touches and the KV entries in use; and
how fast it was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgekv.base.sizes import mib
from edgekv_lab import markdown
from edgekv_lab.bench.spec import test_name

Record = dict[str, Any]
GB = 1e9
TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
"""Tensors of which a token reads one row."""
EXPERTS = "_exps."


def weights_read(
    sizes: Mapping[str, int], n_bytes: int, n_experts: int = 0, n_used: int = 0
) -> int:
    """Bytes of the weights that a written token touches.

    sizes: of the tensors, by their GGUF names; n_bytes: of all weights. A table of tokens counts
    only where it is the output as well. n_experts, n_used: of a mixture of experts, how many there
    are and how many see a token.
    """
    read = n_bytes
    for name, size in sizes.items():
        if name in TABLES and not (name == TABLES[0] and "output.weight" not in sizes):
            read -= size
        elif EXPERTS in name and n_experts:
            read -= size - size * n_used // n_experts
    return read


def per_token(r: Record) -> int:
    """Bytes that a written token of a row reads at least."""
    return int(r["read_bytes_weights"] + r["read_bytes_kv"])


def speed(r: Record) -> float:
    """Bytes per second that a row read at least while it wrote; 0 for a row that read a prompt."""
    return per_token(r) * r["avg_ts"] if r["read_bytes_weights"] else 0.0


def share(r: Record) -> float | None:
    """`speed` as a share of what the machine's memory gave; None if one of them was not
    measured."""
    return speed(r) / r["mem_bandwidth"] if speed(r) and r["mem_bandwidth"] else None


def as_md(records: Sequence[Record], settings: Sequence[str]) -> str:
    """A table of the rows that only write; empty if there is none. settings: the cache of each
    record, in words."""
    writing = [(r, setting) for r, setting in zip(records, settings, strict=True) if speed(r)]
    if not writing:
        return ""
    head = ("test", "cache", "read per token, MiB", "weights + KV", "GB/s", "of the memory's speed")
    rows = []
    for r, setting in writing:
        reached = share(r)
        rows.append(
            (
                test_name(r["n_prompt"], r["n_gen"], r["n_depth"], r["n_parallel"], r["spec_type"]),
                setting,
                mib(per_token(r)),
                f"{mib(r['read_bytes_weights'])} + {mib(r['read_bytes_kv'])}",
                f"{speed(r) / GB:.1f}",
                "not measured" if reached is None else f"{100 * reached:.0f} %",
            )
        )
    table = markdown.table(head, rows, ("test", "cache"))
    return "\n".join([table, *notes([r for r, _ in writing])]) + "\n"


def notes(records: Sequence[Record]) -> list[str]:
    """What the numbers mean, a sentence a line."""
    found = [
        "Writing a token reads at least the weights that it touches and the KV entries in use."
    ]
    known = sorted({(r["n_threads"], r["mem_bandwidth"]) for r in records if r["mem_bandwidth"]})
    found += [
        f"Reading alone, this machine's memory gave {n_bytes / GB:.1f} GB/s to {n} "
        f"thread{'s' * (n != 1)} (measured in the same run)."
        for n, n_bytes in known
    ]
    if any((share(r) or 0) > 1 for r in records):
        found.append(
            "Above 100 %: part of it was read from the processor's caches, which are faster than "
            "the memory."
        )
    return found
