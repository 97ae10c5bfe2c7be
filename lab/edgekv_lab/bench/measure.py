"""One sample; `edgekv_lab.bench.runner` takes it in a process of its own, so that its peak memory
is its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import Any

from edgekv.base.defaults import whole_ctx
from edgekv.base.machine import rss_now, rss_peak
from edgekv.base.stats import KVStats
from edgekv.chat.drafts import NONE
from edgekv.errors import BadInput
from edgekv_lab.bench import several, stages
from edgekv_lab.bench.lowest import Lowest
from edgekv_lab.bench.reads import weights_read
from edgekv_lab.bench.spec import FILL_FIRST, Case

MIN_TOKENS = 1
"""A row's ratio holds for short prompts too, unlike in a chat (--kv-min-tokens)."""
WARM_UP_TOKENS = 128
"""Of a prompt: enough to be read layer by layer, so that weights and code are in memory."""
OF_READING = ("kv_bytes_peak", "compress_ms", "mem_peak_host", "mem_peak_device")
"""What nobody knows where a depth was filled."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """A sample of the case that a request is, with `warm_up` and `verbose` beside its fields."""
    warm_up, verbose = request.pop("warm_up"), request.pop("verbose")
    return sample(Case.of(request), warm_up, verbose)


def sample(case: Case, warm_up: bool, verbose: bool) -> dict[str, Any]:
    """Run a case once. ns: of the test; depth_ns: of reading what lies before it, 0 if it was
    filled; then there are no peaks either.

    rss_loaded, peak_loaded: the process when the model was loaded, weights and (in full)
    llama.cpp's own cache included, and its peak until then.
    """
    import numpy.random

    from edgekv.model import facts
    from edgekv_lab.bench.fill import fill

    assert numpy.random  # loaded now, so that it is no part of what the test takes
    free = device_free(facts.devices())
    with Lowest(lambda: device_free(facts.devices())) if free else nullcontext() as lowest:
        llm = load(case, verbose)
        loaded = {"rss_loaded": rss_now(), "peak_loaded": rss_peak() or 0}
        if warm_up:
            llm.eval(tokens(llm, min(WARM_UP_TOKENS, max(case.n_prompt, case.n_depth)) or 1))
            llm.reset()
        talks, n = several.of(llm, case.n_parallel), case.n_parallel
        if case.is_filled:
            talks.read(lambda: fill(llm, tokens(llm, FILL_FIRST), case.n_depth))
        if case.spec_type:
            answer = answered(llm, case.n_depth)
            depth_ns, ns = timed(llm, lambda: next(answer)), 0
        else:
            depth_ns = 0 if case.is_filled else read(llm, talks, case.n_depth)
            ns = read(llm, talks, case.n_prompt)
    before, work = talks.stats(), stages.of(llm, case.n_threads) if case.n_prompt else None
    if case.spec_type:
        ns = timed(llm, lambda: [next(answer) for _ in range(case.n_gen)])
        answer.close()
    else:
        ns += write(llm, talks, case.n_gen, n)
    after = talks.stats()
    reads_alone = case.only_writes and not case.spec_type
    devices, n_used = facts.devices(), total(before, "n_bytes_used") + total(after, "n_bytes_used")
    found = {
        "ns": ns,
        "depth_ns": depth_ns,
        "work": work,
        "method": before[0].method,
        "mode": before[0].mode,
        "kv_tokens_full": total(after, "n_seen"),
        "kv_tokens_kept": total(after, "n_kept"),
        "kv_bytes_full": total(after, "n_bytes_full"),
        "kv_bytes_used": total(after, "n_bytes_used"),
        "kv_bytes_allocated": total(after, "n_bytes"),
        "kv_bytes_peak": talks.n_bytes_peak,
        "kv_bytes_index": total(after, "n_bytes_index"),
        "kv_bytes_archive": total(after, "n_bytes_archive"),
        "kv_bytes_recalled": total(after, "n_bytes_recalled") - total(before, "n_bytes_recalled"),
        "read_bytes_kv": n_used // (2 * n) if reads_alone else 0,
        "read_bytes_weights": touched(llm) // n if reads_alone else 0,
        "compress_ms": total(after, "compress_ms") if case.n_depth or case.n_prompt else 0.0,
        **loaded,
        "mem_peak_host": rss_peak(),
        "mem_peak_device": max(free - min(device_free(devices), lowest.value), 0) if lowest else 0,
        **about(llm, devices),
    }
    return found | dict.fromkeys(OF_READING, 0) if case.is_filled else found


def load(case: Case, verbose: bool = False) -> Any:
    from edgekv import Llama
    from edgekv.model import facts

    n_ctx = whole_ctx(max(case.n_prompt + case.n_gen + case.n_depth + 1, WARM_UP_TOKENS))
    several = case.n_parallel > 1
    compress: dict[str, Any] = (
        {}
        if case.is_full
        else dict(
            kv_ratio=case.kv_ratio,
            kv_method=case.kv_method,
            kv_hidden=case.kv_hidden,
            kv_recall=case.kv_recall,
            kv_min_tokens=MIN_TOKENS,
        )
    )
    llm = Llama(
        case.model,
        n_ctx=n_ctx * case.n_parallel if case.is_full else n_ctx,
        n_seq_max=case.n_parallel + (several and not case.is_full),
        n_batch=case.n_batch,
        n_ubatch=case.n_ubatch,
        n_threads=case.n_threads,
        n_threads_batch=case.n_threads,
        n_gpu_layers=case.n_gpu_layers,
        flash_attn=case.flash_attn != "off",
        type_k=facts.cache_types[case.type_k][0],
        type_v=facts.cache_types[case.type_v][0],
        verbose=verbose,
        spec_type=case.spec_type or NONE,
        spec_draft_model=case.draft_model,
        **case.loading.arguments(),
        **compress,
    )
    if several and llm.engine is None and not case.is_full:
        raise BadInput("this model runs uncompressed: give --kv-ratio 1 with -npl")
    return llm


def touched(llm: Any) -> int:
    """Bytes of the weights that a written token reads; 0 if the file has tensors of a kind that
    nobody here knows."""
    from edgekv.model.header import tensor_sizes
    from edgekv.native import llama_cpp

    arch = llm.metadata.get("general.architecture", "")
    experts = (
        int(llm.metadata.get(f"{arch}.{name}", 0)) for name in ("expert_count", "expert_used_count")
    )
    try:
        sizes = tensor_sizes(llm.model_path)
    except (KeyError, ValueError):
        return 0
    return weights_read(sizes, llama_cpp.llama_model_size(llm.model), *experts)


def tokens(llm: Any, n: int) -> list[int]:
    """n random tokens, the first one the beginning of a text if the model wants it (as
    llama-bench)."""
    import numpy as np

    from edgekv.llama_cpp import llama_model_get_vocab, llama_vocab_bos, llama_vocab_get_add_bos

    drawn = np.random.default_rng(llm.n_tokens).integers(0, llm.n_vocab(), n).tolist()
    vocab = llama_model_get_vocab(llm.model)
    if drawn and llm.n_tokens == 0 and llama_vocab_get_add_bos(vocab):
        drawn[0] = llama_vocab_bos(vocab)
    return drawn


def total(stats: Sequence[KVStats], name: str) -> Any:
    """The sum of a field."""
    return sum(getattr(x, name) for x in stats)


def read(llm: Any, talks: several.Alone, n: int) -> int:
    """Nanoseconds in which each conversation reads n tokens at once."""
    prompt = tokens(llm, n)
    return timed(llm, lambda: talks.read(lambda: llm.eval(prompt))) if prompt else 0


def write(llm: Any, talks: several.Alone, n_gen: int, n: int) -> int:
    """Nanoseconds in which each of n conversations goes on by n_gen tokens, one after the other."""
    rest = tokens(llm, n_gen * n)

    def steps() -> None:
        for i in range(0, len(rest), n):
            talks.step(rest[i : i + n])

    return timed(llm, steps) if rest else 0


def answered(llm: Any, n: int) -> Generator[int, Any, None]:
    """The answer at temperature 0 behind n tokens of a text."""
    from edgekv.learn.calibration import named_texts

    text = llm.tokenize("\n\n".join(named_texts().values()).encode())
    prompt = (text * (n // len(text) + 1))[: max(n, 1)]
    found: Generator[int, Any, None] = llm.generate(prompt, temp=0.0)
    return found


def timed(llm: Any, work: Callable[[], object]) -> int:
    """Nanoseconds of some work."""
    from edgekv.native import llama_cpp

    begin = time.perf_counter_ns()
    work()
    llama_cpp.llama_synchronize(llm.ctx)  # a device may still be at the last token
    return time.perf_counter_ns() - begin


def device_free(devices: list[dict[str, Any]]) -> int:
    """Free bytes of all devices that are not the CPU."""
    return sum(d["memory_free"] for d in devices if d["name"].upper() != "CPU")


def about(llm: Any, devices: list[dict[str, Any]]) -> dict[str, Any]:
    """What llama-bench says of model and machine."""
    import ctypes

    from edgekv.model import facts
    from edgekv.native import llama_cpp

    model, text = llm.model, ctypes.create_string_buffer(128)
    llama_cpp.llama_model_desc(model, text, len(text))
    gpus = [d for d in devices if d["name"].upper() != "CPU"]
    return {
        "build_commit": facts.build_info()["llama_cpp_commit"],
        "model_type": text.value.decode(),
        "model_size": llama_cpp.llama_model_size(model),
        "model_n_params": llama_cpp.llama_model_n_params(model),
        "repack": bool(llm.model_params.use_extra_bufts),
        "cpu_info": ", ".join(d["description"] for d in devices if d not in gpus),
        "gpu_info": ", ".join(d["description"] for d in gpus),
        "backends": ",".join(sorted({d["name"].rstrip("0123456789") for d in gpus})) or "CPU",
    }
