"""Where tensors go: experts in main memory beside a GPU, by llama.cpp's options and as arguments of
`Llama`.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys

import pytest

import edgekv
from edgekv.commands import load as seam
from edgekv.errors import BadInput
from edgekv.memory.room import fits_twice
from edgekv.model.header import tensor_sizes
from tests import models
from tests.cli import refused, typed
from tests.engine import load
from tests.lib import ROOT
from tests.test_native import program

MOVED = re.compile(r"tensor (\S+) \(.*\) buffer type overridden to (\w+)")
"""What llama.cpp logs of each tensor that lies where it was told to."""


def moved(capfd, path, **options) -> dict[str, str]:
    """tensor -> buffer type of what loading a model puts elsewhere."""
    capfd.readouterr()
    load(path, verbose=True, **options).close()
    return dict(MOVED.findall(capfd.readouterr().err))


def experts(layers: range) -> set[str]:
    return {f"blk.{il}.ffn_{part}_exps.weight" for il in layers for part in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("options", "there"),
    [
        ({}, set()),
        ({"cpu_moe": True}, experts(range(3))),
        ({"n_cpu_moe": 2}, experts(range(2))),
        ({"n_cpu_moe": 99}, experts(range(3))),
        (
            {"override_tensor": r"blk\.1\.attn_(q|k)\.=CPU"},
            {"blk.1.attn_q.weight", "blk.1.attn_k.weight"},
        ),
        (
            {"override_tensor": ["^output\\.=CPU,attn_v=CPU", "ffn_gate_inp=CPU"]},
            {"output.weight"}
            | {f"blk.{il}.{x}.weight" for il in range(3) for x in ("attn_v", "ffn_gate_inp")},
        ),
        (
            {"override_tensor": "[[:digit:]]\\.attn_q=CPU"},
            {f"blk.{il}.attn_q.weight" for il in range(3)},
        ),
    ],
)
def test_llama_cpp_puts_tensors_where_they_are_told_to_lie(tiny, capfd, options, there):
    assert moved(capfd, tiny("llama-moe"), **options) == dict.fromkeys(there, "CPU")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"override_tensor": "exps"}, "REGEX=BUFFER"),
        ({"override_tensor": "exps="}, "REGEX=BUFFER"),
        ({"override_tensor": "=CPU"}, "REGEX=BUFFER"),
        ({"override_tensor": ""}, "REGEX=BUFFER"),
        ({"override_tensor": "exps=CPU,"}, "REGEX=BUFFER"),
        ({"override_tensor": "(=CPU"}, "no regular expression"),
        # Python's, not llama.cpp's: the words are those of the C++ library that compiled it.
        ({"override_tensor": "(?i)q=CPU"}, "error loading model"),
        ({"override_tensor": "x" * 100_000 + "=CPU"}, "too long"),
        ({"override_tensor": "exps=GPU7"}, "choose one of: CPU"),
        ({"n_cpu_moe": -1}, "number of layers"),
        ({"n_cpu_moe": 10**9}, "number of layers"),
        ({"n_cpu_moe": 0.5}, "number of layers"),
    ],
)
def test_what_cannot_be_placed_is_one_line(tiny, options, says):
    with pytest.raises(BadInput, match=re.escape(says)) as caught:
        load(tiny("llama-moe"), **options)
    assert "\n" not in str(caught.value)


def test_placement_is_pickled_with_the_model(tiny, capfd):
    llm = load(tiny("llama-moe"), n_cpu_moe=1)
    state = pickle.loads(pickle.dumps(llm.__getstate__()))
    assert (state["n_cpu_moe"], state["cpu_moe"], state["override_tensor"]) == (1, False, None)


# ---- on a device


@pytest.mark.skipif(sys.platform != "linux", reason="the test device needs Linux")
def test_a_compressed_cache_on_a_gpu_with_experts_in_main_memory_is_the_one_on_the_cpu(tiny):
    """On the stand-in for a GPU, whose memory nobody else can touch."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.experts", tiny("llama-moe"), program("fake-device.so")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["buffers"] == ["CPU", "Fake"]
    assert max(result["nmse"].values()) < 1e-4, result
    assert [
        words in said and "\n" not in said
        for words, said in zip(
            ("cannot be cut over the GPUs by heads", "does not support split", "main_gpu: 5"),
            result["said"].values(),
            strict=True,
        )
    ] == [True] * 3, result["said"]
    there = dict(MOVED.findall(done.stderr.split("-- mixed --")[1]))
    assert {t for t, where in there.items() if where == "Fake"} == experts(range(1))
    assert {t for t, where in there.items() if where != "Fake"} == experts(range(1, 3))  # pinned


# ---- the commands


@pytest.mark.parametrize("command", ["run -p x", "bench -p 8 -n 0 -r 1", "fit"])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("-ot exps", "REGEX=BUFFER"),
        ("-ot (=CPU", "no regular expression"),
        ("-ot exps=GPU7", "choose one of: CPU"),
        ("-ncmoe -1", "--n-cpu-moe"),
        ("--n-cpu-moe many", "--n-cpu-moe"),
    ],
)
def test_commands_refuse_nonsense_in_one_line(tiny, command, flags, says):
    assert says in refused(typed(f"{command} -m {tiny('llama-moe')} {flags}"))


@pytest.mark.parametrize("command", ["run -p x", "bench -p 8 -n 0 -r 1", "profile probe -o x.gguf"])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("-sm diagonal", "row"),
        ("-ts 1,x", "such as 3,1"),
        ("-ts 1,nan", "such as 3,1"),
        ("-ts 1,-1", "none below 0"),
        ("-ts 1,,1", "such as 3,1"),
        ("-ts " + ",".join("1" * 17), "at most 16"),
        ("-mg -1", "--main-gpu"),
        ("-mg first", "--main-gpu"),
    ],
)
def test_commands_refuse_a_split_that_cannot_be(tiny, command, flags, says):
    assert says in refused(typed(f"{command} -m {tiny('llama-moe')} {flags}"))


@pytest.fixture
def arguments(monkeypatch):
    """arguments(*words): what `Llama` is given by a command line."""
    seen = []

    def model(path: str, **given: object) -> None:
        seen.append(given)
        raise BadInput("seen")

    monkeypatch.setattr(edgekv, "Llama", model, raising=False)

    def call(line: str) -> dict[str, object]:
        assert "seen" in refused(typed(f"run -p x {line}"))
        return seen.pop()

    return call


def test_all_spellings_reach_the_model(tiny, arguments, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_N_CPU_MOE", "3")
    for flags, expected in {
        "-ot a=CPU,b=CPU -ot c=CPU -cmoe -ncmoe 2": (("a=CPU,b=CPU", "c=CPU"), True, 2),
        "--override-tensor a=CPU --cpu-moe": (("a=CPU",), True, 3),
    }.items():
        given = arguments(f"-m {tiny('llama-moe')} {flags}")
        assert (given["override_tensor"], given["cpu_moe"], given["n_cpu_moe"]) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (1, None, 0, True, False, None)),
        ("-sm none -mg 1 --no-mmap -nr", (0, None, 1, False, False, False)),
        ("-sm row -ts 3,1 --mlock --repack", (2, [3, 1], 0, True, True, True)),
        (
            "--split-mode layer --tensor-split 0.5/0/1 --main-gpu 2 --no-repack",
            (1, [0.5, 0, 1], 2, True, False, False),
        ),
    ],
)
def test_splits_and_memory_reach_the_model(tiny, arguments, flags, expected):
    given = arguments(f"-m {tiny('llama-moe')} {flags}")
    names = ("split_mode", "tensor_split", "main_gpu", "use_mmap", "use_mlock", "repack")
    assert tuple(given[name] for name in names) == expected


@pytest.mark.parametrize(
    ("repack", "free", "expected"),
    [(None, 1, False), (None, 2**40, True), (True, 1, True), (False, 2**40, False)],
)
def test_weights_that_do_not_fit_twice_stay_in_their_file(
    tiny, monkeypatch, repack, free, expected
):
    path = tiny("llama-q4")
    monkeypatch.setattr(
        "edgekv.memory.room.memory_free", lambda swap=False: 2**40 if swap else free
    )
    llm = load(path, kv_ratio=0.3, repack=repack)
    assert llm.model_params.use_extra_bufts == expected
    assert fits_twice(str(path), 0) == (free > 1)


def test_all_parts_of_a_model_count(tmp_path, monkeypatch):
    for i in (1, 2):
        (tmp_path / f"big[1]-0000{i}-of-00002.gguf").write_bytes(bytes(600))
    (tmp_path / "big[1]-00001-of-00003.gguf").write_bytes(bytes(900))
    for free, fits in ((1199, False), (1200, True)):
        monkeypatch.setattr("edgekv.memory.room.memory_free", lambda swap, free=free: free)
        assert fits_twice(str(tmp_path / "big[1]-00001-of-00002.gguf"), 0) == fits


@pytest.mark.parametrize("flags", ["--no-mmap", "--mlock", "--no-mmap --mlock", "-sm row -ts 1"])
def test_a_model_runs_however_it_is_loaded(tiny, flags):
    line = f"run -m {tiny('llama-moe')} -c 512 -n 2 -p x --kv-ratio 0.5 --kv-method snapkv"
    result = typed(f"{line} --ignore-eos {flags}")
    assert result.exit_code == 0 and not result.exception, result.stderr


def test_the_preparation_of_a_model_loads_it_with_its_experts_there(tiny, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("edgekv.learn.probe_profile.cache", lambda *a, **kw: seen.append(kw))
    typed(f"run -p x -n 1 -m {tiny('llama-moe')} -c 512 --kv-ratio 0.5 -ncmoe 2")
    assert seen and seen[0]["n_cpu_moe"] == 2


def test_bench_measures_with_experts_there_and_says_so(tiny):
    words = (
        "-p 16 -n 0 -r 1 --no-warmup --kv-method snapkv --full none -o json"
        " -ncmoe 2 -ot attn_q=CPU --no-mmap -ts 3,1 -nr"
    )
    result = typed(f"bench -m {tiny('llama-moe')} {words}")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)[0]
    names = ("n_cpu_moe", "tensor_buft_overrides", "split_mode", "tensor_split", "load_mode")
    assert [row[name] for name in names] == [2, "attn_q=CPU", "layer", "3.00/1.00", "none"]
    assert row["repack"] is False


# ---- fit


def fit(tiny, monkeypatch, *words: str) -> dict:
    """What is planned for a GPU of 8 GiB."""
    gpu = {"name": "CUDA0", "memory_free": 2**33, "memory_total": 2**33}
    monkeypatch.setattr(seam, "build_info", lambda: {"devices": [gpu]})
    return json.loads(typed(f"fit -m {tiny('llama-moe')} -c 1024 --json", *words).stdout)


@pytest.mark.parametrize(
    ("flags", "there"),
    [
        ("--cpu-moe", experts(range(3))),
        ("--n-cpu-moe 2", experts(range(2))),
        (
            "-ot attn_q=CPU --n-cpu-moe 1",
            experts(range(1)) | {f"blk.{il}.attn_q.weight" for il in range(3)},
        ),
    ],
)
def test_fit_counts_what_lies_in_main_memory_there(tiny, monkeypatch, flags, there):
    plain, best = (fit(tiny, monkeypatch, *more)["best"] for more in ([], flags.split()))
    sizes = tensor_sizes(tiny("llama-moe"))
    n_bytes = sum(sizes[name] for name in there)
    assert n_bytes > 0 and plain["host_weights"] == sizes["token_embd.weight"]
    assert best["host_weights"] == plain["host_weights"] + n_bytes
    assert best["weights"] == plain["weights"] - n_bytes
    assert best["peak"] - best["compute"] == plain["peak"] - plain["compute"] - n_bytes
    assert best["command"].endswith(f"-ngl all {flags}")


def test_fit_counts_a_model_in_several_files_as_in_one(tiny, tmp_path):
    from edgekv.model.blueprint import Blueprint
    from edgekv.model.placement import placements

    first = models.write_in_parts("llama-moe", tmp_path)
    assert len(list(tmp_path.iterdir())) > 2
    found = []
    for path in (tiny("llama-moe"), first):
        with Blueprint(str(path), placed=placements(n_cpu_moe=2)) as blueprint:
            found.append((blueprint.weights, blueprint.on_host, blueprint.experts))
    assert found[0] == found[1]


def test_fit_says_that_experts_could_stay_in_main_memory(tiny, monkeypatch):
    small = ["--memory", "2MiB", "--margin", "0"]
    plain, moved = fit(tiny, monkeypatch, *small), fit(tiny, monkeypatch, *small, "--cpu-moe")
    assert plain["best"] is None and "; --cpu-moe leaves the experts' " in plain["note"]
    assert "--cpu-moe" not in moved["note"]


def test_a_profile_is_made_with_experts_there(tiny, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("edgekv.learn.probe_profile.cache", lambda *a, **kw: seen.append(kw))
    edgekv.make_profile(tiny("llama-moe"), n_gpu_layers=-1, cpu_moe=True)
    assert seen[0]["cpu_moe"] is True and seen[0]["n_gpu_layers"] == -1


def test_fit_leaves_the_token_table_on_a_gpu_where_it_is_told_to_lie(tiny):
    from edgekv.model.placement import on_host, parse

    names = ["token_embd.weight", "blk.0.attn_q.weight"]
    assert on_host(names, parse("token_embd=CUDA0", "-ot"), names[0]) == []
    assert on_host(names, parse("attn=CPU,attn=CUDA0", "-ot"), names[0]) == names
