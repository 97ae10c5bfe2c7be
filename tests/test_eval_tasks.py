"""The tasks: the same request gives the same samples, sizes are as asked, answers are in the text,
files of all kinds are read.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.errors import BadInput
from edgekv_lab.eval import haystack, vocabulary
from edgekv_lab.eval.metrics import METRICS
from edgekv_lab.eval.ruler import counting
from edgekv_lab.eval.sample import SampleRequest
from edgekv_lab.eval.sentences import sentences
from edgekv_lab.eval.tasks import (
    TASKS,
    answers,
    gsm8k,
    longbench,
    needle,
    paraphrase,
    ppl,
    ruler,
    squad,
)
from edgekv_lab.eval.tasks import get as task_of

GENERATED = (needle, paraphrase, ruler)


def tokens(text: str) -> list[int]:
    return list(range(count(text)))


def count(text: str) -> int:
    return len(text.split())


def request(seed: int = 0, n: int = 20, lengths=(300, 600), files=(), **more) -> SampleRequest:
    return SampleRequest(seed, n, tokens, tuple(lengths), tuple(map(str, files)), **more)


def body(sample) -> str:
    """The text behind the instruction."""
    return sample.context.split("\n\n", 1)[1]


# ---- all that are generated


@pytest.mark.parametrize("module", GENERATED)
def test_the_same_seed_gives_the_same_samples_and_another_gives_others(module):
    first, again, other = (list(module.samples(request(seed, n=4))) for seed in (0, 0, 1))
    assert first == again
    assert not {s.context for s in first} & {s.context for s in other}
    assert len({s.id for s in first}) == len(first)


@pytest.mark.parametrize("module", GENERATED)
def test_texts_have_the_length_asked_for(module):
    for sample in module.samples(request(n=4, lengths=(400, 900))):
        slack = (
            0.15
            if sample.tags.get("family") in ("frequent-words", "common-words", "variables")
            else 0.08
        )
        assert (
            (1 - slack) * sample.tags["length"]
            < count(sample.context)
            <= sample.tags["length"] + 25
        ), sample.id  # 25: the instruction


@pytest.mark.parametrize("module", GENERATED)
def test_right_answers_are_in_the_text_and_not_in_the_question(module):
    for sample in module.samples(request(n=6)):
        assert METRICS[sample.metrics[0]](sample.context, sample) == 1, sample.id
        assert METRICS[sample.metrics[0]](sample.question + sample.begin, sample) == 0, sample.id


@pytest.mark.parametrize("module", GENERATED)
def test_a_text_too_short_for_what_is_hidden_is_refused(module):
    with pytest.raises(BadInput, match="lengths"):
        list(module.samples(request(lengths=(3,))))


def test_odd_numbers_of_samples_are_all_there():
    assert [s.tags["length"] for s in needle.samples(request(n=7, lengths=(200, 300, 400)))] == [
        200
    ] * 3 + [300] * 2 + [400] * 2


def test_every_task_is_whole():
    for name in TASKS:
        task = task_of(name)
        assert task.name == name
        assert task.title
        assert task.help
        assert set(task.asks) <= {"lengths", "files", "families", "n_next"}


# ---- the text itself


def test_text_is_varied():
    text = list(islice(sentences(Random(1)), 400))
    assert len(set(text)) == len(text)
    assert text == [" ".join(sentence.split()) for sentence in text]
    assert not [
        sentence
        for sentence in text
        if "{" in sentence or not sentence[0].isupper() and sentence[0] != '"'
    ]


def test_names_are_distinct_and_more_than_there_are_nouns():
    assert len(set(vocabulary.NOUNS)) == len(vocabulary.NOUNS)
    assert len(set(vocabulary.ADJECTIVES)) == len(vocabulary.ADJECTIVES)
    drawn = vocabulary.words(Random(0), 2000)
    assert len(set(drawn)) == 2000


@given(st.integers(0, 200), st.integers(1, 50))
def test_largest_finds_the_last_that_fits(bound, start):
    assert haystack.largest(lambda n: n <= bound, start) == bound
    assert haystack.largest(lambda n: False, start) == -1


@given(st.integers(0, 30), st.integers(1, 8), st.integers(0, 99))
def test_hidden_sentences_keep_their_order_and_the_text_its_own(n, n_hidden, seed):
    text, hidden = [f"t{i}" for i in range(n)], [f"h{i}" for i in range(n_hidden)]
    out = haystack.hide(text, hidden, Random(seed)).split()
    assert [x for x in out if x[0] == "t"] == text and [x for x in out if x[0] == "h"] == hidden


# ---- needles


def test_needles_are_spread_over_the_depths():
    for length in (300, 600):
        tags = [s.tags for s in needle.samples(request()) if s.tags["length"] == length]
        assert [t["depth"] for t in tags] == pytest.approx(
            [0.05 + 0.1 * index for index in range(10)]
        )


def test_a_prompt_holds_its_needle_once_at_its_depth_and_no_other_digit():
    for sample in needle.samples(request()):
        assert re.findall(r"\d+", sample.context) == list(sample.references)
        assert body(sample).index(sample.references[0]) / len(body(sample)) == pytest.approx(
            sample.tags["depth"], abs=0.06
        )
        key = re.search(r"the (\w+ \w+)\?", sample.question).group(1)
        assert sample.context.count(key) == 1


STOP = set(
    "a an the of in for is was what which who are you can on when to at as it its with one them him"
    " her be by from s that says".split()
)


def content(text: str) -> set[str]:
    """Words that carry meaning, cut to their stems, roughly."""
    return {word[:4] for word in re.findall(r"[a-z]+", text.lower()) if word not in STOP}


def test_a_question_shares_no_content_word_with_its_fact_but_with_a_decoy():
    for statement, question, word in paraphrase.FACTS:
        assert not content(statement.format(number="")) & content(question), question
        assert word in question and content(word) & content(paraphrase.LURE.format(word=word))
        assert not content(statement.format(number="")) & content(paraphrase.LURE.format(word=word))


def test_decoys_are_other_facts_with_other_numbers():
    for sample in paraphrase.samples(request(n=8)):
        assert len(set(re.findall(r"\d{7}", sample.context))) == 1 + paraphrase.N_DECOYS


# ---- RULER


def family(name: str, n_tokens: int = 600):
    (sample,) = ruler.samples(request(n=1, lengths=(n_tokens,), families=(name,)))
    return sample


@pytest.mark.parametrize(
    ("name", "hidden", "wanted"),
    [
        ("single-noise", 1, 1),
        ("single", 1, 1),
        ("multikey", 4, 1),
        ("multivalue", 4, 4),
        ("multiquery", 4, 4),
    ],
)
def test_needles_are_as_many_as_the_family_says(name, hidden, wanted):
    sample = family(name)
    statements = dict(
        reversed(found)
        for found in re.findall(r"One of the secret numbers of (\S+) is (\d{7})\.", sample.context)
    )
    assert len(statements) == hidden and len(sample.references) == wanted
    assert all(statements[number] in sample.question for number in sample.references)
    assert len({statements[number] for number in sample.references}) == (
        4 if name == "multiquery" else 1
    )


def test_noise_says_nothing():
    text = re.sub(r"One of the secret numbers of \S+ is \d+\.", "", body(family("single-noise")))
    assert {s.strip() + "." for s in text.split(".") if s.strip()} == set(haystack.NOISE)


def test_variables_follow_from_the_value():
    sample = family("variables")
    value = re.search(r"value (\d+)", sample.question).group(1)
    have = {
        name for name, given in re.findall(r"VAR (\w+) = (\d+)\.", sample.context) if given == value
    }
    for name, source in re.findall(
        r"VAR (\w+) = VAR (\w+)\.", sample.context
    ):  # each stands behind what it copies
        have |= {name} if source in have else set()
    assert have == set(sample.references) and len(have) == 5


def test_the_worked_example_of_variables_is_right():
    example = family("variables").context.split("\n\n")
    names = re.findall(r"\b[A-Z]{5}\b", example[3])
    assert names == re.findall(r"VAR (\w+) =", example[1]) and len(names) == 5


@pytest.mark.parametrize(
    ("n_tokens", "often", "seldom"), [(600, 4, 1), (1500, 6, 1), (5000, 30, 3)]
)
def test_common_words_are_the_most_common(n_tokens, often, seldom):
    sample = family("common-words", n_tokens)
    listed = re.findall(r"\d+\. ([\w-]+)", sample.context.rsplit("\n\n", 1)[1])
    counts = {word: listed.count(word) for word in listed}
    assert {word for word, n in counts.items() if n == often} == set(sample.references)
    assert len(sample.references) == 10
    assert {n for word, n in counts.items() if word not in sample.references} <= {seldom}


def test_frequent_words_are_the_next_behind_the_dots():
    sample = family("frequent-words", 2000)
    coded = body(sample).split()
    ranked = sorted(set(coded), key=coded.count, reverse=True)
    assert ranked[0] == counting.DOTS and ranked[1:4] == list(sample.references)
    assert coded.count(ranked[3]) > coded.count(ranked[4])
    # rank^-2
    assert coded.count(ranked[1]) / coded.count(ranked[0]) == pytest.approx(1 / 4, abs=0.01)


def test_a_family_that_is_not_there_is_named():
    with pytest.raises(BadInput, match="'nonsense'.*single-noise"):
        list(ruler.samples(request(families=("nonsense",))))


# ---- files


def test_samples_have_the_tags_that_become_columns(tmp_path):
    files = {
        "squad": [squad_file(tmp_path / "s")],
        "gsm8k": [gsm8k_file(tmp_path / "g", "#### 1")],
        "longbench": [longbench_file(tmp_path / "l", "lcc")],
        "answers": [text_file(tmp_path / "t")],
    }
    for name in TASKS:
        for sample in task_of(name).samples(
            request(n=2, lengths=(700,), files=files.get(name, ()), n_next=5)
        ):
            assert set(task_of(name).columns) <= set(sample.tags), name
            assert not task_of(name).heat or 0 < sample.tags["depth"] < 1


def text_file(path, n_words: int = 3000):
    path.write_text(" ".join(f"word{i}" for i in range(n_words)))
    return path


def squad_file(path, n_paragraphs: int = 12, **change):
    qas = [
        {
            "id": f"q{i}",
            "question": f"Where is thing {i}? ",
            "answers": [{"text": f"in place {i}"}, {"text": f"in place {i}"}],
        }
        for i in range(n_paragraphs)
    ]
    paragraphs = [
        {
            "context": f"Thing {i} is in place {i}. " + "It stays there. " * 10,
            "qas": [qa, {**qa, "id": "no", "answers": []}],
        }
        for i, qa in enumerate(qas)
    ]
    path.write_text(
        json.dumps(
            {"data": [{"paragraphs": paragraphs[:5]}, {"paragraphs": paragraphs[5:]}], **change}
        )
    )
    return path


def test_squad_asks_about_one_paragraph_among_others(tmp_path):
    asked = list(
        squad.samples(request(files=[squad_file(tmp_path / "s.json")], n=10, lengths=(150, 300)))
    )
    assert len(asked) == 10
    assert asked == list(
        squad.samples(request(files=[tmp_path / "s.json"], n=10, lengths=(150, 300)))
    )
    for sample in asked:
        (reference,) = sample.references
        assert f"Thing {reference.split()[-1]} is {reference}." in sample.context
        assert 0.7 * sample.tags["length"] < count(body(sample)) <= sample.tags["length"]
    places = [
        int(
            re.search(rf"Document (\d+):\nThing {s.references[0].split()[-1]} ", s.context).group(1)
        )
        for s in asked
    ]
    assert len(set(places)) > 1  # not always the first


def gsm8k_file(path, *answers: str):
    path.write_text(
        "\n".join(
            json.dumps({"question": f"What is {i}?", "answer": answer})
            for i, answer in enumerate(answers)
        )
    )
    return path


def text_of(sample) -> str:
    return sample.context.removeprefix(answers.INSTRUCTION).strip()


def test_questions_of_squad_are_about_the_paragraphs_in_the_text(tmp_path):
    path = squad_file(tmp_path / "s.json")
    found = list(answers.samples(request(n=20, lengths=(200,), files=[path])))
    texts = list(dict.fromkeys(map(text_of, found)))
    assert len(texts) > 1 and len({s.id for s in found}) == len(found)
    for text in texts:
        asked = [s.question for s in found if text_of(s) == text]
        assert count(text) <= 200 and 1 < len(asked) <= SampleRequest.n_each
        for question in asked:
            thing = re.search(r"thing (\d+)", question)
            assert thing and f"Thing {thing[1]} is" in text


def test_texts_of_several_files_are_asked_about_in_turns(tmp_path):
    lines = [{"text": "one two three " * 50, "questions": [f"What is {i}?"]} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    other = text_file(tmp_path / "b.txt", 300)
    files = [tmp_path / "a.jsonl", other]
    found = list(answers.samples(request(n=50, lengths=(100,), files=files)))
    own = [s.question.splitlines()[-1] for s in found if "one two" in s.context]
    assert own == ["Question: What is 0?", "Question: What is 1?", "Question: What is 2?"]
    assert ["one two" in s.context for s in found][: 1 + SampleRequest.n_each + 1] == [
        True,
        *[False] * SampleRequest.n_each,
        True,
    ]
    assert len({s.id for s in found}) == len(found)
    assert all(80 < count(text_of(s)) < 120 for s in found)


def test_the_model_writes_the_questions_about_a_plain_text(tmp_path):
    path, passages = text_file(tmp_path / "t"), []

    def ask(message: str) -> str:
        passages.append(message.rpartition("\n")[2].split())
        return f"Question: What is {passages[-1][0]}?\nIt is a word." if len(passages) > 1 else ""

    found = list(answers.samples(request(n=7, lengths=(1000,), files=[path], ask=ask)))
    assert "behind the words 'word" in found[0].question  # the model said nothing
    for sample, words_of in list(zip(found, passages, strict=False))[1:6]:
        assert sample.question.endswith(f"What is {words_of[0]}?")
        assert words_of[0] in text_of(sample).split()
    texts = list(dict.fromkeys(map(text_of, found)))
    assert len(texts) == 2 and not set(texts[0].split()) & set(texts[1].split())
    assert all(900 < count(text) < 1100 for text in texts)


def test_gsm8k_reads_the_number_behind_the_signs(tmp_path):
    found = list(
        gsm8k.samples(
            request(
                files=[
                    gsm8k_file(
                        tmp_path / "g.jsonl",
                        "1 + 1 = <<1+1=2>>2\n#### 2",
                        "#### 1,234",
                        "-3\n#### -3",
                    )
                ]
            )
        )
    )
    assert [s.references for s in found] == [("2",), ("1,234",), ("-3",)]


def test_the_worked_examples_of_gsm8k_calculate_right():
    for _, answer in gsm8k.EXAMPLES:
        for left, right in re.findall(r"([\d+\-*/ ]+) = \$?(\d+)", answer):
            assert eval(left) == int(right), left
        assert re.findall(r"(\d+)[^\d]*\n#### (\d+)$", answer)[0][0] == answer.rsplit(" ", 1)[1]


def longbench_file(path, dataset: str, **change):
    record = {
        "input": "who?",
        "context": "A long text.",
        "answers": ["me", "I"],
        "length": 3,
        "dataset": dataset,
        "all_classes": None,
        "_id": "7",
    }
    path.write_text(json.dumps({**record, **change}) + "\n\n")
    return path


@pytest.mark.parametrize("dataset", longbench.KINDS)
def test_longbench_sets_are_asked_in_their_way(tmp_path, dataset):
    (sample,) = longbench.samples(request(files=[longbench_file(tmp_path / "l.jsonl", dataset)]))
    kind = longbench.KINDS[dataset]
    assert sample.references == ("me", "I")
    assert sample.metrics == (kind.metric,)
    assert kind.metric in METRICS
    assert sample.context.endswith("A long text.") and sample.question.strip()
    assert ("who?" in sample.question) == ("{input}" in kind.question)


def test_longbench_lists_may_be_text(tmp_path):
    path = longbench_file(
        tmp_path / "l.jsonl",
        "trec_e",
        answers="['Food']",
        all_classes="['Food', 'Place']",
        length="3",
    )
    (sample,) = longbench.samples(request(files=[path]))
    assert sample.references == ("Food",)
    assert sample.classes == ("Food", "Place")
    assert sample.stop == "\n"
    assert not sample.chat


def test_n_samples_are_drawn_by_the_seed(tmp_path):
    path = gsm8k_file(tmp_path / "g.jsonl", *(f"#### {i}" for i in range(50)))
    drawn = [
        [int(s.references[0]) for s in gsm8k.samples(request(seed, n=10, files=[path]))]
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] == sorted(drawn[0])
    assert len(set(drawn[0])) == 10
    assert drawn[0] != drawn[2]


SQUAD = (
    '{"data": [{"paragraphs": [{"context": %s, "qas": [{"id": 1, "question": %s, "answers":'
    ' [{"text": %s}]}]}]}]}'
)
LONGBENCH = '{"input": %s, "context": %s, "answers": %s, "dataset": %s}'


@pytest.mark.parametrize(
    ("module", "text", "says"),
    [
        (squad, "{", "no JSON"),
        (squad, "[]", "SQuAD"),
        (squad, '{"data": [{"paragraphs": [{}]}]}', "SQuAD"),
        (squad, '{"data": []}', "no question"),
        (gsm8k, "x", "line 1"),
        (gsm8k, '{"question": "a"}', "'answer' is missing"),
        (gsm8k, "", "no records"),
        (gsm8k, "3", "'question' is missing"),
        (gsm8k, '{"question": "a", "answer": "4"}', "####"),
        (longbench, '{"input": "a"}', "'context' is missing"),
        (
            longbench,
            '{"input": "", "context": "", "answers": ["x"], "dataset": "mine"}',
            "'mine' is not known",
        ),
        (
            longbench,
            '{"input": "", "context": "", "answers": ["x"], "dataset": "dureader"}',
            "Chinese",
        ),
        (longbench, '{"input": "", "context": "", "answers": [], "dataset": "lcc"}', "no answer"),
        (ppl, "too short", "shorter --lengths"),
        (answers, "too short", "shorter --lengths"),
        (squad, "[" * 100_000, "no JSON"),
        (gsm8k, "[" * 100_000, "line 1"),
        (squad, SQUAD % ('"c"', 7, '"a"'), "question.*text"),
        (squad, SQUAD % (7, '"q"', '"a"'), "context.*text"),
        (squad, SQUAD % ('"c"', '"q"', "null"), "answer.*text"),
        (
            squad,
            '{"data": [{"paragraphs": [{"context": "c", "qas": [{"answers": "text"}]}]}]}',
            "SQuAD",
        ),
        (squad, SQUAD % ('"\\ud800"', '"q"', '"a"'), "context.*text"),
        (gsm8k, '{"question": 7, "answer": "#### 4"}', "line 1.*question.*text"),
        (gsm8k, '{"question": "\\udfff", "answer": "#### 4"}', "line 1.*question.*text"),
        (gsm8k, '{"question": "a", "answer": ["#### 4"]}', "line 1.*answer.*text"),
        (longbench, LONGBENCH % ("7", '"c"', '["x"]', '"lcc"'), "line 1.*input.*text"),
        (longbench, LONGBENCH % ('"i"', "{}", '["x"]', '"lcc"'), "line 1.*context.*text"),
        (longbench, LONGBENCH % ('"i"', '"c"', '[["x"]]', '"lcc"'), "record 1.*answers.*text"),
        (longbench, LONGBENCH % ('"i"', '"c"', '["x"]', '["lcc"]'), "line 1.*dataset.*text"),
        (
            longbench,
            LONGBENCH % ('"i"', '"c"', '["x"], "all_classes": [[7]]', '"trec"'),
            "record 1.*all_classes.*text",
        ),
    ],
)
def test_files_of_another_kind_are_one_line(tmp_path, module, text, says):
    (tmp_path / "f").write_text(text)
    with pytest.raises(BadInput, match=says) as error:
        list(module.samples(request(files=[tmp_path / "f"], n_next=5)))
    assert "\n" not in str(error.value)


def test_files_that_are_not_there_and_no_text(tmp_path):
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path / "none", tmp_path, tmp_path / "b"):
        with pytest.raises(BadInput, match="cannot be read"):
            list(gsm8k.samples(request(files=[path])))


@pytest.mark.parametrize("text", ["(" * 100_000, "[" * 5000 + "]" * 5000])
def test_answers_that_look_like_deep_lists_are_words(tmp_path, text):
    path = longbench_file(tmp_path / "l.jsonl", "hotpotqa", answers=text)
    (sample,) = longbench.samples(request(files=[path]))
    assert sample.references == (text,)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        for module in (squad, gsm8k, longbench, ppl):
            with pytest.raises(BadInput, match="no regular file"):
                list(module.samples(request(files=[path], n_next=5)))


# ---- passages to predict


def test_passages_lie_side_by_side(tmp_path):
    (tmp_path / "t.txt").write_text("word " * 100)
    asked = replace(
        request(n=10, lengths=(20,), files=[tmp_path / "t.txt"], n_next=9),
        tokenize=lambda text: list(range(len(text.split()))),
    )
    found = list(ppl.samples(asked))
    # 30 = 20 + 9 + 1, and 10 are left over
    assert [p.tokens for p in found] == [tuple(range(i, i + 30)) for i in (0, 30, 60)]
    assert {p.n_text for p in found} == {20} and found[0].id == "t.txt-20-0"


def test_without_a_file_the_text_is_generated():
    first, again, other = (list(ppl.samples(request(seed, n=4, n_next=10))) for seed in (0, 0, 1))
    assert first == again and len(first) == len(other) == 4
    assert [len(p.tokens) for p in first] == [311, 311, 611, 611]
