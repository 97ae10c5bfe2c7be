"""The options of the compressed cache: what they accept, and that `Llama` takes each of them."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from edgekv import BadInput, KVConfig, Llama
from edgekv.choice.config import MOST, option_of
from edgekv.choice.settings import Settings
from edgekv.commands import saved
from edgekv.conversation import settings_digest
from edgekv.conversation.settings_digest import settings_of
from edgekv.llama import pack
from tests.engine import load

ODD = (
    ("ratio", 20),
    ("ratio", "half"),
    ("ratio", float("nan")),
    ("budget", 0),
    ("budget", 1.5),
    ("budget", [1, 2]),
    ("budget_mb", float("inf")),
    ("budget_mb", -1),
    ("memory", "much"),
    ("method", "nonsense"),
    ("sink", -1),
    ("sink", MOST + 1),
    ("window", 0),
    ("window", True),
    ("window", 2.5),
    ("min_tokens", 0),
    ("hidden", "tape"),
    ("tail", 0),
    ("seed", -1),
)


@pytest.mark.parametrize(("name", "value"), ODD)
def test_what_makes_no_sense_is_refused_in_one_line(name, value):
    with pytest.raises(BadInput) as error:
        KVConfig(**{name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("one", fields(KVConfig), ids=lambda one: one.name)
def test_the_command_lines_text_means_the_same_as_pythons_value(one):
    if isinstance(one.default, bool) or one.default is None:
        return
    assert getattr(KVConfig(**{one.name: str(one.default)}), one.name) == one.default
    assert option_of(one).help.endswith(".")


def test_a_model_takes_one_object_and_single_options_override_it(tiny):
    shared = KVConfig(ratio=0.5, method="streaming", min_tokens=1)
    llm = load(tiny("llama-gqa"), kv=shared, kv_ratio=0.25)
    assert (llm.kv_stats().ratio, llm.kv_stats().method) == (0.25, "snapkv"), (
        "tests.engine names one"
    )
    with Llama(str(tiny("llama-gqa")), kv=shared, n_ctx=512, verbose=False) as other:
        assert (other.kv_stats().ratio, other.kv_stats().method) == (0.5, "streaming")


def test_a_pickled_model_has_the_same_options(tiny):
    table = np.full((4, 2), 7)
    llm = load(tiny("llama-gqa"), kv_budget=table, kv_sink=2, kv_tail=77)
    with pickle.loads(pickle.dumps(llm)) as again:
        assert (again._kv_config.budget == table).all()
        ours, theirs = (replace(x._kv_config, budget=None).arguments() for x in (llm, again))
        assert ours == theirs


def test_files_from_before_an_option_have_its_default():
    """A pack, and the note of a chat, which say the options by name."""
    later = {"archive", "recall"}
    before = {name: x for name, x in pack.said(KVConfig(ratio=0.5)).items() if name not in later}
    assert saved.cache_of({"cache": before}, KVConfig(recall=0.1, ratio=0.9)).recall == 0
    document = {"name": "a.txt", "text": "a", "n_bytes": 1, "n_tokens": 1}
    said = {"documents": [document], "system": "", "method": "snapkv", "config": before}
    sizes = {"cache_types": ["f16", "f16"], "n_tokens": 1, "n_bytes": 1, "n_bytes_full": 1}
    found = pack.pack_of({"pack": {**said, **sizes}}, "a.pack").settings
    assert (found.ratio, found.recall, found.archive) == (0.5, 0, "off")


def test_a_conversation_belongs_to_the_options_of_its_cache():
    """An option that is added counts, unless somebody says that it does not."""
    others = {"ratio": 0.4, "budget": 9, "budget_mb": 2.0, "memory": 2**30, "seed": 7}
    others |= {"sink": 9, "window": 9, "min_tokens": 9, "tail": 9}
    changed = {one.name: others.get(one.name, "changed") for one in fields(KVConfig)}
    same = {name for name, value in changed.items() if settings_of(made(**{name: value})) == USUAL}
    assert same == settings_digest._FREE - {"budget", "budget_mb", "archive"}


def made(**options):
    """A model, as far as `settings_of` looks at it."""
    settings = replace(Settings(ratio=0.5), **options)
    return SimpleNamespace(engine=SimpleNamespace(settings=settings))


USUAL = settings_of(made())
