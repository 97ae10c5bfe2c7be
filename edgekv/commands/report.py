"""Numbers as text: what the cache holds, how fast a turn was, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgekv.commands.stream import Stream
    from edgekv.stats import KVStats

MIB = 1024 * 1024


def mib(n_bytes: float) -> str:
    return f"{n_bytes / MIB:,.1f}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "all"


def cache_line(stats: KVStats) -> str:
    """Tokens seen and kept, bytes now and of a full cache."""
    if stats.mode == "uncompressed":
        return f"{stats.n_seen:,} tokens seen, all kept; KV {mib(stats.n_bytes)} MiB, {mib(stats.n_bytes_full)} MiB of it in use"
    kind, full = (f" as {stats.type_k}", "a full cache in f16") if stats.denser > 1 else ("", "a full cache")
    return (f"{stats.n_seen:,} tokens seen, {stats.n_kept:,.0f} kept ({percent(stats.n_kept, stats.n_seen)}){kind}; "
            f"KV {mib(stats.n_bytes)} MiB{limit(stats)}, {full} {mib(stats.n_bytes_full)} MiB")


def limit(stats: KVStats) -> str:
    return "" if stats.n_bytes_limit is None else f" of at most {mib(stats.n_bytes_limit)}"


def status_line(stats: KVStats, stream: Stream) -> str:
    """`cache_line` and the speeds of a turn."""
    speeds = [f"read {stream.read_tps:,.0f} tokens/s" if stream.read_tps else "",
              f"wrote {stream.write_tps:,.1f} tokens/s" if stream.write_tps else ""]
    return "; ".join([cache_line(stats), *filter(None, speeds)])


def stats_table(stats: KVStats) -> str:
    """Everything `kv_stats()` knows, for people."""
    rows = [
        ("method", stats.method),
        ("ratio asked for", f"{stats.ratio:g}") if stats.n_bytes_limit is None else ("ratio of the last prompt", f"{stats.ratio:.3g}"),
        ("cache type", _types(stats)),
        ("tokens seen", f"{stats.n_seen:,}"),
        ("rows kept", _kept(stats)),
        ("KV cache now", f"{mib(stats.n_bytes)} MiB{limit(stats)}"),
        ("at its peak", f"{mib(stats.n_bytes_peak)} MiB"),
        ("in full" + ", as f16" * (stats.denser > 1), f"{mib(stats.n_bytes_full)} MiB"),
        ("last prompt", f"{stats.prefill_ms:,.0f} ms to read, {stats.compress_ms:,.0f} ms of it to compress"),
        ("read by", stats.mode),
    ]
    return table([*rows, *([("note", stats.note)] if stats.note else [])])


def _types(stats: KVStats) -> str:
    names = stats.type_k if stats.type_k == stats.type_v else f"{stats.type_k}/{stats.type_v}"
    return names + f", {stats.denser:.2f} rows where f16 has one" * (stats.denser > 1)


def _kept(stats: KVStats) -> str:
    if not len(stats.kept):
        return "0"
    return (f"{stats.n_kept:,.1f} of each head on average ({percent(stats.n_kept, stats.n_seen)}), "
            f"from {int(stats.kept.min()):,} to {int(stats.kept.max()):,}")


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Columns of text, two blanks apart, the last one as long as it is."""
    lines = [*([head] if head else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
