"""The task `needle`: is a 7-digit number under a named key still found, at any depth of the
text?
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from edgekv_lab.eval.haystack import Count, fill, room
from edgekv_lab.eval.sample import Sample, SampleRequest, Task, spread
from edgekv_lab.eval.sentences import sentences

ANSWER_TOKENS = 24  # the demo model answers in a sentence of about 16
KEY_COLOURS = (
    "amber azure bronze copper crimson golden indigo ivory jade lilac ochre olive pearl ruby"
    " scarlet silver teal violet".split()
)
KEY_NAMES = (
    "anchor badger beacon camel compass falcon fox hammer harp heron lantern lion mirror owl"
    " panther raven rocket saddle stag tiger trumpet turtle walrus wolf"
).split()
WORDINGS = (  # (the needle, the question)
    ("The access code for the {key} is {number}.", "What is the access code for the {key}?"),
    ("Please note that the number of the {key} is {number}.", "What is the number of the {key}?"),
    ("The secret number of the {key} is {number}.", "What is the secret number of the {key}?"),
    (
        "The registration number of the {key} is {number}.",
        "What is the registration number of the {key}?",
    ),
    ("The phone number of the {key} is {number}.", "What is the phone number of the {key}?"),
)
INSTRUCTION = (
    "Read the following text. A number is hidden in it. You will be asked for the number"
    " afterwards."
)


def samples(request: SampleRequest) -> Iterator[Sample]:
    """Needles spread evenly over the lengths and, within a length, over the depths."""
    for rng, length, index, n_here in spread(request.seed, "", request.n, request.lengths):
        yield _sample(rng, length, index, n_here, request.count)


def _sample(rng: Random, n_tokens: int, index: int, n_here: int, count: Count) -> Sample:
    depth, wording = (index + 0.5) / n_here, WORDINGS[index % len(WORDINGS)]
    key = f"{rng.choice(KEY_COLOURS)} {rng.choice(KEY_NAMES)}"
    number = str(rng.randint(1_000_000, 9_999_999))
    needle, question = (part.format(key=key, number=number) for part in wording)
    text = fill(sentences(rng), room(n_tokens, [needle], count), count)
    text.insert(round(depth * len(text)), needle)
    return Sample(
        f"needle-{n_tokens}-{index}",
        f"{INSTRUCTION}\n\n{' '.join(text)}",
        f"{question} Answer with the number.",
        (number,),
        ANSWER_TOKENS,
        ("contains_all",),
        tags={"length": n_tokens, "depth": depth},
    )


TASK = Task(
    "needle",
    "7-digit numbers hidden in a text at all depths.",
    "Hide 7-digit numbers in a text and ask for them. The plot is a heat map over length and"
    " depth.",
    samples,
    asks=("lengths",),
    heat=True,
)
