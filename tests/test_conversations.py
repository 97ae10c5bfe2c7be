"""Many conversations on one model: each goes on as if it were alone."""

from __future__ import annotations

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import BadInput, Cancelled, Conversations, EdgeKVError
from edgekv.base.machine import rss_now
from edgekv.conversation import parked
from tests import archs, models, recurrent
from tests.engine import load
from tests.lib import ROOT

N_DOCUMENT, N_QUESTION, N_ANSWER = 300, 20, 12
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed": ("llama-gqa", dict(kv_ratio=0.3, kv_tail=80)),
    "merging": ("llama-gqa", dict(kv_ratio=0.3, kv_tail=80, kv_method="score=h2o,merge=d2o")),
    "summing": (
        "llama-gqa",
        dict(kv_ratio=0.3, kv_tail=80, kv_method="score=snapkv,merge=summary,worst=5"),
    ),
    "windows": ("gemma3", dict(kv_ratio=0.3, kv_tail=80)),
    "archived": ("llama-gqa", dict(kv_ratio=0.3, kv_tail=80, kv_archive="temporary")),
    "recalling": ("llama-gqa", dict(kv_ratio=0.3, kv_tail=80, kv_recall=0.05)),
    "archived, windows": ("gemma3", dict(kv_ratio=0.3, kv_tail=80, kv_archive="temporary")),
    "whole": ("llama-gqa", dict()),
    "whole, windows": ("gemma3", dict()),
}


COMPRESSED: list[dict[str, Any]] = [
    {"kv_ratio": 0.3},
    {"kv_ratio": 0.3, "kv_archive": "temporary"},
    {"kv_ratio": 0.3, "kv_recall": 0.05},
]


@pytest.fixture(params=WAYS)
def make(request, tiny):
    """make(**options): the model of one way."""
    name, options = WAYS[request.param]
    made = []

    def new(**more: Any) -> Any:
        made.append(load(tiny(name), **{**options, **more}))
        return made[-1]

    yield new
    for llm in made:
        llm.close()


def write(llm: Any, n: int = N_ANSWER) -> list[int]:
    """n tokens of a greedy answer; the last one is not evaluated."""
    said = []
    for i in range(n):
        said.append(int(np.argmax(last_logits(llm))))
        if i + 1 < n:
            llm.eval([said[-1]])
    return said


def last_logits(llm: Any) -> np.ndarray:
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),))


class Alone:
    """A conversation on a model of its own."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def ask(self, *parts: Any, n: int = N_ANSWER) -> list[int]:
        for part in parts:
            self.llm.eval(list(part))
        return write(self.llm, n)


class Pooled:
    """One of the conversations of a pool. It knows its tokens, as a client knows its messages."""

    def __init__(self, pool: Any, llm: Any, name: str | None = None, begin: Any = ()) -> None:
        self.pool, self.llm, self.name, self.tokens = pool, llm, name, list(begin)
        self.n_read = 0

    def ask(self, *parts: Any, n: int = N_ANSWER) -> list[int]:
        """Each part but the last ends at a cut."""
        before, cuts = len(self.tokens), []
        for part in parts:
            self.tokens += list(part)
            cuts.append(len(self.tokens))
        known = self.pool.use(self.tokens, self.name, [before, *cuts[:-1]])
        self.n_read = len(self.tokens) - known
        self.llm.eval(self.tokens[known:])
        said = write(self.llm, n)
        self.tokens += said
        return said


# ---- taking turns


def test_two_conversations_answer_as_each_alone(make, text):
    llm, first, second = make(), Alone(make()), Alone(make())
    with Conversations(llm) as pool:
        a, b = Pooled(pool, llm), Pooled(pool, llm)
        last: dict[Any, list[int]] = {a: [], b: []}
        for turn in range(4):
            for mine, alone, seed in ((a, first, 10), (b, second, 20)):
                document = [text(N_DOCUMENT, seed)] if turn == 0 else []
                question = text(N_QUESTION, seed + turn + 1)
                expected = alone.ask(*document, [*last[mine][-1:], *question])
                got = mine.ask(*document, question)
                assert got == expected, f"turn {turn}"
                last[mine] = expected
                assert turn == 0 or mine.n_read == N_QUESTION + 1
        assert sorted(x.n_tokens for x in pool.list()) == [len(x.tokens) - 1 for x in (a, b)]
        assert [x.is_current for x in pool.list()] == [True, False]


def test_a_second_question_reads_the_document_once(make, text):
    llm, document = make(), text(N_DOCUMENT)
    with Conversations(llm) as pool:
        first = Pooled(pool, llm).ask(document, text(N_QUESTION, 1))
        for seed in (2, 3, 1):
            other = Pooled(pool, llm)
            got = other.ask(document, text(N_QUESTION, seed))
            assert got == Alone(make()).ask(document, text(N_QUESTION, seed))
            assert other.n_read <= N_QUESTION + 1
        assert got == first


def test_a_branch_leaves_the_conversation_as_it_was(make, text):
    llm, document = make(), text(N_DOCUMENT)
    with Conversations(llm) as pool:
        a = Pooled(pool, llm, "a")
        a.ask(document, text(N_QUESTION, 1), n=30)
        b = Pooled(pool, llm, "b", document)
        b.ask(text(N_QUESTION, 2), n=30)
        assert {x.name: x.n_tokens for x in pool.list()} == {
            "a": N_DOCUMENT + N_QUESTION + 29,
            "b": N_DOCUMENT + N_QUESTION + 29,
        }
        alone = Alone(make())
        said = alone.ask(document, text(N_QUESTION, 1), n=30)
        assert a.ask(text(N_QUESTION, 3)) == alone.ask([said[-1], *text(N_QUESTION, 3)])
        assert a.n_read == N_QUESTION + 1


def test_an_edit_reads_what_stands_behind_it_however_many_turns_there_are(make, text):
    llm, n = make(n_ctx=4096), 100
    with Conversations(llm) as pool:
        talk, begins = Pooled(pool, llm), []
        for turn in range(14):
            begins.append(len(talk.tokens))
            talk.ask(text(n, turn))
        for turn, begin in enumerate(begins[1:], 1):
            edited = Pooled(pool, llm, begin=talk.tokens[:begin])
            edited.ask(text(n, 50 + turn))
            assert edited.n_read <= n + 1, f"turn {turn}"


def test_a_long_answer_that_was_compressed_can_be_asked_for_again(make, text):
    llm = make()
    with Conversations(llm) as pool:
        first = Pooled(pool, llm).ask(text(N_DOCUMENT), text(N_QUESTION, 1), n=200)
        again = Pooled(pool, llm)
        assert again.ask(text(N_DOCUMENT), text(N_QUESTION, 1), n=200) == first
        assert again.n_read <= N_QUESTION + 1


def test_the_same_prompt_is_not_read_again(make, text):
    """An answer is wanted once more, and meanwhile another conversation used the model."""
    llm = make()
    with Conversations(llm) as pool:
        first = Pooled(pool, llm).ask(text(N_DOCUMENT), n=150)
        pool.use(text(N_DOCUMENT, 5))
        llm.eval(list(text(N_DOCUMENT, 5)))
        for _ in range(2):
            again = Pooled(pool, llm)
            assert again.ask(text(N_DOCUMENT), n=150) == first
            # of llama.cpp's own cache with windows a copy has the last ones only
            assert again.n_read <= 1 or (llm.engine is None and parked.forgets(llm))


def test_answers_are_written_in_turns_token_by_token(make, text):
    llm, prompts = make(), [list(text(N_DOCUMENT, seed)) for seed in range(3)]
    expected = [Alone(make()).ask(prompt, n=100) for prompt in prompts]
    with Conversations(llm) as pool:
        talks = [list(prompt) for prompt in prompts]
        for tokens in talks:
            llm.eval(tokens[pool.use(tokens) :])
        n_before = llm.n_evaluated
        for _ in range(100):
            for tokens in talks:
                llm.eval(tokens[pool.use(tokens) :])
                tokens.append(int(np.argmax(last_logits(llm))))
        got = [tokens[N_DOCUMENT:] for tokens in talks]
    assert got == expected
    assert llm.n_evaluated - n_before == 3 * 99, "no prompt is read again for its first token"


def test_a_recurrent_model_takes_turns_too(text, tmp_path):
    path = recurrent.write(tmp_path / "model.gguf")
    llm = load(path)
    with Conversations(llm) as pool:
        a, b = Pooled(pool, llm), Pooled(pool, llm)
        first = a.ask(text(100), text(N_QUESTION, 1))
        b.ask(text(100, 5), text(N_QUESTION, 1))
        again = Pooled(pool, llm)
        assert again.ask(text(100), text(N_QUESTION, 1)) == first and again.n_read <= N_QUESTION
        alone = Alone(load(path))
        alone.ask(text(100), text(N_QUESTION, 1))
        assert a.ask(text(9, 7)) == alone.ask([first[-1], *text(9, 7)]) and a.n_read == 10


def test_a_hybrid_takes_turns_too(tmp_path):
    path = archs.write(tmp_path, "^qwen35$") / "qwen35-dense.gguf"

    def some(n: int, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(6, 128, n).tolist()

    for options in (dict(kv_ratio=0.5), dict()):
        llm, first, second = (load(path, n_ctx=1024, n_ubatch=64, **options) for _ in range(3))
        with Conversations(llm) as pool:
            a, b = Pooled(pool, llm), Pooled(pool, llm)
            ends: dict[Any, list[int]] = {a: [], b: []}
            for turn in range(3):
                for mine, alone, seed in ((a, Alone(first), 1), (b, Alone(second), 2)):
                    new = some(130 if turn == 0 else 20, seed + 5 * turn)
                    expected = alone.ask([*ends[mine], *new])
                    assert mine.ask(new) == expected
                    assert turn == 0 or mine.n_read == 21
                    ends[mine] = expected[-1:]
            again = Pooled(pool, llm, begin=a.tokens[: 130 + N_ANSWER])
            again.ask(some(20, 9))
            assert again.n_read <= 21, "a branch behind the first answer"


def test_generate_goes_on_from_the_conversation_in_use(make, text):
    llm, other = make(), make()
    prompts = [list(text(N_DOCUMENT, seed)) for seed in range(2)]

    def answer(model: Any, prompt: list[int]) -> list[int]:
        return [t for t, _ in zip(model.generate(prompt, temp=0.0), range(5))]

    with Conversations(llm) as pool:
        for seed in (0, 1, 0, 1):
            prompts[seed] += text(N_QUESTION, 5)
            before = llm.n_evaluated
            known = pool.use(prompts[seed])
            said = answer(llm, prompts[seed])
            n_most = len(prompts[seed]) - known
            if llm.settings.archive_folder is not None:
                n_most = max(n_most, llm.settings.window)
            assert llm.n_evaluated - before <= n_most + 5
            prompts[seed] += said
        answer(other, prompts[0][: N_DOCUMENT + N_QUESTION])
        assert answer(other, prompts[0][:-5]) == prompts[0][-5:]


# ---- limits


def test_waiting_conversations_stay_within_the_limit(make, text):
    llm = make()
    with Conversations(llm) as pool:
        for seed in range(2):
            Pooled(pool, llm).ask(text(N_DOCUMENT, seed), text(N_QUESTION, 9))
        limit = 3 * pool.n_bytes
    with Conversations(llm, cache_ram=limit) as pool:
        talks = [Pooled(pool, llm) for _ in range(12)]
        for seed, talk in enumerate(talks):
            talk.ask(text(N_DOCUMENT, seed), text(N_QUESTION, 9))
            assert pool.n_bytes <= limit
        newest, oldest = talks[-2], talks[0]
        newest.ask(text(N_QUESTION, 3))
        assert newest.n_read == N_QUESTION + 1
        oldest.ask(text(N_QUESTION, 3))
        assert oldest.n_read == len(oldest.tokens) - N_ANSWER, "it was forgotten"


@pytest.mark.parametrize("way", ["compressed", "whole, windows"])
def test_beginnings_leave_most_of_the_memory_to_other_conversations(tiny, text, way):
    name, options = WAYS[way]
    llm = load(tiny(name), n_ctx=4096, **options)

    def taken(cache_ram: int | None) -> int:
        """Bytes behind 24 turns."""
        with Conversations(llm, cache_ram) as pool:
            talk = Pooled(pool, llm)
            for turn in range(24):
                talk.ask(text(90, turn), n=2)
            return pool.n_bytes

    most = taken(None)
    assert taken(most) <= 0.7 * most
    llm.close()


def test_without_memory_each_conversation_is_read_again(make, text):
    llm = make()
    with Conversations(llm, cache_ram=0) as pool:
        a, b = Pooled(pool, llm), Pooled(pool, llm)
        a.ask(text(50))
        b.ask(text(50, 1))
        a.ask(text(5, 2))
        assert a.n_read == 50 + N_ANSWER + 5 and pool.n_bytes == 0


def test_the_process_does_not_grow(make, text):
    llm = make()
    with Conversations(llm) as pool:
        talks = [Pooled(pool, llm) for _ in range(3)]
        for seed, talk in enumerate(talks):
            talk.ask(text(N_DOCUMENT, seed), n=2)
        ends = [talk.tokens for talk in talks]

        def switch(n: int) -> None:
            for i in range(n):
                pool.use([*ends[i % 3], 7])

        def grown(n: int) -> int:
            gc.collect()
            before = rss_now()
            switch(n)
            gc.collect()
            return rss_now() - before

        switch(100)
        # what is lost is lost each time; a heap that earlier tests left in pieces grows once
        assert any(grown(300) < 5 * 2**20 for _ in range(3))
        assert len(pool.list()) == 3


# ---- on disk


def test_what_does_not_fit_into_memory_comes_back_from_disk(make, text, tmp_path):
    llm = make()
    with Conversations(llm, cache_ram=0, cache_disk=str(tmp_path / "talks")) as pool:
        a, alone = Pooled(pool, llm, "a"), Alone(make())
        said = a.ask(text(N_DOCUMENT), text(N_QUESTION, 1))
        assert said == alone.ask(text(N_DOCUMENT), text(N_QUESTION, 1))
        Pooled(pool, llm).ask(text(N_DOCUMENT, 5))
        assert {x.name: (x.on_disk, x.n_bytes > 0) for x in pool.list()}["a"] == (True, False)
        assert a.ask(text(N_QUESTION, 2)) == alone.ask([said[-1], *text(N_QUESTION, 2)])
        assert a.n_read == N_QUESTION + 1


def test_conversations_are_found_again_after_a_restart(make, text, tmp_path):
    folder, llm = str(tmp_path), make()
    with Conversations(llm, cache_disk=folder) as pool:
        a = Pooled(pool, llm, "a")
        said = a.ask(text(N_DOCUMENT), text(N_QUESTION, 1))
        Pooled(pool, llm, "b").ask(text(N_DOCUMENT, 5))
    again = make()
    with Conversations(again, cache_disk=folder) as pool:
        assert [x.name for x in pool.list()] == ["b", "a"]
        talk = Pooled(pool, again, "a", a.tokens)
        alone = Alone(make())
        alone.ask(text(N_DOCUMENT), text(N_QUESTION, 1))
        assert talk.ask(text(N_QUESTION, 2)) == alone.ask([said[-1], *text(N_QUESTION, 2)])
        assert talk.n_read == N_QUESTION + 1
        branch = Pooled(pool, again)
        got = branch.ask(text(N_DOCUMENT), text(N_QUESTION, 4))
        assert got == Alone(make()).ask(text(N_DOCUMENT), text(N_QUESTION, 4))
        assert branch.n_read <= N_QUESTION + 1


def kept_on_disk(tiny: Any, text: Any, folder: Path, **options: Any) -> Pooled:
    llm = load(tiny("llama-gqa"), **{"kv_ratio": 0.3, **options})
    with Conversations(llm, cache_disk=str(folder)) as pool:
        talk = Pooled(pool, llm)
        talk.ask(text(N_DOCUMENT))
    llm.close()
    assert list(folder.glob("*.kvtalk"))
    return talk


@pytest.mark.parametrize(
    "other",
    [
        dict(kv_ratio=0.2),
        dict(kv_method="knorm"),
        dict(kv_tail=100),
        dict(kv_ratio=1.0),
        dict(kind="q8_0"),
        dict(name="llama-mha"),
    ],
)
def test_a_conversation_of_another_model_method_or_ratio_is_left_alone(tiny, text, tmp_path, other):
    talk = kept_on_disk(tiny, text, tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = {"kv_ratio": 0.3, **other}
    llm = load(tiny(other.pop("name", "llama-gqa")), **other)
    with Conversations(llm, cache_ram=1 << 30, cache_disk=str(tmp_path)) as pool:
        assert pool.list() == [] and pool.use([*talk.tokens, 9]) == 0
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_a_file_of_another_version_is_left_alone(tiny, text, tmp_path, monkeypatch):
    talk = kept_on_disk(tiny, text, tmp_path)
    monkeypatch.setattr("edgekv.conversation.settings_digest.__version__", "0.0.1")
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    with Conversations(llm, cache_disk=str(tmp_path)) as pool:
        assert pool.list() == [] and pool.use([*talk.tokens, 9]) == 0


@pytest.mark.parametrize("where", [0, 20, 400, 3000, -1, "end", "gone", "empty"])
def test_a_damaged_file_is_read_again_as_text(tiny, text, tmp_path, where):
    talk = kept_on_disk(tiny, text, tmp_path)
    (path,) = tmp_path.glob("*.kvtalk")
    data = bytearray(path.read_bytes())
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    with Conversations(llm) as found:
        assert found.list() == [], "a folder that is not named is not looked into"
    if isinstance(where, int):
        data[where] ^= 0x41
    path.write_bytes({"end": data[:-100], "empty": b""}.get(str(where), data))
    pool = Conversations(llm, cache_disk=str(tmp_path))
    if where == "gone":
        path.unlink()
    again = Pooled(pool, llm, begin=talk.tokens)
    again.ask(text(N_QUESTION, 3))
    assert again.n_read == len(again.tokens) - N_ANSWER
    assert len(pool.list()) == 1
    pool.close()


@pytest.mark.parametrize("token", [models.N_VOCAB, -1, 2**31 - 1])
def test_a_file_with_a_token_outside_the_vocabulary_is_read_again(tiny, text, tmp_path, token):
    """Its text would be looked up before its checksum is: that ended the process."""
    talk = kept_on_disk(tiny, text, tmp_path)
    (path,) = tmp_path.glob("*.kvtalk")
    data = path.read_bytes()
    tokens = np.array(talk.tokens[50:100], "<i4").tobytes()
    changed = np.array([token, *talk.tokens[51:100]], "<i4").tobytes()
    assert data.count(tokens) == 1
    path.write_bytes(data.replace(tokens, changed))
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    with Conversations(llm, cache_disk=str(tmp_path)) as pool:
        prompt = [*talk.tokens, 9]
        assert pool.use(prompt) == 0
        llm.eval(prompt)


def test_files_stay_within_their_limit(tiny, text, tmp_path):
    kept_on_disk(tiny, text, tmp_path / "one")
    size = sum(path.stat().st_size for path in (tmp_path / "one").iterdir())
    folder, limit = tmp_path / "many", 4 * (size + (1 << 17))
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    with Conversations(llm, 0, str(folder), limit) as pool:
        talks = [Pooled(pool, llm) for _ in range(10)]
        for seed, talk in enumerate(talks):
            talk.ask(text(N_DOCUMENT, seed))
            assert sum(path.stat().st_size for path in folder.iterdir()) <= limit
        talks[-2].ask(text(N_QUESTION, 3))
        assert talks[-2].n_read == N_QUESTION + 1
        assert len(pool.list()) < 10 and all(x.on_disk or x.is_current for x in pool.list())
    with Conversations(llm, 0, str(folder), 1000) as pool:
        Pooled(pool, llm).ask(text(N_DOCUMENT, 77))
        pool.flush()
        assert [x.n_tokens for x in pool.list() if not x.on_disk] == [N_DOCUMENT + N_ANSWER - 1]


# ---- looking after them


def test_conversations_are_saved_and_erased_by_their_id(make, text, tmp_path):
    llm = make()
    with Conversations(llm, cache_disk=str(tmp_path)) as pool:
        a, b = Pooled(pool, llm, "a"), Pooled(pool, llm, "b")
        a.ask(text(N_DOCUMENT), text(N_QUESTION, 1))
        b.ask(text(N_DOCUMENT, 5))
        ids = {x.name: x.id for x in pool.list()}
        pool.save(ids["a"])
        assert {x.name: x.on_disk for x in pool.list()} == {"a": True, "b": False}
        pool.save(ids["b"])
        pool.erase(ids["a"])
        assert [x.name for x in pool.list()] == ["b"]
        assert pool.use([*a.tokens, 9]) == 0
        assert pool.use([*b.tokens, 9]) == len(b.tokens) - 1
        pool.erase(ids["b"])
        assert pool.list() == [] and llm.n_tokens == 0
        with pytest.raises(BadInput, match="no conversation"):
            pool.erase(ids["a"])
    assert not list(tmp_path.glob("*.kvtalk")), "nothing of them is left"


def test_saving_without_a_folder_says_so(tiny, text):
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    with Conversations(llm) as pool:
        Pooled(pool, llm).ask(text(50))
        with pytest.raises(BadInput, match="cache_disk"):
            pool.save(pool.list()[0].id)
    with pytest.raises(EdgeKVError, match="closed"):
        pool.list()


def test_a_model_has_one_pool_and_closes_it(tiny, text, tmp_path):
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    pool = Conversations(llm, cache_disk=str(tmp_path))
    with pytest.raises(BadInput, match="already"):
        Conversations(llm)
    Pooled(pool, llm).ask(text(N_DOCUMENT))
    llm.close()
    assert len(list(tmp_path.glob("*.kvtalk"))) == 1
    pool.close()


def test_a_model_that_nobody_closed_leaves_its_conversations(tiny, tmp_path):
    code = """if True:
        import sys
        from edgekv import Conversations, Llama
        llm = Llama(sys.argv[1], n_ctx=1024, kv_ratio=0.3, kv_method="knorm", verbose=False)
        pool = Conversations(llm, cache_disk=sys.argv[2])
        for token in (10, 50):
            pool.use([token] * 300)
            llm.eval([token] * 300)
        """
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny("llama-gqa")), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.glob("*.kvtalk"))) == 2


def test_a_folder_that_cannot_be_made_is_refused(tiny, tmp_path):
    (tmp_path / "file").write_text("x")
    llm = load(tiny("llama-gqa"))
    for folder in (tmp_path / "file", tmp_path / "file" / "talks"):
        with pytest.raises(BadInput, match="another"):
            Conversations(llm, cache_disk=str(folder))
    with pytest.raises(BadInput, match="cache_ram"):
        Conversations(llm, cache_ram=-1)
    Conversations(llm).close()


def test_an_answer_under_way_ends_where_another_conversation_comes(tiny, text):
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    with Conversations(llm) as pool:
        pool.use(text(50))
        answer = llm.generate(list(text(50)), temp=0.0)
        next(answer)
        pool.use(text(50, 1))
        with pytest.raises(EdgeKVError, match="another prompt"):
            next(answer)
        assert next(llm.generate(list(text(50, 1)), temp=0.0)) >= 0


def test_what_the_model_was_told_meanwhile_is_no_part_of_a_conversation(make, text):
    llm = make()
    with Conversations(llm) as pool:
        a = Pooled(pool, llm, "a")
        a.ask(text(N_DOCUMENT))
        llm.reset()
        llm.eval(list(text(40, 8)))
        b = Pooled(pool, llm, "b", text(40, 8))
        assert b.ask(text(5)) == Alone(make()).ask(text(40, 8), text(5))
        assert b.n_read == 5


def test_settings_that_change_leave_what_waits_alone(tiny, text, tmp_path):
    for before, after in ((0.3, 0.2), (1.0, 0.3)):
        folder = tmp_path / str(before)
        llm = load(tiny("llama-gqa"), kv_ratio=before)
        with Conversations(llm, cache_disk=str(folder)) as pool:
            a, b = Pooled(pool, llm), Pooled(pool, llm)
            a.ask(text(N_DOCUMENT))
            b.ask(text(N_DOCUMENT, 1))
            llm.kv_set(ratio=after)
            assert pool.use([*a.tokens, 9]) == 0
            got = Pooled(pool, llm).ask(text(N_DOCUMENT, 2))
            assert got == Alone(load(tiny("llama-gqa"), kv_ratio=after)).ask(text(N_DOCUMENT, 2))
        again = load(tiny("llama-gqa"), kv_ratio=after)
        with Conversations(again, cache_disk=str(folder)) as pool:
            assert [x.n_tokens for x in pool.list()] == [N_DOCUMENT + N_ANSWER - 1]


def test_short_conversations_are_told_apart(tiny, text):
    llm = load(tiny("llama-gqa"))
    with Conversations(llm) as pool:
        for seed in range(3):
            Pooled(pool, llm).ask([models.BOS, *text(5, seed)], n=3)
        assert len({x.id for x in pool.list()}) == len(pool.list()) == 3


def test_another_thread_cannot_take_the_model_from_an_answer(tiny, text):
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    with Conversations(llm) as pool, ThreadPoolExecutor(1) as other:
        answer = llm.generate(list(text(50)), temp=0.0)
        next(answer)
        with pytest.raises(EdgeKVError, match="another thread"):
            other.submit(pool.use, text(50, 1)).result()
        assert next(answer) >= 0
        answer.close()
        assert other.submit(pool.use, text(50, 1)).result() == 0


def test_a_prompt_that_was_stopped_goes_on_from_its_last_cut(make, text):
    llm, prompt = make(), [*text(N_DOCUMENT), *text(150, 1)]
    with Conversations(llm) as pool:
        pool.use(prompt, cuts=[N_DOCUMENT])

        def progress(done: int, total: int) -> None:
            if done > 0.9 * total:
                llm.kv_cancel()

        llm.kv_progress = progress
        with pytest.raises(Cancelled):
            llm.eval(prompt)
        llm.kv_progress = None
        assert llm.n_tokens == 0
        talk = Pooled(pool, llm)
        got = talk.ask(text(N_DOCUMENT), text(150, 1))
        assert got == Alone(make()).ask(text(N_DOCUMENT), text(150, 1))
        if llm.engine is not None:
            assert talk.n_read == 150


# ---- messages


def message(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


DOCUMENTS = [
    "the rain in the air is an art and the sun is on the ear " * 12,
    "a fact in an inn on the island is the end of the tale and there " * 12,
]


def test_documents_are_open_at_once(make):
    llm, questions = make(n_ctx=4096), ["who is it?", "and where is it?"]

    def ask(model: Any, *messages: dict[str, Any]) -> str:
        done = model.create_chat_completion(
            list(messages), max_tokens=6, temperature=0, logit_bias={models.EOS: -100.0}
        )
        return done["choices"][0]["message"]["content"]

    for question in questions:
        for i, document in enumerate(DOCUMENTS):
            before = llm.n_evaluated
            with llm.conversation(f"document {i}"):
                got = ask(llm, message(document, question))
            if question == questions[1]:
                assert llm.n_evaluated - before < 60, "the document is not read again"
            assert got == ask(make(n_ctx=4096), message(document, question))


def test_a_reply_that_is_cut_into_other_tokens_is_not_read_again(tiny):
    llm = load(tiny("llama-gqa"), n_ctx=4096, kv_ratio=0.3, kv_tail=80)
    letters = dict.fromkeys(range(262), -100.0)  # no other tokens, which may be no text
    talks: list[list[dict[str, Any]]] = [[message(x, "who?")] for x in DOCUMENTS]
    for turn in range(3):
        for talk in talks:
            before = llm.n_evaluated
            with llm.conversation():
                done = llm.create_chat_completion(
                    talk, max_tokens=300, temperature=0, logit_bias=letters
                )
            reply, n_reply = done["choices"][0]["message"], done["usage"]["completion_tokens"]
            assert turn == 0 or llm.n_evaluated - before - n_reply < 20
            talk += [{"role": "assistant", "content": reply["content"]}, message("and there?")]


# ---- anything


@pytest.mark.parametrize("options", [dict(kv_budget=100_000, kv_tail=64), dict()])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35"])
def test_whatever_is_asked_the_model_has_read_just_that(tiny, tmp_path, nmse, name, options):
    """Prompts of a tree's branches, in any order; a store that keeps all is as exact as a cache."""
    if name == "qwen35":
        path = archs.write(tmp_path, "^qwen35$") / "qwen35-dense.gguf"
    else:
        path = tiny(name)
    rng = np.random.default_rng(7)
    segments = [rng.integers(6, 128, n).tolist() for n in (40, 90, 150, 20, 7, 70)]
    llm, alone = (load(path, n_ctx=1024, n_ubatch=64, **options) for _ in range(2))
    with Conversations(llm) as pool:
        pool.use(segments[2])
        llm.eval(segments[2])
        pool.use(segments[1])
        size = pool.n_bytes
    with Conversations(llm, 5 * size, str(tmp_path / "talks"), 8 * size + (1 << 20)) as pool:
        n_known = n_all = 0
        for step in range(25):
            some = rng.choice(len(segments), rng.integers(1, 5), replace=False)
            prompt = [token for i in some for token in segments[i]]
            ends = np.cumsum([len(segments[i]) for i in some])[:-1].tolist()
            n = pool.use(prompt, rng.choice(["a", "b", "c", None]), ends)
            n_known, n_all = n_known + n, n_all + len(prompt)
            assert llm.n_tokens == n and llm.input_ids[:n].tolist() == prompt[:n]
            llm.eval(prompt[n:])
            alone.reset()
            alone.eval(prompt)
            assert nmse(last_logits(llm), last_logits(alone)) < 1e-4, f"step {step}"
            for _ in range(rng.integers(0, 30)):
                llm.eval([int(rng.integers(6, 128))])
            assert pool.n_bytes <= 5 * size
            names = [x.name for x in pool.list() if x.name]
            assert len(names) == len(set(names))
        assert n_known > n_all / 10, "some were read before"


@pytest.mark.parametrize("n_shared", [2, 50, 150])
def test_an_answer_does_not_depend_on_what_was_asked_before_of_the_same_beginning(tiny, n_shared):
    """What a prompt keeps depends on where its reading begins, so it begins at the front: a chunk
    of the beginning, or less, is not worth another answer.
    """
    summary = "score=late,budget=uniform,merge=summary,rows=64"
    rng = np.random.default_rng(5)
    llm, alone = (
        load(tiny("llama-gqa"), kv_ratio=0.2, kv_method=summary, n_ubatch=256) for _ in range(2)
    )
    with Conversations(llm, 1 << 24) as pool:
        for _ in range(4):
            common = rng.integers(6, 128, n_shared).tolist()
            for n in (60, 300):
                prompt = common + rng.integers(6, 128, n).tolist()
                llm.eval(prompt[pool.use(prompt) :])
            alone.reset()
            alone.eval(prompt)
            assert np.array_equal(last_logits(llm), last_logits(alone))


def test_a_few_tokens_of_another_prompt_change_no_bit_of_an_answer(tiny, text):
    llm, alone = load(tiny("llama-gqa")), load(tiny("llama-gqa"))
    with Conversations(llm) as pool:
        for n in (100, 1, 3):
            prompt = [*text(20), *text(n, 5)]
            llm.eval(prompt[pool.use(prompt) :])
            alone.reset()
            alone.eval(prompt)
            assert np.array_equal(last_logits(llm), last_logits(alone))


@pytest.mark.parametrize("n_prompt", [1, 7, 60, 120, 300, 700])
@pytest.mark.parametrize("cache", [{"kv_ratio": 1}, *COMPRESSED])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_an_answer_does_not_depend_on_whether_it_was_asked_before(
    tiny, text, tmp_path, kind, cache, n_prompt
):
    """Asked again at once, with others between, after a long answer, and after a restart."""

    def asked(pool: Any, n: int = N_ANSWER) -> tuple[bytes, list[int]]:
        n_there = pool.use(prompt)
        pool._llm.eval(prompt[n_there:])
        return last_logits(pool._llm).tobytes(), write(pool._llm, n)

    prompt, said = text(n_prompt), []
    for _ in range(2):
        llm = load(tiny("llama-gqa"), kind, **cache)
        with Conversations(llm, cache_disk=str(tmp_path)) as pool:
            said += [asked(pool), asked(pool, 230), asked(pool, 230)]
            Pooled(pool, llm).ask(text(400, 1))
            said += [asked(pool), asked(pool)]
        llm.close()
    assert {logits for logits, _ in said} == {said[0][0]}
    answers = [answer for _, answer in said]
    longest = max(answers, key=len)
    assert all(longest[: len(answer)] == answer for answer in answers)


@pytest.mark.parametrize("n_document", [30, 300, 700])
@pytest.mark.parametrize("cache", COMPRESSED)
def test_a_short_question_has_the_same_answer_after_a_restart(
    tiny, text, tmp_path, cache, n_document
):
    """It is read again behind the turn before it, where it was read the first time."""
    prompt, said = [*text(n_document)], list[tuple[bytes, list[int]]]()
    for i in range(2):
        llm = load(tiny("llama-gqa"), **cache)
        with Conversations(llm, cache_disk=str(tmp_path)) as pool:
            if i == 0:
                llm.eval(prompt[pool.use(prompt) :])
                prompt += [*write(llm), *text(10, 1)]
            for _ in range(2):
                llm.eval(prompt[pool.use(prompt) :])
                said.append((last_logits(llm).tobytes(), write(llm, 40)))
        llm.close()
    assert said == [said[0]] * 4


@pytest.mark.parametrize("n_question", [0, 10])
@pytest.mark.parametrize("n_before", [12, 150])
@pytest.mark.parametrize("n_document", [30, 300])
@pytest.mark.parametrize("cache", COMPRESSED)
def test_a_short_question_has_one_answer_behind_rows_that_were_rounded_meanwhile(
    tiny, text, tmp_path, cache, n_document, n_before, n_question
):
    """Before an answer, and after one in which rows from before the question grow old."""

    def ask(pool: Any, llm: Any, n: int) -> None:
        llm.eval(prompt[pool.use(prompt) :])
        said.append((last_logits(llm).tobytes(), write(llm, n)))

    prompt, said = [*text(n_document)], list[tuple[bytes, list[int]]]()
    for i in range(2):
        llm = load(tiny("llama-gqa"), "q8_0", **cache)
        with Conversations(llm, cache_disk=str(tmp_path)) as pool:
            if i == 0:
                ask(pool, llm, n_before)
                prompt += [*said.pop()[1], *text(n_question, 1)]
            for n in (12, 230, 12, 230):
                ask(pool, llm, n)
            Pooled(pool, llm).ask(text(400, 2))
            ask(pool, llm, 40)
        llm.close()
    assert {logits for logits, _ in said} == {said[0][0]}
    longest = said[1][1]
    assert all(longest[: len(answer)] == answer for _, answer in said)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_a_prompt_that_ends_with_a_short_part_has_one_answer(tiny, text, kind):
    """The part is appended behind what is compressed, and grows old with the answer."""
    prompt, said = [*text(300), *text(20, 1)], list[tuple[bytes, list[int]]]()
    llm = load(tiny("llama-gqa"), kind, kv_ratio=0.3)
    with Conversations(llm) as pool:
        for n in (12, 230, 12, 230):
            llm.eval(prompt[pool.use(prompt, cuts=[300]) :])
            said.append((last_logits(llm).tobytes(), write(llm, n)))
    assert said[::2] == said[:1] * 2 and said[1::2] == said[1:2] * 2
    assert said[0] == (said[1][0], said[1][1][:12])


@pytest.mark.parametrize("n_question", [20, 60, 70])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_question_has_the_same_bits_whether_or_not_another_one_came_before(
    tiny, text, kind, n_question
):
    """Prompts are cut before the question, and behind it."""
    cuts, said = [300, 300 + n_question], []
    for seeds in ([2], [1, 2]):
        llm = load(tiny("llama-gqa"), kind, kv_ratio=0.3)
        with Conversations(llm) as pool:
            for seed in seeds:
                prompt = [*text(300), *text(n_question, seed), *text(5, 3)]
                n_there = pool.use(prompt, cuts=cuts)
                llm.eval(prompt[n_there:])
        said.append(last_logits(llm).tobytes())
        llm.close()
    assert n_there == 300 and said[0] == said[1]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_an_earlier_question_has_the_same_answer_after_a_later_one(tiny, text, tmp_path, kind):
    """It is read again from where its reading began, not its last token alone."""
    said, prompts = list[tuple[int, bytes]](), [[*text(300)]]
    for _ in range(2):
        llm = load(tiny("llama-gqa"), kind, kv_ratio=0.3, n_ubatch=64)
        with Conversations(llm, cache_disk=str(tmp_path)) as pool:
            for i in range(4):
                if i == len(prompts):
                    prompts.append([*prompts[-1], *write(llm), *text(10, i)])
                llm.eval(prompts[i][pool.use(prompts[i]) :])
                said.append((i, last_logits(llm).tobytes()))
            for i in (1, 2, 1, 3):
                llm.eval(prompts[i][pool.use(prompts[i]) :])
                said.append((i, last_logits(llm).tobytes()))
        llm.close()
    assert len(set(said)) == 4


def test_a_whole_cache_does_not_read_an_earlier_prompt_again(tiny, text):
    llm = load(tiny("llama-gqa"))
    with Conversations(llm) as pool:
        for n in (300, 350, 300):
            n_there = pool.use(text(350)[:n])
            llm.eval(text(350)[n_there:n])
            write(llm)
    assert n_there == 299


def test_what_is_asked_again_is_read_from_where_it_was(tiny, text):
    """And not from the end of another conversation that shares more with it."""
    llm, prompt, said = load(tiny("llama-gqa"), "q8_0", kv_ratio=0.3), [*text(340)], []
    with Conversations(llm) as pool:
        for n in (340, 320, 340):
            n_there = pool.use(prompt[:n], cuts=[300], is_fresh=n == 320)
            llm.eval(prompt[n_there:n])
            said.append(last_logits(llm).tobytes())
            write(llm)
    assert n_there == 300 and said[0] == said[2]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_chat_has_one_answer_whatever_was_asked_between(tiny, text, kind):
    """Chats of one or two turns that begin alike, with answers of any length."""
    rng, header = np.random.default_rng(3), text(5, 99)
    documents = [text(n, n) for n in (30, 70, 150, 400)]
    questions = [text(n, n) for n in (5, 20, 60, 66)]
    logits, answers = dict[tuple[int, ...], bytes](), dict[tuple[int, ...], list[int]]()
    llm = load(tiny("llama-gqa"), kind, n_ctx=2048, kv_ratio=0.3, kv_tail=512, n_ubatch=1024)
    with Conversations(llm) as pool:
        for _ in range(120):
            front = documents[rng.integers(4)]
            prompt = (*front, *questions[rng.integers(4)], *header)
            if rng.random() < 0.5 and prompt in answers:
                front = (*prompt, *answers[prompt])
                prompt = (*front, *questions[rng.integers(4)], *header)
            n_there = pool.use(prompt, cuts=[len(front), len(prompt) - len(header)])
            llm.eval(prompt[n_there:])
            now = last_logits(llm).tobytes()
            assert logits.setdefault(prompt, now) == now
            said = write(llm, rng.choice([1, 8, 30, 230]))
            assert all(a == b for a, b in zip(answers.setdefault(prompt, said), said))
            pool.end_answer()


def test_a_conversation_that_is_held_waits_whatever_it_takes(make, text):
    """An answer that is written in turns is not read again in each of them."""
    llm = make()
    with Conversations(llm, cache_ram=0) as pool:
        mine, other = Pooled(pool, llm), Pooled(pool, llm)
        mine.ask(text(N_DOCUMENT))
        pool.hold()
        id = pool.current_id
        other.ask(text(N_DOCUMENT, 1))
        assert pool.n_bytes > 0
        assert pool.use(mine.tokens, is_answer=True) == len(mine.tokens) - 1
        llm.eval(mine.tokens[-1:])
        other.ask(text(N_QUESTION, 2))
        assert other.n_read > N_DOCUMENT and [x.id for x in pool.list() if not x.is_current] == [id]
        pool.give_up(id)
        assert pool.n_bytes == 0


def test_an_answer_that_is_stopped_before_anything_is_read_was_no_conversation(tiny, text, caplog):
    caplog.set_level("INFO")
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    with Conversations(llm) as pool:
        Pooled(pool, llm).ask(text(20))
        pool.use(text(20, 1))
        pool.give_up(pool.current_id)
    assert "0 tokens" not in caplog.text
