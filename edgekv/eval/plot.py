"""Pictures of a table: the score against the ratio, or a heat map over length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekv.errors import BadInput, EdgeKVError
from edgekv.eval.sample import Measure, Outcome
from edgekv.eval.table import Table, mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUCKETS = 10
"""Parts of a text that a heat map has."""


def check(path: str) -> None:
    """Say what is missing before minutes of work, not after. Raises EdgeKVError."""
    _figure()
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise BadInput(f"{path} cannot be written; name a file in a folder that exists")


def save(table: Table, path: str) -> None:
    """Write the table's picture as a PNG, beside and renamed. Raises BadInput if the file cannot be written."""
    figure = heat_map(table) if table.task.heat else curves(table)
    fresh = Path(f"{path}.new")
    try:
        figure.savefig(fresh, format="png", dpi=150)
        fresh.replace(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror}); choose another place") from None


def _figure() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise EdgeKVError("a picture needs matplotlib; run: pip install 'edgekv[profile]'") from None
    return Figure


def curves(table: Table) -> Figure:
    """A line for each method, its intervals as bars, the full cache as a dashed line. Of predictions it shows the KL divergence."""
    measure = next((m for m in table.task.measures if m.name == "kl"), table.task.measures[0])
    figure = _figure()(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    rows = table.rows
    for n, method in enumerate(dict.fromkeys(method for method, ratio in rows if ratio < 1)):
        ratios = sorted(ratio for name, ratio in rows if name == method)
        values = np.array([mean(measure, rows[method, ratio]) for ratio in ratios])
        ends = np.nan_to_num(np.abs(values[:, 1:] - values[:, :1]), posinf=0).T
        axes.errorbar(ratios, values[:, 0], yerr=ends, label=method, marker="osD^vPX*"[n % 8], capsize=2, linewidth=1.5)
    for (method, ratio), outcomes in rows.items():
        if ratio == 1:
            axes.axhline(mean(measure, outcomes)[0], color="black", linestyle="--", linewidth=1, label=method)
    shares = sorted({ratio for _, ratio in rows if ratio < 1})
    axes.set(xscale="log", xlabel="share of the cache kept", ylabel=measure.label, title=_title(table), xticks=shares,
             xticklabels=[f"{share:g}" for share in shares])
    axes.minorticks_off()
    if measure.percent:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def heat_map(table: Table) -> Figure:
    """For each row the mean score over length (from left to right) and depth (from top to bottom); white where there is no sample."""
    rows, measure = table.rows, table.task.measures[0]
    lengths = sorted({outcome.tags["length"] for outcome in table.outcomes})
    wide = min(4, len(rows))
    high = ceil(len(rows) / wide)
    figure = _figure()(figsize=(1.2 + wide * (1.6 + 0.25 * len(lengths)), 1.2 + 2.2 * high), layout="constrained")
    axes = figure.subplots(high, wide, squeeze=False, sharex=True, sharey=True)
    for place, ((method, ratio), outcomes) in zip(axes.flat, rows.items(), strict=False):
        picture = place.imshow(_cells(outcomes, lengths, measure), cmap="RdYlGn", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        place.set_title(f"{method}\n{ratio:g} kept: {100 * mean(measure, outcomes)[0]:.0f} %", fontsize="small")
        place.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        place.set_yticks((-0.5, BUCKETS / 2 - 0.5, BUCKETS - 0.5), ("start", "middle", "end"))
    for place in axes.flat[len(rows) :]:
        place.set_visible(False)
    figure.supxlabel("tokens")
    figure.supylabel("depth of the needle")
    figure.suptitle(_title(table))
    figure.colorbar(picture, ax=axes, label=measure.label)
    return figure


def _cells(outcomes: Sequence[Outcome], lengths: Sequence[int], measure: Measure) -> Any:
    """float [BUCKETS, n_lengths]: mean scores, NaN where there is none."""
    cells: list[list[list[float]]] = [[[] for _ in lengths] for _ in range(BUCKETS)]
    for outcome in outcomes:
        cells[outcome.tags["bucket"]][lengths.index(outcome.tags["length"])].append(outcome.scores[measure.name])
    return np.array([[np.mean(cell) if cell else np.nan for cell in row] for row in cells])


def _title(table: Table) -> str:
    return table.task.name + (f", query-{table.setting}" if table.setting else "")
