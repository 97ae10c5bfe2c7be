"""How an answer is written, in llama-server's words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edgekv.chat.sampling import SAMPLERS, Sampling
from edgekv.serve.request import Request

ANY_SEED = 2**32 - 1
"""llama-server's word for another one each time."""


def generation_settings(request: Request) -> dict[str, Any]:
    """How an answer is drawn (`sampling_settings`), and what ends it."""
    return {
        **sampling_settings(request.sampling),
        **limit_settings(request.max_tokens),
        "n_keep": 0,
        "n_discard": 0,
        "stop": list(request.stops),
        "n_probs": request.n_probs or 0,
        "grammar": request.constraint.get("grammar", ""),
        "grammar_lazy": request.constraint.get("grammar_lazy", False),
        "generation_prompt": request.constraint.get("generation_prompt", ""),
        "speculative.types": "none",
        "backend_sampling": False,
        "post_sampling_probs": request.probs_drawn,
        "lora": [],
    }


def sampling_settings(sampling: Sampling) -> dict[str, Any]:
    """How tokens are drawn."""
    said = asdict(sampling)
    bias = said.pop("logit_bias")
    said["samplers"] = sampling.samplers or SAMPLERS
    seed = ANY_SEED if sampling.seed is None else sampling.seed
    return {**said, "seed": seed, "logit_bias": [_bias(*pair) for pair in bias.items()]}


def limit_settings(max_tokens: int | None) -> dict[str, Any]:
    n = -1 if max_tokens is None else max_tokens
    return {"n_predict": n, "max_tokens": n}


def _bias(token: int, bias: float) -> dict[str, Any]:
    """JSON has no infinity: null is never, as llama-server says it."""
    return {"token": token, "bias": None if bias == float("-inf") else bias}
