"""The task `squad`: questions about paragraphs among others, from a file in SQuAD's format.

Rajpurkar et al., arXiv 1606.05250; distractors as in RULER's qa_1. Questions without an answer
(SQuAD 2.0) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from edgekv.errors import BadInput
from edgekv_lab.eval.files import draw, load_json, words
from edgekv_lab.eval.haystack import Count
from edgekv_lab.eval.sample import Measure, Sample, SampleRequest, Task, spread

ANSWER_TOKENS = 32
INSTRUCTION = (
    "Read the following documents. Afterwards you will be asked a question about one of them."
)
QUESTION = (
    "Answer the question from the documents above with as few words as you can and nothing else."
    "\n\nQuestion: {question}"
)

Question = tuple[str, str, tuple[str, ...]]
"""Its id, the question, the right answers."""


def samples(request: SampleRequest) -> Iterator[Sample]:
    """Questions drawn by the seed. Raises BadInput for a file that is not in SQuAD's format."""
    paragraphs, asked = read(request.files)
    drawn = draw(asked, request.n, request.seed)
    places = spread(request.seed, "squad", len(drawn), request.lengths)
    for (_, (home, (name, question, references))), (rng, length, _, _) in zip(
        drawn, places, strict=True
    ):
        text = _documents(rng, paragraphs, home, length, request.count)
        yield Sample(
            name,
            f"{INSTRUCTION}\n\n{text}",
            QUESTION.format(question=question),
            references,
            ANSWER_TOKENS,
            ("f1", "exact"),
            tags={"length": length},
        )


def read(files: tuple[str, ...]) -> tuple[list[str], list[tuple[int, Question]]]:
    """All paragraphs, and each answerable question with its paragraph's number. Raises BadInput for
    a file that is not in SQuAD's format.
    """
    paragraphs: list[str] = []
    asked: list[tuple[int, Question]] = []
    for path in files:
        try:
            for article in load_json(path)["data"]:
                for paragraph in article["paragraphs"]:
                    asked += [
                        (len(paragraphs), _question(qa, path))
                        for qa in paragraph["qas"]
                        if qa["answers"]
                    ]
                    paragraphs.append(words(paragraph["context"], "context", path))
        except (KeyError, TypeError):
            raise BadInput(
                f"{path} is not in SQuAD's format (data, paragraphs, context, qas, answers)"
            ) from None
    if not asked:
        raise BadInput(f"there is no question with an answer in {', '.join(files)}")
    return paragraphs, asked


def _question(qa: dict[str, Any], where: str) -> Question:
    answers = dict.fromkeys(
        words(answer["text"], "answers: text", where) for answer in qa["answers"]
    )
    return str(qa["id"]), words(qa["question"], "question", where).strip(), tuple(answers)


def _documents(rng: Random, paragraphs: list[str], home: int, n_tokens: int, count: Count) -> str:
    """The paragraph among others of the file, all in an order drawn anew, at most n_tokens if the
    paragraph itself is no longer."""
    chosen, left = [paragraphs[home]], n_tokens - count(_numbered([paragraphs[home]]))
    for i in rng.sample(range(len(paragraphs)), len(paragraphs)):
        length = count(_numbered([paragraphs[i]]))
        if i == home or length > left:
            continue
        chosen.append(paragraphs[i])
        left -= length
        if left < n_tokens // 20:
            break
    rng.shuffle(chosen)
    return _numbered(chosen)


def _numbered(documents: list[str]) -> str:
    return "\n\n".join(
        f"Document {number}:\n{document}" for number, document in enumerate(documents, 1)
    )


TASK = Task(
    "squad",
    "Questions about paragraphs, from a file in SQuAD's format.",
    "Ask the questions of a SQuAD file (1.1 or 2.0); the paragraph of each stands among others up "
    "to --lengths. The score is SQuAD's F1, beside it the share of exact matches.",
    samples,
    asks=("files", "lengths"),
    measures=(Measure("score", "F1"), Measure("exact", "exact match")),
    cuts=True,
)
