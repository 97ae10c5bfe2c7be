"""The task `ruler`: RULER's families side by side, a column for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from edgekv.errors import BadInput
from edgekv_lab.eval.haystack import Count
from edgekv_lab.eval.ruler.counting import common_words, frequent_words
from edgekv_lab.eval.ruler.niah import Niah
from edgekv_lab.eval.ruler.variables import variables
from edgekv_lab.eval.sample import Sample, SampleRequest, Task, spread

FAMILIES: dict[str, Callable[[Random, int, Count], Sample]] = {
    "single-noise": Niah(noise=True),
    "single": Niah(),
    "multikey": Niah(keys=4),
    "multivalue": Niah(values=4),
    "multiquery": Niah(keys=4, queries=4),
    "variables": variables,
    "common-words": common_words,
    "frequent-words": frequent_words,
}


def samples(request: SampleRequest) -> Iterator[Sample]:
    """n samples of each family, spread over the lengths. Raises BadInput for a family that there is
    not.
    """
    for name in request.families or FAMILIES:
        if name not in FAMILIES:
            raise BadInput(f"there is no family '{name}'; choose from: {', '.join(FAMILIES)}")
        for rng, length, index, _ in spread(request.seed, name, request.n, request.lengths):
            sample = FAMILIES[name](rng, length, request.count)
            yield replace(
                sample, id=f"{name}-{length}-{index}", tags={"family": name, "length": length}
            )


TASK = Task(
    "ruler",
    "RULER's families: needles of several kinds, variables, word counts.",
    "Ask what RULER asks: -n samples of each family, in text and words of our own. The score is"
    f" the share of the right answers that stand in the reply.\n\nFamilies: {', '.join(FAMILIES)}.",
    samples,
    asks=("lengths", "families"),
    columns=("family", "length"),
)
