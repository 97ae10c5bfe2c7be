"""The tuned profile: another profile's shares, moved to the heads where rows bring the model nearest to its full cache.

This is edgekv's own, of none of the papers. EvolKV searches layers by a task's score; here every KV head has a share to be found, so slopes
are measured instead of candidates: on each text (`edgekv.profiles.nearness`) pairs of tables are tried in which the share of every head is a
step larger or smaller by chance, in the second of a pair the other way round (simultaneous perturbation; Spall, 1992). All tables have the same
rows in total, so what a head gains the others lose. Half the difference of a pair in the logarithm of the KL divergence to the full cache
is, but for noise, the sum of all heads' slopes with the signs of their steps, and ridge regression over the pairs of all texts gives the
slopes and their error. A head moves as far as its slope is steep beyond that error. The next round starts from there, with texts put
together anew.

Heads that keep (nearly) everything stay as they are. What is found for one ratio serves all: below it in proportion to the ratio, because
shares are small there and other heads decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekv.budget import Profile as ProfileBudget
from edgekv.errors import BadInput, Unsupported
from edgekv.profiles.file import Profile, scale
from edgekv.profiles.nearness import Nearness, case
from edgekv.profiles.partial import Saved, name_of
from edgekv.profiles.probe_profile import hash_of, texts

if TYPE_CHECKING:
    from edgekv.llama import Llama
    from edgekv.settings import Settings

STEP = 0.25
"""Of the logarithm of a share, while slopes are measured."""
FULL = 0.9
"""Shares from here on stay."""
RIDGE = 0.1
"""Of the regression, for each pair."""
NOISE = 1.5
"""Errors that are taken off a slope; a head without more does not move."""
PACE = 2.0
"""How far a head moves, in the logarithm of its share, for a slope of 1,"""
MOST = 0.5
"""and how far in a round at most."""

Progress = Callable[[int, int], None]
Table = NDArray[np.float64]
"""[n_layer, n_head_kv]"""


@dataclass(frozen=True)
class Plan:
    """rounds of n_cases texts of about n_tokens tokens, with n_pairs pairs of tables each; n_checks further texts judge the result."""

    rounds: int = 2
    n_cases: int = 24
    n_pairs: int = 12
    n_tokens: int = 2000
    n_checks: int = 8
    seed: int = 0

    @property
    def n_steps(self) -> int:
        """Tables that are tried."""
        return 2 * (self.rounds * self.n_cases * self.n_pairs + self.n_checks)


@dataclass(frozen=True)
class Check:
    """KL divergence to the full cache in nats, the mean over texts that nothing was learned from, before and after."""

    before: float
    after: float
    n: int


def load(path: str, method: str, ratio: float, n_tokens: int, profile: str | None = None, **options: Any) -> Llama:
    """A model as `make` needs it. options: of `llama_cpp.Llama` (n_threads, n_gpu_layers, ...). Raises BadInput for a method without shares."""
    from edgekv.llama import Llama
    from edgekv.choose import choose

    if not isinstance(choose(method, path, profile).budget, ProfileBudget):
        raise BadInput(f"'{method}' takes no shares from a profile; choose a method such as edgekv or score=keydiff,budget=profile")
    return Llama(path, kv_ratio=ratio, kv_method=method, kv_profile=profile, n_ctx=2 * n_tokens + 1024, verbose=False, **options)


def make(llm: Llama, start: Profile, plan: Plan = Plan(), *, partial: Path | None = None, progress: Progress | None = None,
         command: str = "") -> tuple[Profile, Check]:
    """The tuned profile of a model from `load`, and how much nearer it is. start: the profile that its method takes.

    partial: where finished texts are kept, so that the same call goes on after it was stopped, and one with more cases has those of the first
    round; gone in the end. progress(done, total) may raise to stop it. Raises BadInput if the result is no nearer, Unsupported if the model keeps llama.cpp's own cache.
    """
    if llm._kv is None:
        raise Unsupported(f"no profile can be made: the model {llm.kv_stats().note or 'was loaded uncompressed'}")
    ratio, settings, heads = float(llm._kv_settings.ratio), llm._kv_settings, start.heads
    shares, moves, done = start.shares_at(ratio), np.zeros(heads.shape), 0
    saved, key = Saved(partial), (start.model, settings.preset.name, ratio, settings.window, settings.sink, plan.n_tokens)

    def measured(seed: int, tables: list[Table]) -> NDArray[np.float64]:
        nonlocal done
        name = name_of(key, seed, [table.tobytes() for table in tables])
        if name not in saved:
            near, found = Nearness(llm, case(seed, plan.n_tokens, lambda text: llm.tokenize(text.encode(), add_bos=False))), []
            for i, table in enumerate(tables):
                found.append(near(table))
                if progress:
                    progress(done + i + 1, plan.n_steps)
            saved.put(name, found)
        done += len(tables)
        return np.array(saved[name])

    for number in range(plan.rounds):
        signs, halves = [], []
        for i in range(plan.n_cases):
            seed = plan.seed * 1_000_000 + number * plan.n_cases + i
            some = np.random.default_rng(seed).choice([-1.0, 1.0], (plan.n_pairs, *heads.shape)) * (heads & (shares < FULL))
            found = np.log(measured(seed, [moved(shares, moves + step * STEP) for sign in some for step in (sign, -sign)]))
            signs.append(some[:, heads])
            halves.append((found[::2] - found[1::2]) / 2)
        moves[heads] += step_from(*slopes(np.concatenate(signs), np.concatenate(halves)))
    pair = [shares, moved(shares, moves)]
    checks = np.array([measured(plan.seed * 1_000_000 + 999_999 - i, pair) for i in range(plan.n_checks)])
    check = Check(*checks.mean(axis=0).tolist(), plan.n_checks)
    if check.after >= check.before:
        raise BadInput(f"the shares that were found are no nearer to the full cache ({check.after:.4f} nats on texts that nothing was learned from, "
                       f"before {check.before:.4f}): give more --cases, or stay with the profile that there is")
    saved.remove()
    return _profile(start, moves, ratio, settings, command, plan.seed), check


def moved(shares: Table, moves: Table) -> Table:
    """The shares times exp(moves), none above 1; those of FULL and more as they are."""
    return np.where(shares >= FULL, shares, np.minimum(shares * np.exp(moves), 1))


def slopes(signs: NDArray[np.float64], halves: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Slopes [n] of the logarithm of the KL divergence over that of the share of n heads, and their error.

    From the signs [m, n] of m pairs (0: a head that stays), and half their differences [m].
    """
    n = signs.shape[1]
    moments = signs.T @ signs
    inverse = np.linalg.inv(moments + RIDGE * len(signs) * np.eye(n))
    found = inverse @ (signs.T @ halves)
    free = max(1.0, len(halves) - float(np.trace(inverse @ moments)))
    return found / STEP, float(np.sqrt(np.square(halves - signs @ found).sum() / free / len(halves))) / STEP


def step_from(slope: NDArray[np.float64], error: float) -> NDArray[np.float64]:
    """How far each head moves, in the logarithm of its share."""
    return -np.sign(slope) * np.clip(PACE * (np.abs(slope) - NOISE * error), 0, MOST)


def _profile(start: Profile, moves: Table, ratio: float, settings: Settings, command: str, seed: int) -> Profile:
    heads, table = start.heads, np.zeros_like(start.shares, np.float64)
    for i, r in enumerate(start.ratios):
        table[i, heads] = scale(moved(start.shares_at(r), moves * min(1.0, r / ratio))[heads], r)
    return Profile(start.model, "tuned", start.ratios, table.astype(np.float32), settings.preset.score.name, settings.window, settings.sink,
                   hash_of(texts()), command, seed=seed, surrogate=start.surrogate)
