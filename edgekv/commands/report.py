"""Numbers as text: what the cache holds, how fast a turn was, tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from edgekv.base.sizes import mib, percent, share, size_text

if TYPE_CHECKING:
    from edgekv.base.stats import KVStats
    from edgekv.commands.options import EngineOptions
    from edgekv.commands.stream import Stream

MUCH_NEARER = 2.0
"""Times as near that recall came, from which a user hears of it."""
SPEED_FROM = 16
"""Tokens from which the speed of reading says something: fewer take as long as one."""


def cache_parts(stats: KVStats) -> list[str]:
    """What the cache holds and takes, and its limit if it has one."""
    if stats.mode == "uncompressed":
        used, allocated = mib(stats.n_bytes_used), mib(stats.n_bytes)
        return [f"{stats.n_seen:,} tokens seen, all kept", f"KV {used} of {allocated} MiB"]
    limit = [] if stats.n_bytes_limit is None else [f"limit {mib(stats.n_bytes_limit)} MiB"]
    kept = percent(stats.n_kept, stats.n_seen)
    return [f"{stats.n_seen:,} tokens seen, {kept} kept", f"KV {share_line(stats)}", *limit]


def share_line(stats: KVStats) -> str:
    """`share` of a conversation that has begun: a few tokens take room for the next ones, too."""
    full = stats.n_bytes_full
    return share(stats.n_bytes, full) if full else f"{mib(stats.n_bytes)} MiB"


def limit_line(stats: KVStats) -> str:
    """What --kv-memory allows and what of it is reserved."""
    limit, reserved = stats.n_bytes_limit or 0, stats.n_bytes_reserved
    return (
        f"{mib(limit)} MiB: {mib(limit - reserved)} for kept tokens, {mib(reserved)} reserved "
        "for new tokens and sliding windows"
    )


def compression_line(stats: KVStats, wish: EngineOptions) -> str:
    """Whether the cache is compressed, and to what: for the beginning of a chat."""
    if stats.mode == "uncompressed" and stats.note:
        return f"compression: off; the model {stats.note}"
    parts = [
        f"keeps {100 * wish.kv.ratio:g} % of the cache's memory" * (wish.kv.ratio < 1),
        f"keeps {wish.kv.budget or 0:,} tokens of each KV head" * (wish.kv.budget is not None),
        f"keeps {wish.kv.budget_mb or 0:g} MiB of a prompt" * (wish.kv.budget_mb is not None),
        f"the cache stays within {size_text(wish.kv.memory or 0)}" * (wish.kv.memory is not None),
    ]
    if stats.method == "full" or not any(parts):
        return "compression: off; --kv-ratio 0.2 keeps a fifth of the cache's memory"
    return f"compression: {', '.join(filter(None, parts))}, method {method_name(stats)}"


def recall_line(stats: KVStats) -> str:
    """What recall would bring, where a user should hear of it who did not ask; else empty."""
    if stats.recall or stats.recall_gain is None or stats.recall_gain < MUCH_NEARER:
        return ""
    return (
        f"with --kv-recall auto answers came {stats.recall_gain:.1f} times as near to the full"
        " cache's in the same memory, when this model was prepared; K and V of all tokens then lie"
        " in a file"
    )


def method_name(stats: KVStats) -> str:
    """The method's name as it was typed; of 'auto' what it chose if that takes longer."""
    from edgekv.choice.choose import AUTO, WITHOUT_PROFILE

    if not stats.why:
        return stats.method
    return f"{stats.method} ({stats.why})" if stats.method == WITHOUT_PROFILE else AUTO


def status_line(stats: KVStats, stream: Stream, width: int | None) -> str:
    """`cache_parts` and the speeds of a turn, as many of them as a terminal's line of `width`
    columns has room for (None: all); that of reading from SPEED_FROM tokens on.
    """
    parts = [
        *cache_parts(stats),
        f"wrote {stream.write_tps:,.1f} tokens/s" if stream.write_tps else "",
        f"read {stream.read_tps:,.0f} tokens/s" if stream.n_read >= SPEED_FROM else "",
    ]
    line, *others = filter(None, parts)
    for part in others:
        if width is None or len(line) + 2 + len(part) <= width:
            line += f"; {part}"
    return line


def stats_table(stats: KVStats, width: int | None = None) -> str:
    """Everything `kv_stats()` knows, for people. width: see `table`."""
    limited, peak = stats.n_bytes_limit is not None, f"{mib(stats.n_bytes_peak)} MiB"
    rows = [
        ("KV cache", cache_now(stats)),
        ("full f16 cache", f"{mib(stats.n_bytes_full)} MiB for the tokens seen"),
        ("at its peak", "; ".join(filter(None, [peak, stats.peak_note]))),
        *([("limit", limit_line(stats))] if limited else []),
        *([("archive", archive_line(stats))] if stats.n_bytes_archive else []),
        *([("checkpoints", checkpoint_line(stats))] if stats.n_bytes_checkpoints else []),
        *([("draft model", f"{mib(stats.n_bytes_draft)} MiB more")] if stats.n_bytes_draft else []),
        ("share of the last prompt" if limited else "share asked for", percent(stats.ratio, 1)),
        ("tokens seen", f"{stats.n_seen:,} of {stats.n_ctx:,}"),
        ("tokens kept", _kept(stats)),
        ("cache type", kinds(stats)),
        ("method", stats.method + f" ({stats.why})" * bool(stats.why)),
        *([("measured", stats.measured)] if stats.measured else []),
        *([("last prompt", prompt_line(stats))] if stats.prefill_ms else []),
    ]
    return table([*rows, *([("note", stats.note)] if stats.note else [])], width=width)


def prompt_line(stats: KVStats) -> str:
    """How long the last prompt took, and how it was read."""
    read = f"{stats.prefill_ms / 1e3:,.1f} s to read"
    if stats.mode == "uncompressed":
        return read
    states = f", hidden states: {stats.hidden}" * (stats.hidden not in ("", "f32"))
    how = f"layer by layer{states}" if stats.mode == "layers" else "in full, then compressed"
    return f"{read} ({how}), {stats.compress_ms / 1e3:,.1f} s of it to compress"


def archive_line(stats: KVStats) -> str:
    """What lies in the archive's file, and what recall takes and has looked up there."""
    line = f"{mib(stats.n_bytes_archive)} MiB in a file"
    if not stats.n_bytes_index:
        return line
    return (
        f"{line}; its index takes {mib(stats.n_bytes_index)} MiB of the KV cache; answers looked up"
        f" {mib(stats.n_bytes_recalled)} MiB"
    )


def checkpoint_line(stats: KVStats) -> str:
    """What the states before the last turn take, and what they are for."""
    return (
        f"{mib(stats.n_bytes_checkpoints)} MiB more, to take the last turn again without reading "
        "everything (--no-kv-checkpoints)"
    )


def cache_now(stats: KVStats) -> str:
    """Bytes allocated, used, and the share of a full f16 cache."""
    if stats.mode == "uncompressed":
        return (
            f"{mib(stats.n_bytes)} MiB allocated for {stats.n_ctx:,} tokens, "
            f"{mib(stats.n_bytes_used)} MiB of it used"
        )
    return share_line(stats)


def kinds(stats: KVStats) -> str:
    """The cache types, and how many tokens they hold where f16 holds one."""
    names = stats.type_k if stats.type_k == stats.type_v else f"{stats.type_k}/{stats.type_v}"
    more = f", {stats.per_f16:.2f} tokens in the bytes of one in f16"
    return names + more * (stats.per_f16 > 1)


def cache_words(stats: KVStats, method: str) -> str:
    """What a cache keeps, as what, and how: 'keeps 20 % of the memory, as q8_0, method auto'."""
    types = "/".join(dict.fromkeys((stats.type_k, stats.type_v)))
    if stats.method == "full":
        return f"uncompressed, as {types}"
    return f"keeps {percent(stats.ratio, 1)} of the memory, as {types}, method {method}"


def _kept(stats: KVStats) -> str:
    if not stats.n_seen:
        return "0"
    heads = stats.kept[stats.kept.any(axis=1)]
    if not heads.size:
        return "none: no layer has a cache"
    return (
        f"{percent(stats.n_kept, stats.n_seen)}: {stats.n_kept:,.0f} per KV head on average, "
        f"from {int(heads.min()):,} to {int(heads.max()):,}"
    )


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), width: int | None = None) -> str:
    """Columns of text, two blanks apart; the last one as long as it is, or broken at `width`."""
    lines = [*([head] if head else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    indent = sum(widths[:-1]) + 2 * (len(widths) - 1)
    if width is None or width < 2 * indent:
        return "\n".join(text)
    hanging = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(map(hanging.fill, text))
