"""edgekv methods: the list."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from edgekv.commands.report import table

if TYPE_CHECKING:
    from edgekv.methods import Preset


@click.command("methods", short_help="List what --kv-method can be.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def command(as_json: bool) -> None:
    """List what --kv-method can be, with budget, what it observes, and where it comes from."""
    from edgekv.methods import DEFAULT, presets

    records = [describe(preset, preset.name == DEFAULT) for preset in presets().values()]
    click.echo(json.dumps(records, indent=2) if as_json else as_text(records))


def describe(preset: Preset, is_default: bool) -> dict[str, Any]:
    score = preset.score
    return {
        "name": preset.name,
        "default": is_default,
        "score": score.name,
        "budget": None if preset.keeps_all else preset.budget.name,
        "observes": observes(preset),
        "params": {} if score.params is None else asdict(score.params),
        "title": preset.title,
        "paper": preset.paper,
    }


def observes(preset: Preset) -> str:
    """Whose queries judge the keys."""
    observe = preset.score.observe
    judges = {"window": observe.window, "all queries": observe.all_queries, "last": observe.last, "probe": observe.probe}
    return " + ".join(name for name, used in judges.items() if used) or "nobody"


def as_text(records: list[dict[str, Any]]) -> str:
    rows = [(r["name"] + (" *" if r["default"] else ""), r["budget"] or "-", r["observes"],
             r["title"] + (f" [{r['paper']}]" if r["paper"] else "")) for r in records]
    return table(rows, ("name", "budget", "observes", "what stays")) + "\n\n* the default"
