"""Metadata that the user overrides: --override-kv and `Llama`'s kv_overrides."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from edgekv.errors import BadInput
from edgekv.model import metadata
from tests.cli import refused, typed
from tests.engine import load, logits

OVERRIDES = {
    "tokenizer.ggml.add_bos_token=bool:false": {"tokenizer.ggml.add_bos_token": False},
    "llama.expert_used_count=int:1": {"llama.expert_used_count": 1},
    "llama.rope.freq_base=float:5e5": {"llama.rope.freq_base": 5e5},
    'general.name=str:a=b:c,"x.y=str:a,b"': {"general.name": "a=b:c", "x.y": "a,b"},
    "x.y=int:-7,x.z=str:": {"x.y": -7, "x.z": ""},
}


@pytest.mark.parametrize("text", OVERRIDES)
def test_values_of_every_type_are_read(text):
    found = dict(metadata.parse(text, "--override-kv"))
    assert json.dumps(found) == json.dumps(OVERRIDES[text])


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("tokenizer.ggml.add_bos_token", False, "llama-gqa"),
        ("llama.expert_used_count", 1, "llama-moe"),
        ("llama.rope.freq_base", 5e5, "llama-gqa"),
    ],
)
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_model_is_another_with_them(tiny, text, key, value, name, ratio):
    said = []
    for overrides in (None, {key: value}):
        with load(tiny(name), kv_overrides=overrides, kv_ratio=ratio) as llm:
            prompt = llm.tokenize(b"the end") + list(text(100))
            llm.eval(prompt)
            said.append(logits(llm))
    assert not np.allclose(*said, rtol=1e-3)


def test_a_context_that_is_overridden_is_the_one_that_has_to_fit(tiny, monkeypatch):
    """With n_ctx=0, the trained context; the file's 4,096 tokens would take 6 MiB."""
    monkeypatch.setattr("edgekv.memory.room.memory_free", lambda **_: 2**20)
    overrides = {"llama.context_length": 512}
    with pytest.raises(BadInput, match="4,096 tokens"):
        load(tiny("llama-gqa"), n_ctx=0)
    assert load(tiny("llama-gqa"), n_ctx=0, kv_overrides=overrides).n_ctx() == 512


def test_a_saved_conversation_names_them(tiny, text, tmp_path):
    options = {"kv_overrides": {"llama.rope.freq_base": 5e5}, "kv_ratio": 0.5}
    llm = load(tiny("llama-gqa"), after=text(100), **options)
    llm.kv_save(str(tmp_path / "chat"))
    load(tiny("llama-gqa"), **options).kv_load(str(tmp_path / "chat"))
    with pytest.raises(BadInput, match="another model"):
        load(tiny("llama-gqa"), kv_ratio=0.5).kv_load(str(tmp_path / "chat"))


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "x=1",
        "=int:1",
        "x=int",
        "x=long:1",
        "x=int:1.5",
        "x=int:",
        "x=float:much",
        "x=bool:yes",
        "x=int:1,,y=int:1",
        "",
    ],
)
def test_what_is_no_override_is_one_line(tiny, text):
    said = refused(typed(f"run -p x -m {tiny('llama-gqa')} --override-kv", text))
    assert "--override-kv" in said and "bool:false" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("", 1),
        ("x" * 128, 1),
        ("x", "y" * 128),
        ("x", None),
        ("x", [1]),
        ("x", 2**63),
        ("x", float("nan")),
        ("llama.context_length", "many"),
        ("llama.context_length", True),
        ("llama.rope.freq_base", 10000),
        ("tokenizer.ggml.add_bos_token", 1),
        # llama.cpp would end the process over these
        ("llama.block_count", 0),
        ("llama.block_count", 100000),
        ("llama.block_count", -1),
        ("llama.context_length", 2**40),
        ("llama.attention.head_count", -1),
        ("llama.expert_count", 0),
        ("llama.expert_count", 1),
        ("llama.expert_count", 2000),
        ("llama.expert_used_count", 0),
        ("llama.expert_used_count", 5),
        ("llama.expert_group_count", 3),
        ("llama.expert_group_count", 2),
        ("llama.nextn_predict_layers", 4),
        ("llama.rope.scaling.type", "nope"),
        ("llama.rope.dimension_count", 0),
        ("llama.rope.dimension_count", 3),
        ("llama.rope.dimension_count", 4096),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
    ],
)
def test_what_no_model_has_is_refused(tiny, key, value):
    with pytest.raises(BadInput, match=re.escape("override")) as caught:
        load(tiny("llama-moe"), kv_overrides={key: value}, kv_ratio=0.5)
    assert "\n" not in str(caught.value)


def test_it_is_refused_before_the_preparation_of_the_model(tiny, monkeypatch):
    seen = []
    monkeypatch.setattr("edgekv.learn.probe_profile.cache", lambda *a, **kw: seen.append(kw))
    line = f"run -p x -m {tiny('llama-moe')} --kv-ratio 0.5"
    said = refused(typed(f"{line} --override-kv llama.expert_used_count=int:9"))
    assert "0 to" not in said and "1 to 4" in said
    assert not seen


def test_the_command_line_takes_several_and_the_first_counts(tiny):
    line = f"run -m {tiny('llama-moe')} -c 512 -n 8 --temp 0 --ignore-eos -p hello"
    answers = []
    for n_used in ("", "1", "1 2", "2 1", "4"):
        flags = [f"--override-kv=llama.expert_used_count=int:{n}" for n in n_used.split()]
        done = typed(line, *flags)
        assert done.exit_code == 0, done.stderr
        answers.append(done.stdout)
    two, one, one_again, two_again, four = answers
    assert one == one_again and two == two_again and len({one, two, four}) == 3
