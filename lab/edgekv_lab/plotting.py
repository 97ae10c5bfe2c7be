"""What the lab's plots have in common: a title that says of what, where and when; ticks; a legend
beside the axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX*"
FULL_COLOURS = ("black", "dimgray", "darkgray", "tan")
"""Colours of full caches; compressed ones get the colours of matplotlib's cycle."""
LEGEND_COLUMNS = 4


def head(figure: Figure, title: str, about: Iterable[str]) -> None:
    """A title, and below it in grey what it is about: model, machine, date; empty ones are left
    out."""
    figure.suptitle(f"{title}\n", fontsize=13, fontweight="bold")
    figure.text(
        0.5,
        1 - 0.38 / figure.get_figheight(),
        " · ".join(filter(None, about)),
        ha="center",
        va="center",
        fontsize=8.5,
        color="dimgray",
    )


def counted(least: int, most: int) -> str:
    """How many samples a point of a picture stands for."""
    if most == 1:
        return "one sample a point"
    return f"{least} to {most} samples a point" if least < most else f"{most} samples a point"


def legend(figure: Figure, axes: Axes) -> None:
    """One legend for the figure, below its axes."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), LEGEND_COLUMNS)
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize="small", frameon=False
    )


def ticks(axes: Axes, values: Sequence[float], texts: Sequence[str]) -> None:
    """A logarithmic axis from left to right with ticks at these values alone."""
    axes.set_xscale("log")
    axes.set_xticks(values, texts)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def styles(names: Sequence[str], full: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How the line of each name is drawn. full: those names that are full caches."""
    greys = dict(zip(full, FULL_COLOURS * len(full), strict=False))
    others = [name for name in names if name not in greys]
    colours = greys | {name: f"C{n % 10}" for n, name in enumerate(others)}
    return {
        name: dict(
            color=colours[name],
            marker=MARKERS[n % len(MARKERS)],
            linewidth=1 if name in greys else 2,
            linestyle="--" if name in greys else "-",
            markersize=5,
            label=name,
        )
        for n, name in enumerate(names)
    }
