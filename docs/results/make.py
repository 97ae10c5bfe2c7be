"""The tables and pictures of docs/results, made from the records in docs/results/data.

python docs/results/make.py      writes them anew; pictures need matplotlib

Where PAGE.md says `<!-- table: NAME -->`, the record NAME of data/PAGE.json follows; records are
those of `edgekv_lab.record`, as `--record` writes them. Where a line "Commit" stands under a table,
its commit, date, machine and commands are written there. A picture draws columns of a table against
the table's first column, with a line for each value of the second.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from edgekv_lab import record

HERE = Path(__file__).resolve().parent
MARKED = re.compile(
    r"(<!-- table: (\S+) -->\n\n)(?:\|.*\n)*\n*(Commit\b.*\n(?:\n(?: {4}.*\n)+)?\n*)?"
)


def updated(page: str) -> str:
    """The text of PAGE.md with the tables that its data give."""
    data = record.read(HERE / "data" / f"{page}.json")

    def made(found: re.Match[str]) -> str:
        here = data[found[2]]
        # what follows a table without an empty line is a row of it
        text = f"{found[1]}{here.table()}\n"
        return f"{text}{here.origin()}\n" if found[3] else text

    text = (HERE / f"{page}.md").read_text(encoding="utf-8")
    return MARKED.sub(made, text).rstrip("\n") + "\n"


def pictures(page: str) -> dict[str, dict]:
    """The pictures of a page by name: table, title, panels (column -> label), lines' legends."""
    data = json.loads((HERE / "data" / f"{page}.json").read_text(encoding="utf-8"))
    return data.get("pictures", {})


def draw(page: str, name: str) -> None:
    """Write the picture NAME.png of a page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture = pictures(page)[name]
    data = record.read(HERE / "data" / f"{page}.json")[picture["table"]]
    heads = [head for head, _ in data.columns]
    names = picture.get("lines") or {row[1]: row[1] for row in data.rows}
    figure, axes = plt.subplots(1, len(picture["panels"]), figsize=(9, 3.6), squeeze=False)
    for axis, (column, label) in zip(axes[0], picture["panels"].items(), strict=True):
        at = heads.index(column)
        for line, legend in names.items():
            rows = [row for row in data.rows if row[1] == line]
            values = [row[at][0] if isinstance(row[at], list) else row[at] for row in rows]
            width = 3 if " x " in line else 1.5
            axis.plot([row[0] for row in rows], values, marker="o", linewidth=width, label=legend)
        axis.set(xlabel=f"{heads[0]}, tokens", ylabel=label, ylim=(0, None))
        axis.set_xticks([row[0] for row in rows], [f"{row[0]:,}" for row in rows])
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(picture["title"], fontsize=10)
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.08 * -(-len(names) // 3), 1, 1))
    figure.savefig(HERE / f"{name}.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    for stem in sorted(path.stem for path in (HERE / "data").glob("*.json")):
        (HERE / f"{stem}.md").write_text(updated(stem), encoding="utf-8")
        for name in pictures(stem):
            draw(stem, name)
