"""The README's picture, drawn from data/context.json: peak memory and speed against the context.

python docs/results/picture.py      writes docs/results/context.png; needs matplotlib
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
CACHES = {
    "f16 full": "full f16",
    "q8_0 full": "full q8_0",
    "f16 x 0.2 auto": "edgekv, ratio 0.2 (f16 entries)",
}
"""Rows that are drawn, and their names in the legend."""
PANELS = {
    "process_peak_mib": "peak memory of the process, MiB",
    "write_tokens_per_s": "written, tokens/s",
}


def draw(target: Path) -> None:
    data = json.loads((HERE / "data" / "context.json").read_text(encoding="utf-8"))
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9, 3.6))
    for axis, (field, label) in zip(axes, PANELS.items(), strict=True):
        for cache in CACHES:
            points = [(row["n_ctx"], row[field]) for row in data["rows"] if row["cache"] == cache]
            axis.plot(
                *zip(*points, strict=True),
                marker="o",
                linewidth=3 if "x" in cache else 1.5,
                label=CACHES[cache],
            )
        axis.set(xlabel="context, tokens", ylabel=label, ylim=(0, None))
        axis.set_xticks([n for n, _ in points], [f"{n:,}" for n, _ in points])
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(f"{data['model']}, {data['machine']}, {data['date']}", fontsize=10)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="lower center", ncols=len(CACHES), frameon=False
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(target, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    draw(HERE / "context.png")
