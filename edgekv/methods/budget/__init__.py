"""How many rows each KV head of each layer keeps: integers, never a ratio.

`rows_for` turns the user's wish into a mean number of rows per head. A `Budget` (see
`edgekv.methods.budget.base`) spreads it over layers and heads, at once or as layers finish; a
`table` gives it outright. BUDGETS has them by name.
"""

from __future__ import annotations

from edgekv.methods.budget.adakv import AdaKV
from edgekv.methods.budget.base import Budget, Fixed, Plan, Spending, Spread, fit
from edgekv.methods.budget.cake import CakeBudget
from edgekv.methods.budget.clip import clip
from edgekv.methods.budget.d2o import D2OBudget
from edgekv.methods.budget.dynamickv import DynamicKV
from edgekv.methods.budget.given import table
from edgekv.methods.budget.pooled import Pooled
from edgekv.methods.budget.profile import PROFILES, ProfileBudget, from_shares
from edgekv.methods.budget.pyramid import Pyramid, pyramid
from edgekv.methods.budget.rows import check_ratio, rows_for
from edgekv.methods.budget.uniform import uniform

BUDGETS: dict[str, Budget] = {
    budget.name: budget
    for budget in (
        Spread("uniform", uniform, "the same for every head of every layer"),
        Pyramid(),
        AdaKV(),
        CakeBudget(),
        DynamicKV(),
        D2OBudget(),
        Pooled(),
        *PROFILES,
    )
}
"""A `ProfileBudget` gets its table from `edgekv.choice.choose`, the others need nothing."""
