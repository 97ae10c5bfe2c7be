"""Pictures of a table: the score against the ratio, or a heat map over length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekv.base import plots
from edgekv_lab import plotting
from edgekv_lab.eval.evaluate import RANDOM
from edgekv_lab.eval.perplexity import FULL
from edgekv_lab.eval.sample import Measure, Outcome, Row
from edgekv_lab.eval.table import Table, mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTHS = 10
"""Parts of a text that a heat map has at most."""
MAPS_BESIDE = 4
"""Heat maps in a line, at most."""


def check(path: str) -> None:
    """Say what is missing before minutes of work, not after. Raises EdgeKVError."""
    plots.figure(1, 1)
    plots.check(path)


def save(table: Table, path: str) -> None:
    """Write the table's picture as a PNG. Raises BadInput if the file cannot be written."""
    plots.save(heat_map(table) if table.task.heat else curves(table), path)


def curves(table: Table) -> Figure:
    """A line for each method with its intervals as bars, and a horizontal one for each full cache.

    Of predictions it shows the KL divergence.
    """
    measure = next((m for m in table.task.measures if m.name == "kl"), table.task.measures[0])
    rows = table.rows
    figure = plots.figure(7.5, 5.2)
    axes = figure.add_subplot()
    names = list(dict.fromkeys(map(_name, rows)))
    style = plotting.styles(names, [name for name in names if name.startswith(FULL)])
    lines = [name for name in names if not name.startswith(FULL)]
    for name in names:
        points = {
            row.ratio: mean(measure, outcomes)
            for row, outcomes in rows.items()
            if _name(row) == name
        }
        values = np.array([points[ratio] for ratio in sorted(points)])
        if name not in lines:
            axes.axhline(
                values[0, 0], **{k: v for k, v in style[name].items() if not k.startswith("marker")}
            )
            continue
        ends = np.nan_to_num(np.abs(values[:, 1:] - values[:, :1]), posinf=0).T
        # so that bars of one ratio do not hide each other
        beside = 1.015 ** (lines.index(name) - (len(lines) - 1) / 2)
        line = style[name] | (dict(linestyle=":") if name.startswith(RANDOM) else {})
        axes.errorbar(
            [ratio * beside for ratio in sorted(points)],
            values[:, 0],
            yerr=ends,
            capsize=3,
            elinewidth=1,
            **line,
        )
    shares = sorted({row.ratio for row in rows if row.ratio < 1} or {1.0})
    plotting.ticks(axes, shares, [f"{100 * share:g} %" for share in shares])
    axes.set(
        xlabel="KV bytes, share of the full f16 cache",
        ylabel=measure.label,
        xlim=(shares[0] / 1.3, shares[-1] * 1.3),
    )
    if not measure.percent:
        axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])
    else:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    plotting.head(figure, f"{_title(table)}: {measure.label}", [*table.about, _counted(rows)])
    plotting.legend(figure, axes)
    return figure


def heat_map(table: Table) -> Figure:
    """For each row the mean score over length (from left to right) and depth (from top to bottom).

    There are as many depths as every length has samples, at most DEPTHS; grey is what was not
    asked.
    """
    rows, measure = table.rows, table.task.measures[0]
    lengths = sorted({outcome.tags["length"] for outcome in table.outcomes})
    n_depths = depths(table)
    high = ceil(len(rows) / MAPS_BESIDE)
    wide = ceil(len(rows) / high)
    figure = plots.figure(1.6 + wide * (1.3 + 0.35 * len(lengths)), 1.6 + 2.5 * high)
    axes = figure.subplots(high, wide, squeeze=False)
    for place, (row, outcomes) in zip(axes.flat, rows.items(), strict=False):
        place.set_facecolor("lightgrey")
        picture = place.imshow(
            cells(outcomes, lengths, n_depths, measure),
            cmap="RdYlGn",
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
        )
        kept = f"{100 * row.ratio:g} % of the bytes, " * (row.ratio < 1)
        score = f"{100 * mean(measure, outcomes)[0]:.0f} %"
        place.set_title(f"{_name(row)}\n{kept}found: {score}", fontsize=9)
        place.set_xticks(
            range(len(lengths)),
            [f"{length:,}" for length in lengths],
            rotation=45 if len(lengths) > 2 else 0,
        )
        is_left = place in axes[:, 0]
        place.set_yticks(
            (-0.5, n_depths / 2 - 0.5, n_depths - 0.5),
            ("start", "middle", "end") if is_left else ("", "", ""),
        )
    for place in axes.flat[len(rows) :]:
        place.set_visible(False)
    figure.supxlabel("length of the text, tokens", fontsize=10)
    figure.supylabel("place of the needle", fontsize=10)
    bar = figure.colorbar(picture, ax=axes, label="found")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    together = [
        len(cell)
        for outcomes in rows.values()
        for cell in _in_cells(outcomes, lengths, n_depths)
        if cell
    ]
    about = [*table.about, plotting.counted(min(together), max(together))]
    plotting.head(figure, _title(table), about)
    return figure


def depths(table: Table) -> int:
    """Parts of a text of which each holds a sample: needles stand evenly at every length."""
    by_length: dict[int, set[float]] = {}
    for outcome in table.outcomes:
        by_length.setdefault(outcome.tags["length"], set()).add(outcome.tags["depth"])
    return max(min([DEPTHS, *map(len, by_length.values())]), 1)


def cells(
    outcomes: Sequence[Outcome], lengths: Sequence[int], n_depths: int, measure: Measure
) -> Any:
    """float [n_depths, n_lengths]: mean scores, NaN where there is none."""
    found = _in_cells(outcomes, lengths, n_depths)
    scores = [[x.scores[measure.name] for x in cell] for cell in found]
    means = [np.mean(cell) if cell else np.nan for cell in scores]
    return np.array(means).reshape(n_depths, len(lengths))


def _in_cells(
    outcomes: Sequence[Outcome], lengths: Sequence[int], n_depths: int
) -> list[list[Outcome]]:
    """The outcomes of each cell [n_depths * n_lengths]."""
    found: list[list[Outcome]] = [[] for _ in range(n_depths * len(lengths))]
    for outcome in outcomes:
        place = min(int(outcome.tags["depth"] * n_depths), n_depths - 1)
        found[place * len(lengths) + lengths.index(outcome.tags["length"])].append(outcome)
    return found


def _name(row: Row) -> str:
    return f"{row.method} {row.kind}"


def _counted(rows: dict[Row, list[Outcome]]) -> str:
    numbers = [len(outcomes) for outcomes in rows.values()]
    return plotting.counted(min(numbers), max(numbers))


def _title(table: Table) -> str:
    asked = {
        "aware": "question known while compressing",
        "agnostic": "question asked after compressing",
    }
    return table.task.name + (f", {asked[table.setting]}" if table.setting else "")
