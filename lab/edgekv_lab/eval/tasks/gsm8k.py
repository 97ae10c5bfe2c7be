"""The task `gsm8k`: grade school problems behind worked examples, from the data set's jsonl.

Each line has question and answer, the answer ends with #### and the number.
Cobbe et al., arXiv 2110.14168. The eight worked examples are our own. Query-agnostic means here:
the examples are compressed, then the problem is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgekv.errors import BadInput
from edgekv_lab.eval.files import draw, load_lines
from edgekv_lab.eval.sample import Sample, SampleRequest, Task

ANSWER_TOKENS = 256
FIELDS = ("question", "answer")
INSTRUCTION = (
    "Solve each problem step by step. End with a line of four hash signs and the number that is"
    " asked for."
)
EXAMPLES = (
    (
        (
            "A ferry makes 6 crossings a day. On each crossing it carries 45 people and 12 cars."
            " How many people and cars does it carry in one day together?"
        ),
        (
            "On each crossing it carries 45 + 12 = 57 people and cars.\nIn a day that is 57 * 6 ="
            " 342.\n#### 342"
        ),
    ),
    (
        (
            "Olga has 84 tulip bulbs. She plants a third of them by the gate and 20 along the wall."
            " How many are left?"
        ),
        (
            "By the gate she plants 84 / 3 = 28 bulbs.\nAltogether she has planted 28 + 20 ="
            " 48.\nSo 84 - 48 = 36 are left.\n#### 36"
        ),
    ),
    (
        (
            "A baker sells rolls for $2 and loaves for $5. On Friday he sells 70 rolls and twice as"
            " many rolls as loaves. How much money does he take?"
        ),
        (
            "He sells 70 / 2 = 35 loaves.\nThe rolls bring 70 * 2 = $140.\nThe loaves bring 35 * 5"
            " = $175.\nTogether that is 140 + 175 = $315.\n#### 315"
        ),
    ),
    (
        (
            "Tomas walks to school in 18 minutes and takes the bus home in 7 minutes. How many"
            " minutes does he spend on the way in a week of 5 days?"
        ),
        (
            "Each day he spends 18 + 7 = 25 minutes.\nIn 5 days that is 25 * 5 = 125"
            " minutes.\n#### 125"
        ),
    ),
    (
        (
            "A tank holds 240 litres and is a quarter full. A pump adds 15 litres a minute. After"
            " how many minutes is the tank full?"
        ),
        (
            "In the tank there are 240 / 4 = 60 litres.\nIt lacks 240 - 60 = 180 litres.\nThe pump"
            " needs 180 / 15 = 12 minutes.\n#### 12"
        ),
    ),
    (
        "Ines is 4 years older than Paul. In 6 years Paul will be 20. How old is Ines now?",
        "Paul is now 20 - 6 = 14 years old.\nInes is 14 + 4 = 18 years old.\n#### 18",
    ),
    (
        (
            "A coat costs $80. It is reduced by 25%, and Mira has a voucher for another $10. What"
            " does she pay?"
        ),
        (
            "The reduction is 80 * 25 / 100 = $20.\nThe coat then costs 80 - 20 = $60.\nWith the"
            " voucher she pays 60 - 10 = $50.\n#### 50"
        ),
    ),
    (
        (
            "Three friends pick apples. Ana picks 24, Ben picks half as many as Ana, and Cleo picks"
            " 5 more than Ben. How many do they pick together?"
        ),
        (
            "Ben picks 24 / 2 = 12 apples.\nCleo picks 12 + 5 = 17 apples.\nTogether they pick 24 +"
            " 12 + 17 = 53 apples.\n#### 53"
        ),
    ),
)


def samples(request: SampleRequest) -> Iterator[Sample]:
    """Problems drawn by the seed. Raises BadInput for a file of another kind."""
    shots = "\n\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in EXAMPLES)
    for path in request.files:
        for number, record in draw(load_lines(path, FIELDS, FIELDS), request.n, request.seed):
            found = re.findall(r"####\s*(-?[\d,]*\.?\d+)", record["answer"])
            if not found:
                raise BadInput(f"{path}: record {number + 1} has no '#### number' in its answer")
            yield Sample(
                f"gsm8k-{number}",
                f"{INSTRUCTION}\n\n{shots}",
                f"Question: {record['question'].strip()}\nAnswer:",
                (found[-1],),
                ANSWER_TOKENS,
                ("final_number",),
                stop="\nQuestion:",
            )


TASK = Task(
    "gsm8k",
    "Grade school problems, from GSM8K's jsonl.",
    "Let the model calculate: problems of a GSM8K file behind eight worked examples of our own."
    " Right is the number behind ####, or else the last one of the reply.",
    samples,
    asks=("files",),
    columns=(),
    cuts=True,
)
