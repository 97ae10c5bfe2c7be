"""Numbers as text: what the cache holds, how fast a turn was, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from edgekv.sizes import mib, percent

if TYPE_CHECKING:
    from edgekv.commands.stream import Stream
    from edgekv.stats import KVStats


def cache_line(stats: KVStats) -> str:
    """What the cache takes and holds, bytes first."""
    seen = f"{stats.n_seen:,} tokens seen"
    if stats.mode == "uncompressed":
        return (f"{seen}, all kept; KV {mib(stats.n_bytes_used)} MiB of the {mib(stats.n_bytes)} MiB "
                f"allocated for {stats.n_ctx:,} tokens")
    return f"{seen}; KV {share_line(stats)}; {kept_line(stats)}"


def share_line(stats: KVStats) -> str:
    """Bytes beside those of a full f16 cache: '20 % of the memory: 66.0 of 331.0 MiB'."""
    if stats.n_bytes >= stats.n_bytes_full:  # a few tokens in the room for the next ones
        return f"{mib(stats.n_bytes)} MiB"
    return (f"{percent(stats.n_bytes, stats.n_bytes_full)} of the memory: "
            f"{mib(stats.n_bytes)} of {mib(stats.n_bytes_full)} MiB")


def kept_line(stats: KVStats) -> str:
    """The tokens that are kept, and as what: '38 % of the tokens, as q8_0'."""
    kinds = sorted({stats.type_k, stats.type_v}, reverse=True)
    return f"{percent(stats.n_kept, stats.n_seen)} of the tokens, as {'/'.join(kinds)}"


def limit_line(stats: KVStats) -> str:
    """What --kv-memory allows and what of it is reserved."""
    limit, reserved = stats.n_bytes_limit or 0, stats.n_bytes_reserved
    return (f"{mib(limit)} MiB: {mib(limit - reserved)} MiB for kept tokens, {mib(reserved)} MiB "
            "reserved for new tokens")


def status_line(stats: KVStats, stream: Stream) -> str:
    """`cache_line` and the speeds of a turn."""
    speeds = [f"read {stream.read_tps:,.0f} tokens/s" if stream.read_tps else "",
              f"wrote {stream.write_tps:,.1f} tokens/s" if stream.write_tps else ""]
    return "; ".join([cache_line(stats), *filter(None, speeds)])


def stats_table(stats: KVStats) -> str:
    """Everything `kv_stats()` knows, for people."""
    limited = stats.n_bytes_limit is not None
    rows = [
        ("KV cache", cache_now(stats)),
        ("full f16 cache", f"{mib(stats.n_bytes_full)} MiB for the tokens seen"),
        ("at its peak", f"{mib(stats.n_bytes_peak)} MiB"),
        *([("limit", limit_line(stats))] if limited else []),
        ("share of the last prompt" if limited else "share asked for", percent(stats.ratio, 1)),
        ("tokens seen", f"{stats.n_seen:,} of {stats.n_ctx:,}"),
        ("tokens kept", _kept(stats)),
        ("cache type", kinds(stats)),
        ("method", stats.method),
        ("last prompt", f"{stats.prefill_ms:,.0f} ms to read, {stats.compress_ms:,.0f} ms of it to compress"),
        ("read by", stats.mode),
    ]
    return table([*rows, *([("note", stats.note)] if stats.note else [])])


def cache_now(stats: KVStats) -> str:
    """Bytes allocated, used, and the share of a full f16 cache."""
    if stats.mode == "uncompressed":
        return (f"{mib(stats.n_bytes)} MiB allocated for {stats.n_ctx:,} tokens, "
                f"{mib(stats.n_bytes_used)} MiB of it used")
    return share_line(stats)


def kinds(stats: KVStats) -> str:
    """The cache types, and how many entries they hold where f16 holds one."""
    names = stats.type_k if stats.type_k == stats.type_v else f"{stats.type_k}/{stats.type_v}"
    more = f", {stats.per_f16:.2f} entries in the bytes of one in f16"
    return names + more * (stats.per_f16 > 1)


def _kept(stats: KVStats) -> str:
    if not stats.n_seen:
        return "0"
    heads = stats.kept[stats.kept.any(axis=1)]
    return (f"{percent(stats.n_kept, stats.n_seen)}: {stats.n_kept:,.0f} per KV head on average, "
            f"from {int(heads.min()):,} to {int(heads.max()):,}")


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Columns of text, two blanks apart, the last one as long as it is."""
    lines = [*([head] if head else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
