"""The task `longbench`: any jsonl of LongBench (arXiv 2308.14508), each set with its official
metric.

From the official harness: answer lengths, metrics, which sets are few-shot and go without the chat
template, which replies end with their first line, and that a prompt that is too long loses its
middle. Instructions say the same in our words. Sets in Chinese are not
scored: their metrics need a word segmenter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgekv.errors import BadInput
from edgekv_lab.eval.files import draw, load_lines, words
from edgekv_lab.eval.sample import Sample, SampleRequest, Task

SHORT = "Answer as briefly as you can, with one phrase if possible, and explain nothing."
FIELDS = ("input", "context", "answers", "dataset")
TEXTS = ("input", "context", "dataset")
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")


@dataclass(frozen=True)
class Kind:
    """How a data set is asked. before and question may hold {input}; chat: false for completions
    and few-shot prompts.
    """

    metric: str
    max_tokens: int
    before: str
    question: str
    chat: bool = True
    first_line: bool = False


def _qa(what: str, max_tokens: int, more: str = "") -> Kind:
    return Kind(
        "f1",
        max_tokens,
        f"Here is {what}. A question about it follows. {SHORT}{more}",
        f"{SHORT}{more}\n\nQuestion: {{input}}\nAnswer:",
    )


def _several(max_tokens: int) -> Kind:
    return Kind(
        "f1",
        max_tokens,
        "Here are some passages. A question about them follows. Give only the answer, no other"
        " words.",
        "Give only the answer, no other words.\n\nQuestion: {input}\nAnswer:",
    )


KINDS: dict[str, Kind] = {
    "narrativeqa": _qa("a story, a book or a film script", 128),
    "qasper": _qa(
        "a scientific article",
        128,
        ' If the article does not tell, write "unanswerable"; if the question is a yes/no question,'
        ' write "yes", "no" or "unanswerable".',
    ),
    "multifieldqa_en": _qa("a text", 64),
    "hotpotqa": _several(32),
    "2wikimqa": _several(32),
    "musique": _several(32),
    "gov_report": Kind(
        "rouge_l",
        512,
        "Here is a report by a government agency, to be summarised on one page.",
        "Now write a one-page summary of the report.\n\nSummary:",
    ),
    "qmsum": Kind(
        "rouge_l",
        512,
        "Here is the transcript of a meeting. A question or an instruction about it follows.",
        "Answer it in one or more sentences.\n\nQuery: {input}\nAnswer:",
    ),
    "multi_news": Kind(
        "rouge_l",
        512,
        "Here are several news articles, to be summarised together on one page.",
        "Now write a one-page summary of all the articles.\n\nSummary:",
    ),
    "trec": Kind(
        "classification",
        64,
        "Find the type of the last question; the examples show how.",
        "{input}",
        chat=False,
        first_line=True,
    ),
    "triviaqa": Kind(
        "f1",
        32,
        "Answer the last question from its passage, with the answer alone; the examples show how.",
        "{input}",
        chat=False,
        first_line=True,
    ),
    "samsum": Kind(
        "rouge_l",
        128,
        "Summarise the last dialogue in a few sentences; the examples show how.",
        "{input}",
        chat=False,
        first_line=True,
    ),
    "passage_count": Kind(
        "count",
        32,
        "Here are paragraphs from an encyclopedia. Some of them are repeated. Count how many"
        " different ones there are.",
        "How many different paragraphs are there? Give the number alone.\n\nAnswer:",
    ),
    "passage_retrieval_en": Kind(
        "retrieval",
        32,
        "Here are numbered paragraphs from an encyclopedia, and then a summary of one of them.",
        'Summary: {input}\n\nWhich paragraph is this a summary of? Answer in the form "Paragraph'
        ' 1".\n\nAnswer:',
    ),
    "lcc": Kind("code", 64, "Continue this code.", "Next line of code:\n", chat=False),
    "repobench-p": Kind(
        "code", 64, "Continue this code.", "{input}Next line of code:\n", chat=False
    ),
}


def samples(request: SampleRequest) -> Iterator[Sample]:
    """-n records of each file, drawn by the seed. Raises BadInput for a data set that is not
    known.
    """
    for path in request.files:
        for number, record in draw(load_lines(path, FIELDS, TEXTS), request.n, request.seed):
            yield _sample(record, f"{path}, record {number + 1}")


def _sample(record: dict[str, Any], where: str) -> Sample:
    dataset = record["dataset"].removesuffix("_e")
    if dataset in CHINESE:
        raise BadInput(
            f"{where}: '{dataset}' is Chinese, whose metrics need a word segmenter that edgekv does"
            " not have; leave it out"
        )
    if dataset not in KINDS:
        raise BadInput(
            f"{where}: the data set '{dataset}' is not known; its 'dataset' field may be one of:"
            f" {', '.join(KINDS)}"
        )
    kind, answers = KINDS[dataset], _texts(record, "answers", where)
    if not answers:
        raise BadInput(f"{where}: there is no answer")
    return Sample(
        str(record.get("_id", where)),
        f"{kind.before}\n\n{record['context']}",
        kind.question.format(input=record["input"]),
        answers,
        kind.max_tokens,
        (kind.metric,),
        chat=kind.chat,
        stop="\n" if kind.first_line else "",
        classes=_texts(record, "all_classes", where),
        tags={"dataset": dataset},
    )


def _texts(record: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A list of texts; some copies of the data set hold it as one text, and None for no list."""
    value = record.get(name)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            # the last one: nested too deep
            value = [value]
    items = value if isinstance(value, (list, tuple)) else []
    return tuple(words(str(x) if isinstance(x, (int, float)) else x, name, where) for x in items)


TASK = Task(
    "longbench",
    "Files in LongBench's format, each with its official metric.",
    "Ask what the records of LongBench files ask (fields input, context, answers, all_classes,"
    " dataset), -n of each file. Scored by kind: F1, ROUGE-L, classification, retrieval, counting,"
    f" edit similarity.\n\nData sets: {', '.join(KINDS)}.",
    samples,
    asks=("files",),
    columns=("dataset",),
    cuts=True,
)
