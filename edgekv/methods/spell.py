"""spell: what a user writes for a method.

    cake                               a preset
    cake:gamma=100,tau1=1.6            a preset with other parameters, of its score, budget or merge
    score=keydiff,budget=pooled        a mix of any score, budget (uniform if none is named) and
    merge (none), parameters behind them snapkv:queries=probe               either of them with
    other queries to observe

The name of what comes out spells the same thing again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from edgekv.errors import BadInput
from edgekv.methods.base import QUERY_SOURCES, Preset
from edgekv.methods.budget.base import Budget
from edgekv.methods.centroid_merge import CentroidMerge
from edgekv.methods.merge import D2O

T = TypeVar("T")
QUERIES = "queries"


def read(
    text: str,
    presets: Mapping[str, Preset],
    budgets: Mapping[str, Budget],
    merges: Mapping[str, D2O | CentroidMerge | None],
) -> Preset:
    """The preset that `text` means; presets, budgets and merges by name are what there is to mix.

    Raises BadInput, one line that names what can be written instead.
    """
    if text in presets:
        return presets[text]
    name, colon, rest = text.partition(":")
    if not colon and "=" in name:
        given = _pairs(text)
        base = _mix(given, presets, budgets, merges)
    else:
        base = _choice("method", name, presets)
        given = _pairs(rest)
    return _with_params(base, given) if given else base


def _pairs(text: str) -> dict[str, str]:
    """'a=1,b=2' as a dict."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (x.strip() for x in part.partition("="))
        if not (key and equals and value):
            raise BadInput(f"'{part}' says nothing; write name=value")
        if key in found:
            raise BadInput(f"'{key}' is given twice")
        found[key] = value
    return found


def _mix(
    given: dict[str, str],
    presets: Mapping[str, Preset],
    budgets: Mapping[str, Budget],
    merges: Mapping[str, D2O | CentroidMerge | None],
) -> Preset:
    """Takes score, budget and merge out of `given` and puts them together."""
    scores = {p.score.name: p.score for p in presets.values() if not p.keeps_all}
    if "score" not in given:
        raise BadInput(f"a mix names its score: write score=NAME with one of: {', '.join(scores)}")
    score = _choice("score", given.pop("score"), scores)
    budget = _choice("budget", given.pop("budget", "uniform"), budgets)
    merge = _choice("merge", given.pop("merge", "none"), merges)
    stages = [score, budget, *([merge] if merge else [])]
    name = f"score={score.name},budget={budget.name}" + (f",merge={merge.name}" if merge else "")
    papers = dict.fromkeys(stage.paper for stage in stages if stage.paper)
    return Preset(
        name,
        score,
        budget,
        "; ".join(stage.title for stage in stages),
        "; ".join(papers),
        merge=merge,
    )


def _choice(what: str, name: str, options: Mapping[str, T]) -> T:
    if name not in options:
        raise BadInput(f"there is no {what} '{name}'; choose one of: {', '.join(options)}")
    return options[name]


def _with_params(base: Preset, given: dict[str, str]) -> Preset:
    stages = {
        "params": base.params or base.score.params,
        "budget": getattr(base.budget, "params", None),
        "merge": base.merge and base.merge.params,
    }
    owner = {key: stage for stage, params in stages.items() for key in _defaults(params)}
    changed: dict[str, dict[str, Any]] = {stage: {} for stage in stages}
    parts: dict[str, Any] = (
        {"query_source": _query_source(base, given[QUERIES])} if QUERIES in given else {}
    )
    for key, text in given.items():
        if key == QUERIES:
            continue
        if key not in owner:
            raise BadInput(f"'{base.name}' has no parameter '{key}'; {_offer(owner)}")
        changed[owner[key]][key] = _value(key, text, getattr(stages[owner[key]], key))
    new = {stage: replace(stages[stage], **values) for stage, values in changed.items() if values}
    parts |= {
        stage: new[stage] if stage == "params" else replace(getattr(base, stage), params=new[stage])
        for stage in new
    }
    values = [
        f"{key}={given[key] if key == QUERIES else _text(getattr(new[owner[key]], key))}"
        for key in given
    ]
    return replace(
        base, name=base.name + ("," if "=" in base.name else ":") + ",".join(values), **parts
    )


def _query_source(base: Preset, name: str) -> str:
    """The query source `name`, if the method observes any queries."""
    _choice("choice of queries", name, QUERY_SOURCES)
    if not base.observe.observed:
        raise BadInput(
            f"'{base.name}' looks at nobody's"
            f" attention{' but the sum over all tokens' if base.observe.sums else ''}; leave"
            f" {QUERIES} out"
        )
    return name


def _defaults(params: Any) -> dict[str, Any]:
    return {} if params is None else {f.name: getattr(params, f.name) for f in fields(params)}


def _offer(names: Mapping[str, str]) -> str:
    return f"choose one of: {', '.join(names)}" if names else "it has none"


def _value(key: str, text: str, default: Any) -> Any:
    """`text` as what the default is: int, float or str."""
    try:
        return type(default)(text)
    except ValueError:
        kind = "whole number" if isinstance(default, int) else "number"
        raise BadInput(f"{key} '{text}' is no {kind}; the default is {_text(default)}") from None


def _text(value: Any) -> str:
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
