"""A profile as a picture: layers from top to bottom, KV heads from left to right."""

from __future__ import annotations

import numpy as np

from edgekv.base import plots
from edgekv.profiles.file import Profile

_WIDE = 24
"""More heads than this are drawn without numbers."""
_SHADES = " .:-=+*#%@"


def heat_map(profile: Profile, ratio: float) -> None:
    """Print the shares at `ratio` in percent, coloured on a terminal. A dot: takes no part."""
    from rich.console import Console
    from rich.text import Text

    shares, heads = profile.shares_at(ratio), profile.heads
    console = Console(highlight=False, soft_wrap=True)
    numbers = shares.shape[1] <= _WIDE
    console.print(
        "layer  share of each KV head"
        + (" in percent" if numbers else f", from 0 '{_SHADES[0]}' to 1 '{_SHADES[-1]}'"),
        style="dim",
    )
    for il, row in enumerate(shares):
        line = Text(f"{il:5}  ")
        for share, takes_part in zip(row, heads[il], strict=True):
            cell = (
                (f"{100 * share:4.0f} " if numbers else _shade(share))
                if takes_part
                else ("   . " if numbers else " ")
            )
            line.append(cell, _style(share) if takes_part else "")
        console.print(line)


def _shade(share: float) -> str:
    return _SHADES[min(int(share * len(_SHADES)), len(_SHADES) - 1)]


def _style(share: float) -> str:
    """Dark blue over violet to yellow, with legible text. The root spreads small shares."""
    x = float(np.sqrt(share))
    red, green, blue = (
        int(np.interp(x, (0, 0.5, 1), values))
        for values in ((20, 180, 250), (20, 40, 230), (90, 120, 60))
    )
    return f"{'black' if x > 0.7 else 'white'} on rgb({red},{green},{blue})"


def image(profile: Profile, ratio: float, path: str) -> None:
    """Write the heat map at `ratio` as a PNG.

    Raises EdgeKVError if matplotlib is missing, BadInput if the file cannot be written or is no
    picture.
    """
    shares = np.where(profile.heads, profile.shares_at(ratio), np.nan)
    figure = plots.figure(2.5 + 0.3 * shares.shape[1], 1.5 + 0.2 * shares.shape[0])
    from matplotlib.ticker import MaxNLocator  # there, if figures are

    axes = figure.add_subplot()
    picture = axes.imshow(
        shares, cmap="inferno", vmin=0, vmax=1, aspect="auto", interpolation="nearest"
    )
    axes.set(xlabel="KV head", ylabel="layer", title=f"{profile.kind}, {ratio:g} kept")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(picture, label="share of tokens kept")
    plots.save(figure, path)
