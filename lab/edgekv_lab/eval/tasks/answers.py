"""The task `answers`: questions about texts, judged along the full cache's own answers.

Texts and questions come from files: SQuAD's format (its paragraphs in a row, and their questions),
lines of JSON with a text and questions, or any text, about which the model writes questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest
from pathlib import Path
from random import Random

from edgekv.errors import BadInput
from edgekv_lab.eval.files import load_lines, text_of, words
from edgekv_lab.eval.haystack import Count, fill
from edgekv_lab.eval.sample import ALONG, Sample, SampleRequest, Task, spread
from edgekv_lab.eval.tasks import squad

ANSWER_TOKENS = 32
EXCERPT = 600
"""Characters that a question is written from."""
INSTRUCTION = "Read the following text. Afterwards you will be asked a question about it."
QUESTION = "Answer this question about the text above.\n\nQuestion: {question}"
WRITE = (
    "Write one short question that can be answered from the following passage alone. Write the"
    " question and nothing else.\n\nPassage:\n{excerpt}"
)
FALLBACK = "What does the text say behind the words '{words}'?"
"""The question where the model writes none."""

Text = tuple[str, list[str]]
"""A text, and questions about it."""


def samples(request: SampleRequest) -> Iterator[Sample]:
    """Questions about the files' texts, file by file in turns; fewer than -n if the texts end.

    Raises BadInput for a file of another kind, and for one that has no text of such a length.
    """
    wanted = Counter(n for _, n, *_ in spread(request.seed, "answers", request.n, request.lengths))
    for length, n in wanted.items():
        texts = _in_turns([_texts(path, length, request) for path in request.files])
        for name, context, question in islice(_questions(texts, request.seed, request.n_each), n):
            yield Sample(
                f"answers-{length}-{name}",
                f"{INSTRUCTION}\n\n{context}",
                QUESTION.format(question=question),
                (),
                ANSWER_TOKENS,
                (),
                tags={"length": length},
            )


def _in_turns(files: list[Iterator[Text]]) -> Iterator[Text]:
    """The first text of each file, then the second of each, until all have ended."""
    for texts in zip_longest(*files):
        yield from filter(None, texts)


def _questions(texts: Iterable[Text], seed: int, n_each: int) -> Iterator[tuple[str, str, str]]:
    """(number of text and question, text, question); those of a text are drawn by the seed."""
    for number, (text, questions) in enumerate(texts):
        rng = Random(f"{seed} answers {number}")
        for i in sorted(rng.sample(range(len(questions)), min(n_each, len(questions)))):
            yield f"{number}-{i}", text, questions[i]


# ---- files


def _texts(path: str, length: int, request: SampleRequest) -> Iterator[Text]:
    kinds = {".json": _of_squad, ".jsonl": _of_lines}
    n_texts = 0
    for text in kinds.get(Path(path).suffix.lower(), _of_text)(path, length, request):
        n_texts += 1
        yield text
    if not n_texts:
        raise BadInput(f"{path} has no text of {length:,} tokens; give shorter --lengths")


def _of_squad(path: str, length: int, request: SampleRequest) -> Iterator[Text]:
    """Paragraphs in a row, from where the text before ended, and the questions about them that have
    an answer.
    """
    paragraphs, asked = squad.read((path,))
    first = 0
    while first < len(paragraphs):
        # One token more than is counted: the blank line.
        taken = fill(paragraphs[first:], length, lambda text: request.count(text) + 1)
        if not taken or first + len(taken) == len(paragraphs):
            return  # the last text would be shorter than asked for
        here = range(first, first + len(taken))
        questions = [question for home, (_, question, _) in asked if home in here]
        first += len(taken)
        if questions:
            yield "\n\n".join(taken), questions


def _of_lines(path: str, length: int, request: SampleRequest) -> Iterator[Text]:
    """A record's text, up to the length, and its questions."""
    for number, record in enumerate(load_lines(path, ("text", "questions"), ("text",)), 1):
        where, questions = f"{path}, record {number}", record["questions"]
        if not isinstance(questions, list) or not questions:
            raise BadInput(f"{where}: 'questions' has to be a list of texts")
        text = next(_pieces(record["text"], length, request.count), record["text"])
        yield text, [words(question, "questions", where).strip() for question in questions]


def _of_text(path: str, length: int, request: SampleRequest) -> Iterator[Text]:
    """Passages side by side from the start, and questions that the model writes."""
    for text in _pieces(text_of(path), length, request.count):
        step = len(text) // request.n_each
        yield text, [_written(text[i * step :], request) for i in range(request.n_each)]


def _written(text: str, request: SampleRequest) -> str:
    """A question that the model writes about how the text begins."""
    excerpt = text[:EXCERPT].partition(" ")[2].rpartition(" ")[0]
    lines = request.ask(WRITE.format(excerpt=excerpt)).strip().splitlines()
    question = (lines or [""])[0].removeprefix("Question:").strip()
    return question or FALLBACK.format(words=" ".join(excerpt.split()[:8]))


def _pieces(text: str, n_tokens: int, count: Count) -> Iterator[str]:
    """The text in pieces of about n_tokens, which end between words; not what is left over."""
    size = len(text) * n_tokens // max(count(text), 1)
    first = 0
    while size and first + size <= len(text):
        piece = text[first : first + size]
        first += size
        yield (piece if first == len(text) else piece.rpartition(" ")[0] or piece).strip()


TASK = Task(
    "answers",
    "Questions about texts: how near the answers are to the full cache's.",
    "Ask questions about texts of --lengths tokens. The full cache answers, and each row is judged "
    "by KL(full || row) along that answer, in nats a token, and at its first token. A file is in "
    "SQuAD's format (.json), has lines of JSON with 'text' and 'questions' (.jsonl), or is any "
    "text: then the model writes the questions.",
    samples,
    asks=("files", "lengths"),
    defaults={"n": "24"},
    measures=ALONG,
    follows=True,
)
