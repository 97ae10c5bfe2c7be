"""edgekv methods: the list."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from edgekv.commands.report import table

if TYPE_CHECKING:
    from edgekv.methods import Preset

HELP = """
The default is auto: what came nearest to the full cache when the model was prepared (chat and run
do that on first use), kvzap-summary with another profile of the model, kvzip without one.
Parameters are changed with NAME:parameter=value,... and any score goes with any budget and merge:
score=NAME,budget=NAME,merge=NAME,parameter=value,... (without a word about them: uniform, none).
Where attention is observed, queries=window, late, all, last or probe says whose:
snapkv:queries=probe."""


@click.command("methods", short_help="List what --kv-method can be.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def command(as_json: bool) -> None:
    """List what --kv-method can be: scores, budgets, whose attention they look at, parameters, and
    where they come from.
    """
    from edgekv.methods import presets

    records = [describe(preset) for preset in presets().values()]
    click.echo(json.dumps(records, indent=2) if as_json else as_text(records))


def describe(preset: Preset) -> dict[str, Any]:
    """One record of the JSON array; budget_* and merge_* are those of the budget and the merge, the
    rest is the score's and the whole's.
    """
    budget = None if preset.keeps_all else preset.budget
    return {
        "name": preset.name,
        "score": preset.score.name,
        "budget": budget and budget.name,
        "observes": observes(preset),
        "params": params(preset.params or preset.score.params),
        "budget_params": params(budget and budget.params),
        "merge": preset.merge.name if preset.merge else "none",
        "merge_params": params(preset.merge and preset.merge.params),
        "title": preset.title,
        "paper": preset.paper,
        "budget_title": budget.title if budget else "",
        "budget_paper": budget.paper if budget else "",
        "merge_title": preset.merge.title if preset.merge else "",
        "merge_paper": preset.merge.paper if preset.merge else "",
    }


def params(values: Any) -> dict[str, Any]:
    """A parameter dataclass as names and defaults."""
    return {} if values is None else asdict(values)


def observes(preset: Preset) -> str:
    """Whose queries are observed."""
    observe = preset.observe
    sources = {observe.source: bool(observe.observed), "all": observe.sums}
    return " + ".join(name for name, used in sources.items() if used) or "nobody"


def as_text(records: list[dict[str, Any]]) -> str:
    """A table of presets, one of budgets, and one of merges."""
    from edgekv.methods.budget import BUDGETS

    def row(r: dict[str, Any], kind: str) -> tuple[str, str, str]:
        title = what(r[f"{kind}_title"], r[f"{kind}_paper"])
        return r[kind], settings(r[f"{kind}_params"]), title

    presets = [
        (
            *(r["name"], r["score"], r["budget"] or "-", r["merge"], r["observes"]),
            *(settings(r["params"]), what(r["title"], r["paper"])),
        )
        for r in records
    ]
    # those in no preset too
    budgets = {
        b.name: (b.name, settings(params(b.params)), what(b.title, b.paper))
        for b in BUDGETS.values()
    }
    budgets |= {r["budget"]: row(r, "budget") for r in records if r["budget"]}
    merges = {r["merge"]: row(r, "merge") for r in records if r["merge_title"]}
    head = ("name", "score", "budget", "merge", "observes", "parameters", "what stays")
    return "\n\n".join(
        [
            table(presets, head),
            table(budgets.values(), ("budget", "parameters", "how many tokens each head keeps")),
            table(merges.values(), ("merge", "parameters", "what becomes of the others"))
            + f"\n{HELP}",
        ]
    )


def settings(values: dict[str, Any]) -> str:
    said = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in values.items()}
    return ",".join(f"{name}={value}" for name, value in said.items()) or "-"


def what(title: str, paper: str) -> str:
    return title + (f" [{paper}]" if paper else "")
