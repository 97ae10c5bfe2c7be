"""The task `paraphrase`: facts asked for in other words, among decoys.

The question shares no content word with its needle, so that looking for the question's words finds
nothing (the idea of NoLiMa, Modarressi et al., arXiv 2502.05167; the facts are our own). Three
decoys have numbers of other things, one has the question's own word in it and no number.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from edgekv_lab.eval.haystack import Count, fill, hide, room
from edgekv_lab.eval.sample import Sample, SampleRequest, Task, spread
from edgekv_lab.eval.sentences import sentences

ANSWER_TOKENS = 32
N_DECOYS = 3
FACTS = (  # (what the needle says, what is asked, the word of the question that a decoy has)
    ("You can ring the doctor on {number}.", "What is the physician's phone number?", "physician"),
    ("The vault opens when you dial {number}.", "What is the combination of the safe?", "safe"),
    (
        "The parcel from overseas travels under {number}.",
        "What is the tracking code of the package?",
        "package",
    ),
    (
        "The old automobile bears the plate {number}.",
        "What is the registration number of the car?",
        "car",
    ),
    (
        "To get into the building you type {number} at the entrance.",
        "What is the code of the front door?",
        "front door",
    ),
    ("The computer unlocks with {number}.", "What is the password of the laptop?", "laptop"),
    (
        "The locomotive has {number} painted on its side.",
        "What is the number of the train?",
        "train",
    ),
    (
        "The museum has listed the painting as {number}.",
        "What is the inventory number of the picture?",
        "picture",
    ),
    ("Donations go to account {number}.", "What is the bank number for gifts of money?", "bank"),
    ("The aircraft to Lisbon leaves as {number}.", "What is the flight number?", "flight"),
    (
        "The soldier's metal tag says {number}.",
        "What is the service number of the man in the army?",
        "army",
    ),
    (
        "The invoice for the roof is filed as {number}.",
        "What is the reference of the bill?",
        "bill",
    ),
)
LURE = (
    "For years people had talked about the {word}, but nobody remembered what had been the matter."
)
INSTRUCTION = (
    "Read the following text. Some numbers are hidden in it. You will be asked for one of them"
    " afterwards."
)
QUESTION = "{question} Answer with the number."


def samples(request: SampleRequest) -> Iterator[Sample]:
    """Facts spread over the lengths, each at a place drawn anew."""
    for rng, length, index, _ in spread(request.seed, "paraphrase", request.n, request.lengths):
        yield _sample(rng, length, index, request.count)


def _sample(rng: Random, n_tokens: int, index: int, count: Count) -> Sample:
    facts = rng.sample(FACTS, 1 + N_DECOYS)
    numbers = [str(rng.randint(1_000_000, 9_999_999)) for _ in facts]
    _, question, word = facts[0]
    hidden = [
        statement.format(number=number)
        for (statement, _, _), number in zip(facts, numbers, strict=True)
    ] + [LURE.format(word=word)]
    rng.shuffle(hidden)
    text = fill(sentences(rng), room(n_tokens, hidden, count), count)
    return Sample(
        f"paraphrase-{n_tokens}-{index}",
        f"{INSTRUCTION}\n\n{hide(text, hidden, rng)}",
        QUESTION.format(question=question),
        (numbers[0],),
        ANSWER_TOKENS,
        ("contains_all",),
        tags={"length": n_tokens},
    )


TASK = Task(
    "paraphrase",
    "Facts asked for in other words, among decoys.",
    "Hide numbers in a text and ask for one of them in words that the text does not use. Any of the"
    " hidden numbers would be right in one of four cases.",
    samples,
    asks=("lengths",),
)
