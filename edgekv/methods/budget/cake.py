"""cake: more rows for layers whose attention is spread out and moves.

Paper: Qin et al., CAKE, arXiv 2503.12491, section 4.1. Of the window's attention A_o to all rows
but the window's own: dispersion H = -sum A_o log A_o, shift V = sum over rows of the variance over
queries (eq. 4, 5), preference P = H^(1/tau1) * V^(1/tau2) (eq. 6), and layer l gets P_l / sum P of
the rows (eq. 7), layer by layer (`edgekv.methods.budget.cascade`).

Differences: the paper's rows are beside the window, here beside the window and the sinks; both are
counted against the budget. The sums are over KV heads; V is a mean over the query heads of a KV
head, a factor that all layers share. Each layer rounds down, so up to one row per head stays
unspent.
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

LEAST = 1e-30  # a layer without any dispersion or shift still has a logarithm


@dataclass(frozen=True)
class CakeBudgetParams:
    tau1: float = 1.0
    """Temperature of the dispersion; the paper searches 0.2 to 2 for each model."""
    tau2: float = 0.6
    """Temperature of the shift; the paper searches 0.4 to 3."""

    def __post_init__(self) -> None:
        for name, value in (("tau1", self.tau1), ("tau2", self.tau2)):
            if not 0 < value < float("inf"):
                raise BadInput(
                    f"{name} {value:g} is no temperature; give a number above 0, such as 1"
                )


@dataclass(frozen=True)
class CakeBudget:
    params: CakeBudgetParams = CakeBudgetParams()
    name: ClassVar[str] = "cake"
    title: ClassVar[str] = "more for layers whose attention is spread out and moves"
    paper: ClassVar[str] = "CAKE, arXiv 2503.12491"
    stats: ClassVar[tuple[str, ...]] = ("var", "col_entropy")

    def start(self, plan: Plan) -> Spending:
        if free(plan) <= 0:
            return flat(plan)
        return Cascade(plan, lambda layer: log_preference(layer, plan.window, self.params), weigh)


def log_preference(layer: LayerStats, window: int, params: CakeBudgetParams) -> float:
    """log P of one layer (eq. 4 to 6)."""
    assert layer.var is not None and layer.col_entropy is not None, (
        "cake needs variance and entropy"
    )
    outside = (layer.pos >= 0) & (layer.pos < layer.n_seen - window)
    dispersion = float(layer.col_entropy[outside].sum(dtype=np.float64))
    shift = float(layer.var[outside].sum(dtype=np.float64))
    return float(
        np.log(max(dispersion, LEAST)) / params.tau1 + np.log(max(shift, LEAST)) / params.tau2
    )


def weigh(log_preferences: NDArray[np.float64]) -> NDArray[np.float64]:
    """P / max P."""
    return np.exp(log_preferences - log_preferences.max())
