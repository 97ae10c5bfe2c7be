"""d2o: more rows for layers that attend evenly.

Paper: Wan et al., D2O: Dynamic Discriminative Operations, arXiv 2406.13035, section 4.1, eq. 5: f_l
= variance over the rows of the column sums of layer l's prompt attention, and layer l gets
exp(-f_l) / sum exp(-f) of the rows.

Differences: eq. 5 as printed gives nearly all to one layer, because f of real prompts differs by
hundreds between layers (0.6 to 766 on 2,000 tokens of the demo model). As in the authors' code f is
brought to 0..1 over the layers; scale=raw is eq. 5 as printed. Their code leaves the first two and
the last layer whole, here none is. f is the mean over the KV heads. Of a layer's rows the paper
keeps important and recent ones 3 : 1; recent ones are selection's window here. Layers are settled
as they finish (`edgekv.methods.budget.cascade`), where 0..1 is over the layers done so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput
from edgekv.methods.budget.base import Plan, Spending
from edgekv.methods.budget.cascade import Cascade
from edgekv.methods.budget.sharing import flat, free
from edgekv.methods.layer import LayerStats


def weigh_raw(variances: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(-f), the largest 1."""
    return np.exp(variances.min() - variances)


def weigh_unit(variances: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same with f brought to 0..1."""
    low, high = variances.min(), variances.max()
    return weigh_raw((variances - low) / (high - low)) if high > low else np.ones_like(variances)


SCALES = {"unit": weigh_unit, "raw": weigh_raw}


@dataclass(frozen=True)
class D2OBudgetParams:
    scale: str = "unit"
    """unit: variances are brought to 0..1 first; raw: as they are."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise BadInput(f"scale '{self.scale}' is unknown; choose one of: {', '.join(SCALES)}")


@dataclass(frozen=True)
class D2OBudget:
    params: D2OBudgetParams = D2OBudgetParams()
    name: ClassVar[str] = "d2o"
    title: ClassVar[str] = "more for layers that attend evenly"
    paper: ClassVar[str] = "D2O, arXiv 2406.13035"
    stats: ClassVar[tuple[str, ...]] = ("col_sum",)

    def start(self, plan: Plan) -> Spending:
        return flat(plan) if free(plan) <= 0 else Cascade(plan, variance, SCALES[self.params.scale])


def variance(layer: LayerStats) -> float:
    """f of one layer: the variance of a head's column sums over its rows, mean over the heads."""
    assert layer.col_sum is not None, "d2o needs the column sums"
    heads = zip(layer.col_sum, layer.absent, strict=True)
    return float(np.mean([sums[~absent].var(dtype=np.float64) for sums, absent in heads]))
