"""Many clients at once, some of which go away: each answer is that of one client alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from edgekv.serve.options import ServeOptions
from tests.serving import PATIENCE, post, serving, stream

N_CLIENTS, N_REQUESTS, N_PROMPTS = 8, 48, 6
CACHE_RAM = 1 << 20


def prompt_of(number: int) -> list[dict[str, str]]:
    """Two of them share their document."""
    document = " ".join(
        random.Random(number // 2).choices(["the", "rain", "is", "an", "art"], k=90)
    )
    return [{"role": "user", "content": f"{document}\n{'who' if number % 2 else 'where'}?"}]


def body_of(number: int, **more: Any) -> dict[str, Any]:
    return {"messages": prompt_of(number), "max_tokens": 6, "temperature": 0, **more}


def test_answers_under_load_are_those_of_one_client_alone(tiny, tmp_path):
    model, cache = tiny("llama-gqa"), dict(kv_ratio=0.3, kv_min_tokens=64, kv_tail=64)
    path, rng = "/v1/chat/completions", random.Random(0)
    with serving(model, ServeOptions(cache_ram=0, parallel=1), **cache) as (url, _):
        alone = [post(url + path, json=body_of(i)).json() for i in range(N_PROMPTS)]
    right = [one["choices"][0]["message"]["content"] for one in alone]
    options = ServeOptions(cache_ram=CACHE_RAM, cache_disk=str(tmp_path))
    with serving(model, options, **cache) as (url, server):
        pool, sizes = server.worker.conversations, list[int]()

        def ask(number: int, leaves: bool) -> tuple[int, str | None]:
            if leaves:
                with stream(url + path, json=body_of(number, stream=True)) as response:
                    next(response.iter_raw())
                return number, None
            said = httpx.post(url + path, json=body_of(number), timeout=PATIENCE).json()
            sizes.append(server.worker.call(lambda: pool.n_bytes).result(PATIENCE))
            return number, said["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(N_CLIENTS) as clients:
            wishes = [(rng.randrange(N_PROMPTS), rng.random() < 1 / 3) for _ in range(N_REQUESTS)]
            answers = list(clients.map(lambda wish: ask(*wish), wishes))
    assert [text for _, text in answers] == [
        None if leaves else right[number] for number, leaves in wishes
    ]
    assert 0 < max(sizes) <= CACHE_RAM
