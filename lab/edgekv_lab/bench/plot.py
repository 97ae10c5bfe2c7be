"""Plots of the long-context page: memory, speed, and the bytes that a token reads, against the
context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekv.base import plots
from edgekv.base.sizes import MIB
from edgekv_lab import plotting
from edgekv_lab.bench import reads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One setting under its name: its records by context."""

    name: str
    is_full: bool
    records: list[Record]


Value = Callable[[Record], float | None]
Panel = tuple[str, Value]
"""The label of an axis, and what it shows of a record (None: nothing)."""


def memory(lines: Sequence[Line], about: Sequence[str]) -> Figure:
    """KV bytes beside the memory of the process."""
    panels: list[Panel] = [
        ("KV cache in use, MiB", lambda r: r["kv_bytes_used"] / MIB),
        ("process at its peak, MiB", lambda r: r["mem_peak_host"] / MIB),
    ]
    return _figure("Memory against the context", lines, about, panels)


def speed(lines: Sequence[Line], about: Sequence[str], was_read: bool) -> Figure:
    """Tokens per second; reading is left out where depths were filled."""
    panels: list[Panel] = [("writing, tokens/s", lambda r: r["avg_ts"])]
    if was_read:
        panels.append(("reading the context, tokens/s", lambda r: r["read_ts"]))
    return _figure("Speed against the context", lines, about, panels)


def bytes_read(lines: Sequence[Line], about: Sequence[str]) -> Figure:
    """Bytes that writing a token reads, and how near that comes to the speed of the machine's
    memory."""

    def share(r: Record) -> float | None:
        reached = reads.share(r)
        return None if reached is None else 100 * reached

    panels: list[Panel] = [
        ("weights + KV in use, MiB per token", lambda r: reads.per_token(r) / MIB),
        ("of the memory's measured speed, %", share),
    ]
    figure = _figure("What writing a token reads", lines, about, panels)
    left, right = figure.axes[:2]
    _mark(left, lines[0].records[0]["read_bytes_weights"] / MIB, "the weights alone")
    _mark(right, 100, "as fast as reading alone")
    right.set_ylim(0, max(108, right.get_ylim()[1]))
    return figure


def _mark(axes: Axes, y: float, text: str) -> None:
    """A dotted line across, with a word below it."""
    axes.axhline(y, color="black", linestyle=":", linewidth=1)
    at: dict[str, Any] = dict(
        xycoords=("axes fraction", "data"), textcoords="offset points", xytext=(0, -3)
    )
    axes.annotate(text, (0.02, y), va="top", fontsize=8, **at)


def _figure(
    title: str, lines: Sequence[Line], about: Sequence[str], panels: Sequence[Panel]
) -> Figure:
    figure = plots.figure(4.6 * len(panels) + 0.6 * (len(panels) == 1), 4.6)
    for axes, (label, value) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        _panel(axes, label, lines, value)
    numbers = [len(r["samples_ts"]) for line in lines for r in line.records]
    plotting.head(figure, title, [*about, plotting.counted(min(numbers), max(numbers))])
    plotting.legend(figure, figure.axes[0])
    return figure


def _panel(axes: Axes, label: str, lines: Sequence[Line], value: Value) -> None:
    style = plotting.styles([x.name for x in lines], [x.name for x in lines if x.is_full])
    for line in lines:
        points = [(r["n_depth"], y) for r in line.records if (y := value(r)) is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], **style[line.name])
    contexts = sorted({r["n_depth"] for line in lines for r in line.records})
    plotting.ticks(axes, contexts, [f"{n:,}" for n in contexts])
    highest = max(
        (y for r in (r for line in lines for r in line.records) if (y := value(r))), default=1
    )
    axes.set(xlabel="context, tokens", ylabel=label, ylim=(0, 1.08 * highest))
    axes.tick_params(axis="x", rotation=45 if len(contexts) > 5 else 0)


def save(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Write figures by their files' names; returns the paths."""
    for name, figure in figures.items():
        plots.save(figure, folder / name)
    return [folder / name for name in figures]
