"""How many rows each KV head of each layer keeps: integers, never a ratio.

`rows_for` turns the user's wish into a mean number of rows per head. A `Budget` (see `edgekv.budget.base`) spreads it over layers
and heads, at once or as layers finish; a `table` gives it outright. BUDGETS has them by name.
"""

from __future__ import annotations

from edgekv.budget.base import Budget, Fixed, Plan, Spending, Spread, fit
from edgekv.budget.clip import clip
from edgekv.budget.pyramid import pyramid
from edgekv.budget.rows import check_ratio, rows_for
from edgekv.budget.table import table
from edgekv.budget.uniform import uniform

__all__ = ["BUDGETS", "Budget", "Fixed", "Plan", "Spending", "Spread", "check_ratio", "clip", "fit", "pyramid", "rows_for", "table", "uniform"]

BUDGETS: dict[str, Budget] = {
    budget.name: budget
    for budget in (
        Spread("uniform", uniform, "the same for every head of every layer"),
        Spread("pyramid", pyramid, "more in the first layers than in the last", "PyramidKV, arXiv 2406.02069"),
    )
}
