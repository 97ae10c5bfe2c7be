"""Packs: documents that a model has read once, in a file. Whoever opens it asks at once.

A pack is a saved conversation (`edgekv.conversation.session`) whose prompt ends behind its
documents. Its note has their texts, because each prompt is made from text, and what the cache was
made with.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from edgekv.choice.config import KVConfig
from edgekv.conversation import session
from edgekv.errors import BadInput
from edgekv.model.fingerprint import fingerprint

if TYPE_CHECKING:
    from edgekv.llama.llama import Llama

_FREE = {"profile", "checkpoints", "hidden", "seed", "budget"}
"""Fields of `KVConfig` that a pack does not say, or says with others."""
SAID = tuple(one.name for one in fields(KVConfig) if one.name not in _FREE) + ("budget",)
"""Fields of `KVConfig` that a pack says."""
_FIRST = (
    *("ratio", "budget", "budget_mb", "memory", "method", "sink", "window", "min_tokens", "tail"),
    *("prefill_memory", "fast_prefill"),
)
"""Those that every pack says. One that came later has its default where a pack does not say it."""


def said(config: KVConfig) -> dict[str, Any]:
    """The options of a cache that whoever opens it takes over."""
    values = asdict(config)
    if config.archive != "off":  # a folder of this machine is nobody else's business
        values["archive"] = "temporary"
    return {name: values[name] for name in SAID}


def config_of(its: Any) -> KVConfig:
    """What `said` returned, here or in an earlier version. Raises ValueError or TypeError."""
    if not isinstance(its, dict) or not set(_FIRST) <= set(its) <= set(SAID):
        raise ValueError
    return KVConfig(**its)


def taken_over(mine: KVConfig, its: dict[str, Any]) -> KVConfig:
    """`mine` with the options that `said` returned, and one's own archive. Raises BadInput."""
    return replace(mine, **its | ({"archive": mine.archive} if mine.archive != "off" else {}))


NONE, AGAIN = "is no pack; make one with 'edgekv pack'", "pack the documents again"


@dataclass(frozen=True)
class PackedDocument:
    """One document of a pack.

    n_bytes: of the file that the text came from.
    """

    name: str
    text: str
    n_bytes: int
    n_tokens: int


@dataclass(frozen=True)
class Pack:
    """What a pack says of itself. method: the one that ran; config: the cache's options by the
    names of `KVConfig`; cache_types: of K and V.
    """

    documents: tuple[PackedDocument, ...]
    system: str
    method: str
    config: dict[str, Any]
    cache_types: tuple[str, str]
    n_tokens: int
    n_bytes: int
    """Bytes of the cache."""
    n_bytes_full: int
    """Bytes that a full f16 cache would take."""

    @property
    def settings(self) -> KVConfig:
        return config_of(self.config)

    @property
    def is_archived(self) -> bool:
        """Whether it has the rows of all tokens: other options choose anew what stays of them."""
        return self.settings.archive != "off" or bool(self.settings.recall)


def write(
    llm: Llama,
    messages: list[dict[str, Any]],
    documents: list[PackedDocument],
    tokens: list[int],
    path: str,
) -> Pack:
    """Read the documents and save the conversation.

    messages: perhaps a system message, then one whose content is a list of text parts: each
    document in a part of its own, then any text. tokens: of the prompt that a chat would make of
    them. Raises ContextFull, BadInput if the chat template changes the documents, and
    Cancelled.
    """
    texts = [part["text"] for part in messages[-1]["content"]][:-1]
    cuts = llm.positions(texts, tokens)
    if len(cuts) != len(texts):
        raise BadInput(
            "this model's chat template or tokenizer changes the documents: they cannot be packed"
        )
    llm.reset()
    llm.turn.cuts = cuts[:-1]
    llm.eval(tokens[: cuts[-1]])
    stats = llm.kv_stats()
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    pack = Pack(
        tuple(documents),
        system,
        stats.method,
        said(llm.kv_config()),
        (stats.type_k, stats.type_v),
        stats.n_seen,
        stats.n_bytes_used,
        stats.n_bytes_full,
    )
    llm.kv_save(path, {"pack": asdict(pack), "model": name_of(llm)})
    return pack


def name_of(llm: Llama) -> str:
    """What a model calls itself, and its file."""
    return f"{llm.metadata.get('general.name', '')} ({os.path.basename(llm.model_path)})".strip()


def read(path: str) -> Pack:
    """What a pack says of itself. Raises BadInput if it is none."""
    with _said_of_packs():
        return pack_of(session.beginning(path).note, path)


def load(llm: Llama, path: str) -> None:
    """Make the documents of a pack the beginning of the conversation of `llm`.

    Raises BadInput if it is of another model or cache, or damaged; `llm` is then as it was.
    """
    with _said_of_packs():
        llm.kv_load(path, lambda note: pack_of(note, path))


def verify(path: str) -> None:
    """Raises BadInput if a pack is not as it was written."""
    with _said_of_packs():
        session.verify(path)


@contextmanager
def _said_of_packs() -> Iterator[None]:
    """Turns what is said of saved conversations into words about packs."""
    try:
        yield
    except BadInput as error:
        text = str(error).replace(session.NONE, NONE).replace(session.AGAIN, AGAIN)
        raise BadInput(text) from None


@dataclass(frozen=True)
class Owner:
    """The model that a pack belongs to. name: empty in packs of earlier versions."""

    name: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.name or 'a model'}, fingerprint {self.fingerprint[:16]}"


def owner(path: str) -> Owner:
    """The model that a pack belongs to. Raises BadInput if it is no pack."""
    with _said_of_packs():
        found = session.beginning(path)
    return Owner(session.name_in(found.note), session.fingerprint_in(found.header))


def check_model(
    path: str,
    model: str,
    overrides: Mapping[str, Any] | None,
    adapters: Iterable[tuple[str, float]],
) -> None:
    """Raises BadInput if a pack is not of this model file with these overrides and adapters."""
    its, mine = owner(path), fingerprint(model)
    if its.fingerprint and its.fingerprint != mine:
        raise BadInput(
            f"'{path}' belongs to another model: {its}; this one is"
            f" {os.path.basename(model)}, fingerprint {mine[:16]}: give that one, or pack the"
            " documents again with this one"
        )
    with _said_of_packs():
        session.check_weights(path, model, overrides, adapters)


def pack_of(note: Any, path: str) -> Pack:
    """The pack in a note. Raises BadInput unless it has what a pack has, of the right types."""
    said: Any = note.get("pack") if isinstance(note, dict) else None
    try:
        documents = tuple(PackedDocument(**x) for x in said["documents"])
        kinds = tuple(said["cache_types"])
        pack = Pack(**{**said, "documents": documents, "cache_types": kinds})
        if not _is_sound(pack):
            raise ValueError
        _ = pack.settings
    except (AttributeError, TypeError, KeyError, ValueError, BadInput):
        raise BadInput(f"'{path}' {NONE}") from None
    return pack


def _is_sound(pack: Pack) -> bool:
    """Whether what was read has the right types. Raises ValueError for text that is none."""
    texts: list[Any] = [pack.system, pack.method, *pack.cache_types]
    numbers: list[Any] = [pack.n_tokens, pack.n_bytes, pack.n_bytes_full]
    for x in pack.documents:
        texts += [x.name, x.text]
        numbers += [x.n_bytes, x.n_tokens]
    if not all(isinstance(x, str) for x in texts) or not all(type(x) is int for x in numbers):
        return False
    for text in texts:
        text.encode()
    names = [pack.method, *pack.cache_types]
    return (
        len(pack.cache_types) == 2
        and bool(pack.documents)
        and all(name.isprintable() for name in names)
        and min(numbers) >= 0
    )
