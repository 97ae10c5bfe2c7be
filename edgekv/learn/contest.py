"""contest: scores, budgets, merges and cache types compete on the model itself.

A text of two calibration texts, of which the profile of a first use learns nothing, is read once
for each cache type. The candidates then evict from a copy of that cache (`edgekv.learn.reading`),
and tokens are fed behind it: how the text goes on, and questions about it with their answers,
because a cache that still writes well may have lost facts. A candidate is judged by the KL
divergence of the model's predictions from those with the full f16 cache, in the bytes that the
ratio allows: by the product of the mean over the one kind of token and over the other.

LU-KV and EvolKV take part where the model has a profile of that kind.

Not every pair is tried. All methods compete with q8_0 entries. At DECIDING ratios the best of them
and those that are nearly as good are tried with V in q4_0; with V in q5_1 where q4_0 brought
little, since where it brings much the type between the two brings hardly more; with K in q5_0 and V
in q4_0; and with K in q4_1 where those were nearer than keys of 8 bits. A full q4_0 cache is
measured beside them.

Each ratio's winner is then tried with recall (docs/recall.md) in the same bytes: tokens are fed as
if they were written, so all look up what they need. In a chat a question is nearer than that. At a
larger ratio recall brings less, so it is tried there only if it brought CLOSE at the one before.

Work: seven times N_READ tokens are read, and about 20 times 200 tokens are fed. That are 13,000
tokens, whatever the model; V in q5_1 adds some, and so do K in q4_1 and recall at 0.5.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekv.base import folders
from edgekv.base.stats import Progress
from edgekv.choice.choose import choose
from edgekv.errors import Cancelled, EdgeKVError
from edgekv.learn.cache_type import store_as
from edgekv.learn.calibration import TEXTS
from edgekv.learn.divergence import divergence, log_softmax
from edgekv.learn.reading import Reading, predict, written
from edgekv.learn.work import Work
from edgekv.llama.llama import Llama
from edgekv.memory.dense import can_have
from edgekv.methods import Preset, get
from edgekv.model.facts import model_info
from edgekv.native import llama_cpp
from edgekv.profiles.file import Profile
from edgekv.profiles.places import find
from edgekv.profiles.winners import (
    METHODS,
    OFFLINE,
    PLAIN,
    RATIOS,
    RECALL,
    TYPES,
    Distance,
    Winner,
    Winners,
)

ASKED = {"narrative": (0, 3), "letters": (0, 1)}
"""Texts and the numbers of the questions about them; what answers is in their first 500 words."""
DECIDING = (0.2, 0.1)
"""Ratios at which all methods compete; at 0.5 a cache of 8 bits keeps nearly everything."""
N_READ = 1280
"""Tokens that are compressed, the same number of each text."""
N_NEXT = 96
"""Tokens of the last text's continuation that are judged."""
N_FED = 200
"""Tokens that are judged, about."""
N_READINGS, N_TRIES = 7, 20
CLOSE = 1.5
"""A candidate that is judged to be this much further away than the best one may be nearer with
other cache types: 200 tokens do not tell them apart.
"""
ALIKE = 1.25
"""N_NEXT tokens do not tell apart two distances that differ by less than this factor."""
FULL, EIGHT, F16, FOUR = "full", "q8_0", "f16", "q4_0"
K80_V40, K80_V51, K50_V40, K41_V40 = "q8_0/q4_0", "q8_0/q5_1", "q5_0/q4_0", "q4_1/q4_0"
ROOM = 512
"""Tokens that are judged, at most."""


@dataclass(frozen=True)
class ContestText:
    """Tokens to compress, and to feed behind: n_next of the continuation, questions, answers."""

    read: tuple[int, ...]
    fed: tuple[int, ...]
    n_next: int


@dataclass(frozen=True)
class Entrant:
    """A method at a ratio in a cache type, 'q8_0' or 'q8_0/q5_1'."""

    method: str
    ratio: float
    kind: str


def n_ctx() -> int:
    """Tokens that a context needs."""
    return N_READ + ROOM


def n_tokens() -> int:
    """Tokens that go through the model, about."""
    return N_READINGS * N_READ + N_TRIES * N_FED


def cost(llm: Llama) -> int:
    """The time that it takes, in the unit of a probe profile: a token that is read twice and
    scored, with many others. A token that is fed goes through the model with few others, and
    through the output matrix, which is most of a small model with a large vocabulary; and the
    log-probability of a word takes as long as some hundred weights. No script measures the
    factors, which make the bar move evenly.
    """
    output = llm.n_vocab() * llm.n_embd()
    others = max(llama_cpp.llama_model_n_params(llm.model) - output, 1)
    per_fed = 0.9 * (1 + output / others) + 800 * llm.n_vocab() / others
    return int(N_READINGS * N_READ / 2 + N_TRIES * N_FED * per_fed)


def judged(llm: Llama, profile: Profile, path: Path, progress: Progress | None = None) -> Profile:
    """The profile in the file `path` with the winners of a contest; without maps as it is."""
    if profile.surrogate is None:
        return profile
    return replace(profile, contest=hold(llm, str(path), progress))


def hold(llm: Llama, profile: str, progress: Progress | None = None) -> Winners:
    """The winners for a model with a store, whose cache is left empty and of some type.

    profile: the file of its profile, which has maps. progress: see `edgekv.learn.work`.
    A model that no contest can be held with has none, and a line in the log says why.
    """
    work = Work([cost(llm)], (), progress)
    try:
        return _Contest(llm, profile, work).winners()
    except Cancelled:
        raise
    except EdgeKVError as error:
        logging.getLogger("edgekv").warning("edgekv: no contest of methods: %s", error)
        return Winners()
    finally:
        llm.reset()
        work.end(0)


class _Contest:
    def __init__(self, llm: Llama, profile: str, work: Work) -> None:
        self._llm, self._report, self._done = llm, work.piece(0), 0
        self._text = text(llm)
        self._presets = {FULL: get(FULL)} | {
            name: choose(name, llm.model_path, profile) for name in METHODS
        }
        for name in OFFLINE:
            if find(llm.model_path, kind=name):
                self._presets[name] = choose(name, llm.model_path)
        self._whole: list[NDArray[np.float32]] = []
        """Log-probabilities of the judged tokens with the full f16 cache, see `_predict`."""
        self.found: dict[Entrant, Distance] = {}

    def winners(self) -> Winners:
        shape = model_info(self._llm.model_path)
        kinds = [kind(*types) for types in TYPES if can_have(shape, types)]
        all_of_them = [(name, r) for name in self._presets if name != FULL for r in DECIDING]
        rest = [(name, r) for r in RATIOS if r not in DECIDING for name in (METHODS[0], PLAIN)]
        first = EIGHT if EIGHT in kinds else F16
        self._try(F16, rest[:1] if first != F16 else [*all_of_them, *rest])
        if first != F16:
            self._try(first, [*all_of_them, *rest])
            close = [(name, ratio) for ratio in DECIDING for name in self._close(ratio)]
            for other in kinds[1:-1]:
                self._try(other, [(name, r) for name, r in close if self._promises(other, r)])
        return Winners(
            self._with_recall([self._winner(ratio) for ratio in sorted(RATIOS)]),
            self._four() if can_have(shape, (FOUR, FOUR)) else None,
            len(self._text.read),
            len(self._text.fed),
        )

    def _try(self, kind: str, entrants: Sequence[tuple[str, float]]) -> None:
        """Let (method, ratio) compete in one cache type; in f16 the full cache comes first."""
        if not entrants:
            return
        reading = self._read(kind, [self._presets[name] for name, _ in entrants])
        if kind == F16:
            self._whole = list(self._predict(reading, FULL, 1.0))
        for name, ratio in entrants:
            self.found[Entrant(name, ratio, kind)] = self._distance(reading, name, ratio)

    def _promises(self, kind: str, ratio: float) -> bool:
        """Whether a cache type may be nearest at a ratio, by those that were tried."""
        if kind == K80_V51:
            return self._nearest(EIGHT, ratio) < CLOSE * self._nearest(K80_V40, ratio)
        if kind == K41_V40:
            return self._nearest(K50_V40, ratio) < self._nearest(K80_V40, ratio)
        return True

    def _nearest(self, kind: str, ratio: float) -> float:
        at = [x for one, x in self.found.items() if (one.kind, one.ratio) == (kind, ratio)]
        return min((x.judged for x in at), default=np.inf)

    def _read(self, kind: str, presets: Sequence[Preset], *, plain: bool = False) -> Reading:
        store_as(self._llm, kind, plain=plain)
        once = {preset.name: preset for preset in presets}
        reading = Reading(self._llm, self._text.read, list(once.values()))
        self._tell(len(self._text.read))
        return reading

    def _predict(self, reading: Reading, name: str, ratio: float) -> Iterator[NDArray[np.float32]]:
        """Log-probabilities behind what a method leaves of the text, some tokens [n, n_vocab] at a
        time: those of a large vocabulary take a MiB for each token.
        """
        preset, fed = self._presets[name], self._text.fed
        settings = replace(self._llm.settings, preset=preset, ratio=ratio)
        reading.compress(preset, settings)
        yield from map(log_softmax, predict(self._llm, fed))
        self._tell(len(fed))

    def _distance(self, reading: Reading, name: str, ratio: float) -> Distance:
        return self._far(self._predict(reading, name, ratio))

    def _far(self, predicted: Iterator[NDArray[np.float32]]) -> Distance:
        blocks = zip(self._whole, predicted, strict=True)
        far = np.concatenate([divergence(*both) for both in blocks])
        n = self._text.n_next
        return Distance(float(far[:n].mean()), float(far[n:].mean()))

    def _tell(self, n: int) -> None:
        self._done += n
        self._report(min(self._done, n_tokens()), n_tokens())

    def _best(self, ratio: float) -> Entrant:
        """The nearest one so far; by text alone it is about as near as PLAIN."""
        most = ALIKE * self._plain(ratio).text
        at = [one for one, x in self.found.items() if one.ratio == ratio and x.text <= most]
        return min(at, key=lambda one: self.found[one].judged)

    def _close(self, ratio: float) -> list[str]:
        """The methods that are nearly as good as the best one so far, and that one."""
        best = self._best(ratio)
        most = CLOSE * self.found[best].judged
        at = [one for one, x in self.found.items() if one.ratio == ratio and x.judged <= most]
        return list(dict.fromkeys(one.method for one in (best, *at)))

    def _plain(self, ratio: float) -> Distance:
        at = [x for one, x in self.found.items() if (one.method, one.ratio) == (PLAIN, ratio)]
        return min(at, key=lambda distance: distance.judged)

    def _winner(self, ratio: float) -> Winner:
        best = self._best(ratio)
        k, _, v = best.kind.partition("/")
        return Winner(ratio, best.method, k, v or k, self.found[best], self._plain(ratio))

    def _with_recall(self, winners: Sequence[Winner]) -> tuple[Winner, ...]:
        """winners: of rising ratios."""
        found, gain = list[Winner](), None
        for one in winners:
            if gain is None or gain >= CLOSE:
                one = replace(one, recall=self._recalled(one))
                gain = one.recall_gain
            found.append(one)
        return tuple(found)

    def _recalled(self, winner: Winner) -> Distance | None:
        """How near the winner comes with recall; None where the model's tokens cannot be recalled,
        the index leaves too little of the bytes, or there can be no file.
        """
        llm, read = self._llm, list(self._text.read)
        store_as(llm, kind(*winner.types))
        engine = llm.engine
        assert engine is not None
        preset = replace(self._presets[winner.method], merge=None)
        engine.settings = replace(
            llm.settings, preset=preset, ratio=winner.ratio, recall=RECALL, tail=1 << 30
        )
        if engine.plan(len(read)).n_rows <= engine.least_with_index:
            return None
        try:
            engine.begin_archive(str(folders.cache()))
            llm.eval(read)
            self._tell(len(read))
            if engine.store.why_no_archive():  # no room on the disk
                return None
            found = self._far(map(log_softmax, written(llm, self._text.fed)))
            self._tell(len(self._text.fed))
            return found
        except Cancelled:
            raise
        except EdgeKVError:
            return None
        finally:
            store_as(llm, kind(*winner.types))  # a context without an archive

    def _four(self) -> Distance:
        return self._distance(self._read(FOUR, [], plain=True), FULL, 1.0)


def text(llm: Llama) -> ContestText:
    """What is read and judged, for a model's tokenizer."""
    lines = (TEXTS / "questions.tsv").read_text(encoding="utf-8").splitlines()
    n, read, following, words = N_READ // len(ASKED), list[int](), list[int](), ""
    for name, numbers in ASKED.items():
        words_of = (TEXTS / f"{name}.txt").read_text(encoding="utf-8")
        tokens = llm.tokenize(words_of.encode(), add_bos=not read)
        n_read = min(n, len(tokens) - N_NEXT)
        read += tokens[:n_read]
        following = tokens[n_read : n_read + N_NEXT]
        asked = [line.split("\t")[1:] for line in lines if line.startswith(f"{name}\t")]
        words += "".join("\n\n{}\n{}".format(*asked[i]) for i in numbers)
    answers = llm.tokenize(words.encode(), add_bos=False)
    return ContestText(tuple(read), tuple((following + answers)[:ROOM]), len(following))


def kind(type_k: str, type_v: str) -> str:
    """Types of K and V as one word, see `edgekv_lab.eval.sample.Row`."""
    return type_k if type_k == type_v else f"{type_k}/{type_v}"
