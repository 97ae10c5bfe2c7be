"""Variable tracking: a number is given to a variable, which is copied to others; which ones have
it?

RULER's vt with one chain of four copies in noise, and one small worked example in front.
"""

from __future__ import annotations

import string
from random import Random

from edgekv_lab.eval.haystack import Count, fill, hide, noise, room
from edgekv_lab.eval.sample import Sample

HOPS = 4
EXAMPLE_SENTENCES = 20
MAX_TOKENS = 40
INSTRUCTION = (
    "Follow the variables in each text: VAR A = 1 gives A a value, VAR B = VAR A gives B the value"
    " of A."
)
QUESTION = "Question: which variables in the text have the value {value}? List all {n} of them."
BEGIN = "Answer: the variables with the value {value} are"


def variables(rng: Random, n_tokens: int, count: Count) -> Sample:
    """A text of at most n_tokens, the example included. Raises BadInput if that is too short."""
    names, chain, value = _chain(rng)
    example_names, example_chain, example_value = _chain(rng)
    sentences = [s for s, _ in zip(noise(), range(EXAMPLE_SENTENCES), strict=False)]
    question = QUESTION.format(value=example_value, n=HOPS + 1)
    answer = f"{BEGIN.format(value=example_value)} {' '.join(example_names)}"
    example = f"{hide(sentences, example_chain, rng)}\n\n{question}\n\n{answer}"
    text = hide(
        fill(noise(), room(n_tokens, [INSTRUCTION, example, *chain], count), count), chain, rng
    )
    return Sample(
        "",
        f"{INSTRUCTION}\n\n{example}\n\n{text}",
        QUESTION.format(value=value, n=HOPS + 1),
        tuple(names),
        MAX_TOKENS,
        ("contains_all",),
        BEGIN.format(value=value),
    )


def _chain(rng: Random) -> tuple[list[str], list[str], str]:
    """Names of five capital letters, the assignments in order, and the value."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    value = str(rng.randint(10_000, 99_999))
    return (
        names,
        [
            f"VAR {names[0]} = {value}.",
            *(f"VAR {b} = VAR {a}." for a, b in zip(names, names[1:], strict=False)),
        ],
        value,
    )
