"""The probe profile: the share of rows that the repeat probe leaves to each KV head, averaged over
calibration texts.

Each text is read once with the repeat probe behind it (`edgekv.methods.probe`). A row is worth the
most attention that the probe pays to it; all rows of all layers and heads are ranked together, and
for every ratio of a grid each head's share of the best ones is counted (KVzip's pooled selection,
arXiv 2505.23416). One pass gives the whole grid, and any score may use the result: which heads get
the rows decides more than which rows. No row is protected here: shares must not depend on the
length of the calibration texts.

The same pass teaches the score kvzap to predict what the probe pays (`edgekv.learn.surrogate`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.base.files import made_folder
from edgekv.base.stats import Progress
from edgekv.errors import BadInput, Unsupported
from edgekv.learn import contest, surrogate
from edgekv.learn.calibration import named_texts
from edgekv.learn.work import Work
from edgekv.llama.llama import Llama
from edgekv.methods import probe
from edgekv.methods.keydiff import key_diversity
from edgekv.methods.kvzap import PAIRS, features, n_features
from edgekv.model import rotation
from edgekv.model.identity import Identity, identify
from edgekv.native import Observer, Store, llama_cpp
from edgekv.profiles.file import Profile, read, write
from edgekv.profiles.partial import Partial
from edgekv.profiles.places import cached

RATIOS = tuple(round(0.02 * i, 2) for i in range(1, 50))
N_TOKENS = 1536
"""Tokens of each text that are read, at most."""
N_FIRST = 320
"""The same on first use, when somebody waits, of the texts that no contest takes: a sixth of the
time; docs/results/contest.md has what 256 and 512 do. What is saved is spent on the contest.
"""
MIN_TOKENS = 64
LEAST = 1e-4
"""Share of a head that no text needed: it takes part, and takes rows that nobody else can."""


FIRST_USE = "made on first use"


def texts() -> list[str]:
    """The calibration texts that come with edgekv."""
    return list(named_texts().values())


def load(path: str, n_tokens: int = N_TOKENS, **options: Any) -> Llama:
    """A model whose context fits `make`. options: of `llama_cpp.Llama`."""
    # the text, and the pieces with their instructions; or a text of the contest
    n_ctx = max(2 * n_tokens + 128 * -(-n_tokens // probe.PIECE), contest.n_ctx())
    options = {"verbose": False, **options}
    return Llama(path, kv_ratio=0.5, kv_method="kvzip", n_ctx=n_ctx, **options)


def make(
    llm: Llama,
    contexts: Sequence[str],
    ratios: Sequence[float] = RATIOS,
    *,
    n_tokens: int = N_TOKENS,
    partial: Path | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Profile:
    """The probe profile of a model that holds no conversation yet.

    contexts: calibration texts; of each the first n_tokens tokens count. partial: where finished
    texts are kept, so that the same call goes on after it was stopped; gone in the end. progress:
    see `edgekv.learn.work`. The model's cache is left empty. Raises BadInput for texts that are
    too short, Unsupported if the model keeps llama.cpp's own cache.
    """
    store = llm.engine.store if llm.engine else None
    if store is None:
        raise Unsupported(
            f"no profile can be made: the model {llm.kv_stats().note or 'was loaded uncompressed'}"
        )
    assert store.memory().n_past == 0, "the model holds a conversation"
    model = identify(llm.model_path)
    tokens = [_tokens(llm, text, n_tokens) for text in contexts]
    heads, f = taking_part(store).shape, n_features(model.d_head_k, model.d_head_v)
    shapes = (len(ratios), *heads), (*heads, f + 2, f + 1)
    found = Partial(partial, _key(model, ratios, tokens), *shapes)
    once = list(dict.fromkeys(tokens))
    finished = [i for i, context in enumerate(once) if context in found]
    work = Work([len(context) for context in once], finished, progress)
    for i, context in enumerate(once):
        if i not in finished:
            scores, moments = measure(llm, context, work.piece(i))
            found.add(context, count(scores, ratios), moments)
            work.end(i)
    shares = np.mean([found[context] for context in tokens], axis=0)
    shares = np.where(taking_part(store), np.maximum(shares, LEAST), 0)
    maps = None
    if heads_alike(store, model):
        maps = surrogate.solve(found.sum / len(once), pairs_of(llm))
    found.remove()
    return Profile(
        model,
        "probe",
        tuple(ratios),
        shares.astype(np.float32),
        sink=0,
        window=0,
        calibration=hash_of(contexts),
        command=command,
        surrogate=maps,
    )


def with_contest(
    llm: Llama,
    contexts: Sequence[str],
    ratios: Sequence[float],
    path: str,
    *,
    progress: Progress | None = None,
    **more: Any,
) -> Profile:
    """`make`, and then the model's contest (`edgekv.learn.contest`): the profile without it is
    written to `path` before, so that a contest that is stopped leaves it.
    """
    first, second = two_stages(progress, contest.cost(llm))
    profile = make(llm, contexts, ratios, progress=first, **more)
    write(profile, path)
    return contest.judged(llm, profile, Path(path), second)


def cache(
    path: str,
    progress: Progress | None = None,
    n_tokens: int = N_FIRST,
    *,
    holds_contest: bool = True,
    **options: Any,
) -> Profile:
    """Make the profile of the model at `path` from texts of edgekv, let methods compete on others
    (`edgekv.learn.contest`), and put it where `find` finds it: what first use does.

    It can be stopped (`progress` raises) and goes on the next time; before the contest the profile
    can be used already. holds_contest: else that is left to a later call. options: as for `load`.
    Raises as `make`, and BadInput if the cache cannot be written.
    """
    target = cached(identify(path))
    made_folder(target.parent, "use --kv-profile none or a file of your own")
    learned = [text for name, text in named_texts().items() if name not in contest.ASKED]
    profile = _without_contest(target, path, hash_of(learned))
    if profile is not None and not holds_contest:
        return profile
    llm = load(path, n_tokens, **options)
    first, second = progress, None
    if holds_contest:
        first, second = two_stages(progress, contest.cost(llm))
    try:
        if profile is None:
            profile = make(
                llm,
                learned,
                n_tokens=n_tokens,
                partial=target.with_suffix(".partial"),
                progress=first,
                command=FIRST_USE,
            )
            write(profile, target, is_ours=True)
        if holds_contest:
            profile = contest.judged(llm, profile, target, second)
            write(profile, target, is_ours=True)
    finally:
        llm.close()
    return profile


def _without_contest(target: Path, path: str, calibration: str) -> Profile | None:
    """The profile of a first use that was stopped before its contest ended, if there is one."""
    try:
        found = read(target)
        found.check(identify(path))
    except BadInput:
        return None
    is_begun = found.contest is None and found.command == FIRST_USE
    return found if is_begun and found.calibration == calibration and found.surrogate else None


def two_stages(progress: Progress | None, later: int) -> tuple[Progress | None, Progress | None]:
    """`progress` over two stages of which the second is `later` units long: one for each."""
    if progress is None:
        return None, None
    before = 0

    def first(done: int, total: int) -> None:
        nonlocal before
        before = total
        progress(done, total + later)

    def second(done: int, total: int) -> None:
        progress(before + later * done // total, before + later)

    return first, second


def measure(
    llm: Llama, tokens: Sequence[int], progress: Progress | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """float32 [n_layer, n_head_kv, n_tokens]: the most attention that the repeat probe pays to each
    row; NaN for heads that take no part. And what is learned from it, float32 [n_layer, n_head_kv,
    ...]: `surrogate.moments` of each head, zeros for those and where heads are not alike.
    """
    kv, n = llm.engine, len(tokens)
    assert kv is not None
    model, pairs = identify(llm.model_path), pairs_of(llm)
    f, learns = n_features(model.d_head_k, model.d_head_v), heads_alike(kv.store, model)
    pieces = probe.pieces(tokens, kv.tokenize)
    scores = np.full((len(kv.store.layers), kv.store.n_head_kv, n), np.nan, np.float32)
    moments = np.zeros((*scores.shape[:2], f + 2, f + 1), np.float32)
    probed = Observer(n, n + sum(map(len, pieces)), ("max",))
    with kv.layers(tokens, [probed], pieces=pieces, progress=progress, stays=False) as layers:
        for p in layers:
            il, info = p.il, kv.store.layers[p.il]
            scores[il, : info.n_head_kv] = p.stat(0, "max")
            for k in range(info.n_head_kv if learns else 0):
                stored = zip(p.rows(k), rotation.blocks(info), strict=True)
                keys, values = (rotation.undo(rows, size) for rows, size in stored)
                known = features(keys, values, key_diversity(keys), pairs)
                moments[il, k] = surrogate.moments(known, surrogate.target(scores[il, k]))
            p.keep([np.zeros(1, np.int32)] * info.n_head_kv)
    return scores, moments


def pairs_of(llm: Llama) -> str:
    """Which values of a key RoPE turns together, one of `edgekv.methods.kvzap.PAIRS`."""
    return PAIRS[
        llama_cpp.llama_model_rope_type(llm.model)
        not in (llama_cpp.LLAMA_ROPE_TYPE_NONE, llama_cpp.LLAMA_ROPE_TYPE_NORM)
    ]


def heads_alike(store: Store, model: Identity) -> bool:
    """Whether heads that take part are as large as the file says: kvzap's maps are one table."""
    return all(
        (info.d_k, info.d_v) == (model.d_head_k, model.d_head_v)
        for info in store.layers
        if not info.n_swa
    )


def taking_part(store: Store) -> NDArray[np.bool_]:
    """bool [n_layer, n_head_kv]: the heads that exist, of layers that attend to everything."""
    return np.array(
        [
            [k < info.n_head_kv and info.selects for k in range(store.n_head_kv)]
            for info in store.layers
        ]
    )


def count(scores: NDArray[np.float32], ratios: Sequence[float]) -> NDArray[np.float64]:
    """float64 [n_ratio, n_layer, n_head_kv]: each head's share of rows among the best of all heads,
    for each ratio.

    scores: float32 [n_layer, n_head_kv, n_tokens], NaN for heads that take no part. The mean over
    the others is the ratio, but for rounding.
    """
    n_layer, n_head_kv, n = scores.shape
    flat = scores.ravel()
    order = np.argsort(-flat, kind="stable")[: np.isfinite(flat).sum()]  # NaN sorts last
    head = order // n
    counts = [
        np.bincount(head[: round(ratio * len(head))], minlength=n_layer * n_head_kv)
        for ratio in ratios
    ]
    return (np.stack(counts) / n).reshape(-1, n_layer, n_head_kv)


def _tokens(llm: Llama, text: str, n_tokens: int) -> tuple[int, ...]:
    tokens = tuple(llm.tokenize(text.encode()))[:n_tokens]
    if len(tokens) < MIN_TOKENS:
        raise BadInput(
            f"a calibration text has {len(tokens)} tokens; give texts of {MIN_TOKENS} tokens or"
            " more, about 1,500 are best"
        )
    return tokens


def hash_of(contexts: Sequence[str]) -> str:
    """SHA-256 (hex) of calibration texts."""
    return hashlib.sha256("\0".join(contexts).encode()).hexdigest()


def _key(model: Identity, ratios: Sequence[float], texts: Sequence[tuple[int, ...]]) -> str:
    """Of all that goes into the sum: with other texts nothing of an earlier call counts."""
    what = model.digest, tuple(ratios), list(texts)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]
