"""The EvolKV profile: rows for each layer, found by evolution on a task.

Source: EvolKV (arXiv 2509.08315), section 3.2, equations 1 and 2, Algorithm 1. A scheme is one
number of rows per layer, which all KV heads of the layer have. Groups of neighbouring layers are
optimised one after the other, from the bottom to the top, by CMA-ES (package `cma`) with the others
fixed; what counts is the task's score times a bonus for schemes that stay near the target.

A scheme found at one target serves every other by the paper's own rule: all layers' rows times one
factor. So a profile holds the scheme's proportions, at every ratio of a grid scaled to that ratio
(`shares`), and neither the length of the training texts nor the target it was found at comes into
it; only where a layer would have more rows than there are does the excess go to the others.

Different from the paper: a scheme is completed to the target before it is tried (`fixed`), which
keeps the condition of equation 1; as Algorithm 1 has it (`free`), one with more rows than the
target is tried with them, and where a few rows more raise the score by much, the cache score does
not hold it back. The average of equation 2 is over all layers, as that equation says, where line 13
of Algorithm 1 has the group alone. The first scheme to beat is the uniform one, so that nothing
worse than it comes out on the training texts. Completed rows add up to the target exactly instead
of being rounded up, and no layer goes below the protected rows (sinks and window). The step size
0.3 is taken as a share of the target. A group of one layer, which CMA-ES cannot do, joins the one
before it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput, EdgeKVError
from edgekv.learn.probe_profile import taking_part
from edgekv.llama.llama import Llama
from edgekv.methods import budget
from edgekv.model.identity import identify
from edgekv.profiles.file import Profile, scale
from edgekv_lab.makers.training import SCORE
from edgekv_lab.saved import load_json, save_json

if TYPE_CHECKING:
    from edgekv_lab.makers.training import Training

LAMBDA = 0.3
"""Weight of the cache score."""
GAMMA = 0.2
"""Discount for rows that are not used."""
SIGMA = 0.3
"""First step of CMA-ES, as a share of the target."""
RATIOS = tuple(round(0.01 * i, 2) for i in range(1, 100))

TOTALS = ("fixed", "free")

Scheme = NDArray[np.int64]
"""[n_layer] rows of each KV head of a layer."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How to search. population None: the paper's, from `group`. total: one of TOTALS, whether
    schemes are completed to the target before they are tried."""

    group: int = 8
    generations: int = 10
    population: int | None = None
    seed: int = 0
    total: str = TOTALS[0]

    @property
    def n_candidates(self) -> int:
        """Schemes of one generation."""
        return self.population or population(self.group)


DEFAULT = Search()


@dataclass(frozen=True)
class SearchPlan(Search):
    """What is searched, and how. target: mean rows of a layer; least, most: limits of one layer."""

    target: int
    least: int
    most: int

    def __post_init__(self) -> None:
        assert self.total in TOTALS
        if self.target <= self.least:
            raise BadInput(
                f"{self.target} tokens leave nothing to share out: sinks and window are"
                f" {self.least}; give a larger --kv-budget"
            )
        if self.target >= self.most:
            raise BadInput(
                f"{self.target} tokens are all that the shortest text has ({self.most} tokens); "
                "give a smaller --kv-budget or longer texts"
            )


@dataclass(frozen=True)
class Generation:
    """A point of the curve: where the search is, the best fitness so far, the generation's mean,
    rows of all layers of the best scheme.
    """

    group: int
    n_groups: int
    number: int
    n_generations: int
    best: float
    mean: float
    n_rows: int


def load(path: str, n_ctx: int, **options: Any) -> Llama:
    """A model as `make` needs it. options: of `llama_cpp.Llama` (n_threads, n_gpu_layers, ...)."""
    return Llama(
        path,
        kv_ratio=0.5,
        kv_method=SCORE,
        kv_profile="none",
        n_ctx=n_ctx,
        **{"verbose": False, **options},
    )


def make(
    training: Training,
    target: int,
    how: Search = DEFAULT,
    *,
    partial: Path | None = None,
    report: Callable[[Generation], None] = lambda point: None,
    command: str = "",
) -> Profile:
    """The EvolKV profile of a model for a task. target: mean rows of each KV head.

    partial: where scores are kept, so that the same call goes on after it was stopped; gone in the
    end. report: is given the curve, and may raise to stop it. Raises BadInput for a target that the
    texts or the protected rows make pointless, and where no scheme scores.
    """
    llm = training.llm
    assert llm.engine is not None
    settings, model = llm.engine.settings, identify(llm.model_path)
    least = settings.sink + settings.window
    plan = SearchPlan(target, least, training.n_tokens, **vars(how))
    key = hashlib.sha256(
        repr((model, training.task, settings.sink, settings.window)).encode()
    ).hexdigest()
    scores = Scores(training.score, partial, key)
    rows, best = search(scores, training.n_layer, plan, report)
    if best <= 0:
        raise BadInput(
            "no candidate found an answer, so nothing was learned: use --fitness likelihood, a"
            " larger --kv-budget or easier texts"
        )
    heads = taking_part(llm.engine.store)
    table = np.zeros((len(RATIOS), *heads.shape))
    table[:, llm.engine.full_layers] = shares(complete(rows, plan), RATIOS)[:, :, None]
    scores.remove()
    return Profile(
        model,
        "evolkv",
        RATIOS,
        np.where(heads, table, 0).astype(np.float32),
        SCORE,
        settings.window,
        settings.sink,
        training.task,
        command,
        seed=how.seed,
    )


class Scores:
    """Scores of schemes, each asked for once and kept in the file `path` if there is one.

    key: of model and task; what the file has for others, or a file that cannot be read, counts for
    nothing. A search that was stopped asks for the same schemes again, so it goes on where it was.
    """

    def __init__(self, score: Callable[[Scheme], float], path: Path | None, key: str) -> None:
        self._score, self._path, self._key = score, path, key
        self._done = self._saved()

    def __call__(self, rows: Scheme) -> float:
        name = ",".join(map(str, rows))
        if name not in self._done:
            self._done[name] = self._score(rows)
            if self._path is not None:
                save_json(self._path, {"key": self._key, "scores": self._done})
        return self._done[name]

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _saved(self) -> dict[str, float]:
        saved = load_json(self._path) if self._path else {}
        scores = saved.get("scores")
        if saved.get("key") != self._key or not isinstance(scores, dict):
            return {}
        numbers = {n: score for n, score in scores.items() if type(score) in (int, float)}
        return {name: float(score) for name, score in numbers.items() if 0 <= score <= 1}


def search(
    score: Callable[[Scheme], float],
    n_layer: int,
    plan: SearchPlan,
    report: Callable[[Generation], None] = lambda point: None,
) -> tuple[Scheme, float]:
    """The best scheme and its fitness. score: a scheme's score on the task, 0..1; the same plan and
    scores give the same scheme.
    """
    cma = import_cma()
    best: NDArray[np.int64] = np.full(n_layer, plan.target, np.int64)
    best_fitness = fitness(score(best), best, plan.target)
    random = np.random.RandomState(plan.seed)  # of its own: CMA-ES would take NumPy's global one
    parts = groups(n_layer, plan.group)
    for i, part in enumerate(parts):
        options = {
            "popsize": plan.n_candidates,
            "bounds": [plan.least / plan.target, plan.most / plan.target],
            "randn": random.randn,
            "seed": float("nan"),
            "verbose": -9,
        }
        evolution = cma.CMAEvolutionStrategy(best[part] / plan.target, SIGMA, options)
        for number in range(plan.generations):
            points = evolution.ask()
            schemes = [_with(best, part, point, plan) for point in points]
            found = [fitness(score(scheme), scheme, plan.target) for scheme in schemes]
            _tell(evolution, points, found)
            if max(found) > best_fitness:
                best_fitness, best = max(found), schemes[int(np.argmax(found))]
            mean, n_rows = float(np.mean(found)), int(best.sum())
            report(
                Generation(
                    i + 1, len(parts), number + 1, plan.generations, best_fitness, mean, n_rows
                )
            )
    return best, best_fitness


def fitness(score: float, rows: Scheme, target: int) -> float:
    """Equation 1: the task's score, with a bonus of up to LAMBDA."""
    return score * (1 + LAMBDA * cache_score(float(rows.mean()), target))


def cache_score(mean: float, target: float) -> float:
    """Equation 2, 0..1: 1 for a mean of exactly `target` rows, falling fast above it and gently
    below.
    """
    return (
        max(0.0, 1 - (mean - target) / target) if mean > target else 1 - GAMMA * (1 - mean / target)
    )


def complete(rows: Scheme, plan: SearchPlan) -> Scheme:
    """`rows` in the same proportions with exactly the target as their mean, within the limits:
    budget completion, as at run time.
    """
    have, layers = np.full((len(rows), 1), plan.most, np.int32), tuple(range(len(rows)))
    whole = budget.Plan(
        plan.target, have, layers, plan.most, 0, plan.least, plan.target / plan.most
    )
    return budget.from_shares(rows[:, None] / plan.most, whole)[:, 0].astype(np.int64)


def shares(rows: Scheme, ratios: Sequence[float] = RATIOS) -> NDArray[np.float64]:
    """float64 [n_ratio, n_layer]: the share of its rows that a layer keeps: as `rows` in
    proportion, none above 1, in the mean the ratio.
    """
    return np.stack([scale(rows / rows.max(), ratio) for ratio in ratios])


def groups(n_layer: int, size: int) -> list[slice]:
    """Neighbouring layers, `size` each and the rest; none of one layer alone."""
    starts = list(range(0, n_layer, size))
    if n_layer - starts[-1] == 1 and len(starts) > 1:
        starts.pop()
    return [slice(begin, end) for begin, end in zip(starts, [*starts[1:], n_layer], strict=True)]


def population(group: int) -> int:
    """Schemes of a generation, by the empirical formula that the paper uses."""
    return 4 + floor(3 * log(group))


def _with(rows: Scheme, part: slice, point: NDArray[np.float64], plan: SearchPlan) -> Scheme:
    """The scheme `rows` with the layers of `part` as CMA-ES says, in units of the target."""
    out = rows.copy()
    out[part] = np.clip(np.rint(point * plan.target), plan.least, plan.most)
    return complete(out, plan) if plan.total == "fixed" else out


def _tell(evolution: Any, points: list[NDArray[np.float64]], found: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # equal scores are usual where a score counts hits
        evolution.tell(points, [-value for value in found])  # it minimises


def import_cma() -> Any:
    """The package `cma`. Raises EdgeKVError if it is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says about plotting
            import cma
    except ImportError:
        raise EdgeKVError(
            "EvolKV needs the package 'cma'; run: pip install 'edgekv[profile]'"
        ) from None
    return cma
