"""Which settings a conversation's cache was made with. One of other settings would give other
answers, so no prompt goes on from it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import Any

from edgekv.choice.config import KVConfig
from edgekv.conversation.holder import Holder
from edgekv.library import lib_dir
from edgekv.model.fingerprint import fingerprint
from edgekv.native.bindings import ABI
from edgekv.version import __version__

_SAID = ("ratio", "tokens", "n_bytes", "memory", "sink", "window", "min_tokens", "tail", "seed")
_FREE = {
    *("budget", "budget_mb", "method", "profile"),  # which are said in other words
    *("hidden", "prefill_memory", "fast_prefill", "checkpoints"),  # which leave answers alone
    "archive",  # a place; that there is an archive is said
}
"""Options that are not said. Any other one is, where it is not at its default: then conversations
that were saved before there was the option still belong to caches without it.
"""


def settings_of(llm: Holder) -> str:
    """A digest of versions, method and limits. Model, adapters and cache types are the file's
    business, see `edgekv.conversation.session`.
    """
    return _digest(_build() | _method(llm))


def base_of(llm: Holder) -> str:
    """A digest of what a conversation with an archive must have in common with a cache: the next
    prompt chooses anew what stays in memory, by whatever method and limits. Empty without an
    archive.
    """
    if llm.engine is None or llm.engine.settings.archive_folder is None:
        return ""
    return _digest(_build())


def _build() -> dict[str, Any]:
    return {"version": __version__, "abi": ABI, "llama.cpp": _commit()}


def _digest(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _commit() -> str:
    path = lib_dir() / "build-info.json"
    return str(json.loads(path.read_text()).get("commit", "")) if path.exists() else ""


def _method(llm: Holder) -> dict[str, Any]:
    """How the cache is compressed; nothing where it is not."""
    if llm.engine is None:
        return {}
    s = llm.engine.settings
    score, budget = s.preset.score, s.preset.budget
    is_archived = {"archive": True} if s.archive_folder is not None else {}
    others = [one for one in fields(KVConfig) if one.name not in {*_SAID, *_FREE}]
    more = {x.name: value for x in others if (value := getattr(s, x.name)) != x.default}
    return (
        {name: getattr(s, name) for name in _SAID}
        | more
        | is_archived
        | {
            "method": [s.preset.name, score.name, budget.name, s.preset.query_source],
            "parameters": repr((s.preset.params, getattr(budget, "params", None), s.preset.merge)),
            "table": None if s.table is None else s.table.tolist(),
            "profile": fingerprint(s.preset.profile) if s.preset.profile else None,
        }
    )
