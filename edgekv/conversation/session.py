"""Conversations on disk.

One file holds all of a conversation: a line `edgekv session 3`, a line of JSON (of which model and
cache it is, and sizes), the note of whoever saved it (JSON), its tokens (int32), what the engine
remembers (`edgekv.conversation.remembered`), llama.cpp's state of sequence 0, and the SHA-256 of
all of that. With an archive it is `edgekv session 4`: the line of JSON has its sizes, and its rows
stand before the SHA-256. What a file says is checked before anything changes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.base import files
from edgekv.base.defaults import CTX_STEP, whole_ctx
from edgekv.conversation import remembered, state, whole_state
from edgekv.conversation.holder import Holder
from edgekv.errors import BadInput, EdgeKVError
from edgekv.model import facts
from edgekv.model.fingerprint import fingerprint

log = logging.getLogger("edgekv")

NONE, AGAIN = "is no saved conversation", "save the conversation again"
"""What is said of files that are none, or not any more."""
KIND = b"edgekv session "
MAGIC, WITH_ARCHIVE = KIND + b"3\n", KIND + b"4\n"
PRIVATE = 0o600
"""Permissions of a file: it holds what somebody wrote."""
_HEADER = 1 << 16  # most bytes of the line of JSON
_DIGEST = hashlib.sha256().digest_size
_ROPE = (
    *("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor"),
    *("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx"),
)
_SIZES = ("n_tokens", "n_note", "n_state")
_ARCHIVE = ("n_tokens", "n_known", "n_judged", "n_bytes")
"""What the line of JSON says of an archive (`edgekv_archive_info` in edgekv.h)."""
_CACHE = ("type_k", "type_v", "flash_attn", "compressed")
"""What of a file's header can be had by a new context of the same model."""
_WRONG = {
    "model": ("another model", "give the model that it belongs to"),
    "lora": ("another LoRA adapter", "give the same adapters (--lora)"),
    "rope": ("other RoPE settings", "give the same ones"),
    "type_k": ("another K cache type", "give -ctk {}"),
    "type_v": ("another V cache type", "give -ctv {}"),
    "flash_attn": ("flash attention switched the other way", "give -fa {}"),
}
_COMPRESSED = {
    True: ("a compressed cache", "give the --kv-ratio that it had"),
    False: ("an uncompressed cache", "leave --kv-ratio and other limits out"),
}

Check = Callable[[Any], object]
"""Called with a file's note before anything changes; raises an EdgeKVError to refuse the file."""


def _identity(llm: Holder) -> dict[str, Any]:
    params = llm.context_params
    return {
        **_weights(llm.model_path, llm.kv_overrides, llm.adapters.files),
        "rope": [getattr(params, name) for name in _ROPE],
        "type_k": int(params.type_k),
        "type_v": int(params.type_v),
        "flash_attn": int(params.flash_attn_type),
        "compressed": llm.engine is not None,
    }


def _weights(
    path: str, overrides: Mapping[str, Any] | None, adapters: Iterable[tuple[str, float]]
) -> dict[str, Any]:
    """Of which model: its file, what of its metadata was overridden, and adapters: one alone as
    files of earlier versions have it.
    """
    file, found = fingerprint(path), [[fingerprint(lora), scale] for lora, scale in adapters]
    return {
        "model": [file, sorted(overrides.items())] if overrides else file,
        "lora": found[0] if len(found) == 1 else found or None,
    }


# ---- saving


def save(llm: Holder, path: str, note: Any = None) -> None:
    """Write the conversation of `llm` to `path`. note: any JSON value of the caller's.

    Raises BadInput if the note is none or the file cannot be written, which is then as before.
    """
    write(llm, path, lambda: state.take(llm), note)


def write(
    llm: Holder,
    path: str | Path,
    taken: Callable[[], state.State],
    note: Any = None,
    is_synced: bool = True,
) -> None:
    """Write a conversation of `llm`, be it another one than it holds. See `save`.

    taken: called when the file may be written; returns the conversation's state. is_synced: as of
    `edgekv.base.files.replaced`.
    """
    try:
        said = json.dumps(note, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"the note cannot be saved ({error}): give a JSON value") from None
    is_ours = files.begins_with(KIND)
    with files.replaced(path, is_ours, "saved conversation", PRIVATE, is_synced) as f:
        now = _savable(llm, taken())
        header = _identity(llm) | {
            "n_tokens": len(now.tokens),
            "n_note": len(said),
            "n_state": now.n_bytes,
            "memory": now.past and remembered.described(now.past),
        }
        rows: Iterable[Any] = []
        if now.archive:
            header["archive"] = {name: getattr(now.archive.info, name) for name in _ARCHIVE}
            rows = now.archive.pieces()
        line = json.dumps(header).encode() + b"\n"
        layers = llm.engine.store.layers if llm.engine else []
        arrays = remembered.arrays(now.past, layers) if now.past else []
        magic = WITH_ARCHIVE if now.archive else MAGIC
        _write(f, chain([magic, line, said, now.tokens.astype("<i4"), *arrays, now.data], rows))


def _savable(llm: Holder, now: state.State) -> state.State:
    """`now`. Raises BadInput if it is a state that `load` would refuse."""
    if llm.engine is None:
        try:
            whole_state.check(llm.model, memoryview(now.data).cast("B"), len(now.tokens))
        except ValueError as error:
            raise BadInput(
                f"this conversation cannot be saved ({error}): go on with it, or reset it"
            ) from None
    return now


def _write(f: BinaryIO, parts: Iterable[Any]) -> None:
    digest = hashlib.sha256()
    for part in parts:
        f.write(part)
        digest.update(part)
    f.write(digest.digest())


# ---- loading


def load(llm: Holder, path: str | Path, check: Check | None = None) -> Any:
    """Make the conversation in `path` that of `llm`. Returns the note that it was saved with.

    Raises BadInput for any file that is not of this model and cache, is damaged, or is refused by
    `check`; `llm` is then as it was.
    """
    with files.opened(path) as f:
        note, saved = _read(llm, f, str(path))
    if check is not None:
        check(note)
    if not state.try_put(llm, saved):
        raise BadInput(f"'{path}' does not fit this model and its cache; {AGAIN}")
    return note


def read(llm: Holder, path: str | Path) -> state.State:
    """The conversation in a file without its archive, whatever `llm` holds. Raises as `load`."""
    with files.opened(path) as f:
        return _read(llm, f, str(path), archives=False)[1]


def _read(
    llm: Holder, f: BufferedReader, path: str, archives: bool = True
) -> tuple[Any, state.State]:
    """The note and the conversation. archives: the archive is wanted too."""
    with _told(path):
        reader = _Reader(f)
        header = _header(reader, path)
        _check_identity(header, _identity(llm), path)
        if header["n_tokens"] > llm.n_ctx():
            raise BadInput(
                f"'{path}' holds {header['n_tokens']:,} tokens, this context {llm.n_ctx():,}: "
                f"give a larger -c, {whole_ctx(header['n_tokens'] + CTX_STEP)} or more"
            )
        return _body(llm, reader, header, archives)


@contextmanager
def _told(path: str | Path) -> Iterator[None]:
    """A `with` block that reads a file: whatever is wrong with that is said of it in one line."""
    try:
        yield
    except BadInput:
        raise
    except (ValueError, EOFError) as error:
        raise _damaged(path, error) from None
    except MemoryError:
        raise BadInput(f"'{path}' is larger than the memory that is free") from None


@dataclass(frozen=True, eq=False)
class Beginning:
    """What a file says of itself, its checksum not yet looked at. tokens: int32 [n_tokens]."""

    header: dict[str, Any]
    note: Any
    tokens: NDArray[np.int32]


@dataclass(frozen=True)
class CacheKind:
    """A cache in llama.cpp's numbers. is_store: it is edgekv's."""

    type_k: int
    type_v: int
    flash_attn_type: int
    is_store: bool


def cache_of(path: str | Path, llm: Holder) -> tuple[CacheKind, Any]:
    """Return what a file's cache is, and the file's note; the checksum is not looked at.

    Raises BadInput if the file is not of the model of `llm`, or the cache is none.
    """
    found = beginning(path)
    mine = {name: value for name, value in _identity(llm).items() if name not in _CACHE}
    _check_identity(found.header, mine, str(path), name_in(found.note))
    cache = CacheKind(*(found.header[name] for name in _CACHE))
    if not all(type(x) is int and facts.type_name(x) for x in (cache.type_k, cache.type_v)) or not (
        cache.flash_attn_type in (0, 1) and type(cache.is_store) is bool
    ):
        raise _damaged(path, ValueError("its cache is none"))
    return cache, found.note


def check_weights(
    path: str | Path,
    model: str,
    overrides: Mapping[str, Any] | None,
    adapters: Iterable[tuple[str, float]],
) -> None:
    """Raises BadInput if a file is not of this model file with these overrides and adapters."""
    _check_identity(beginning(path).header, _weights(model, overrides, adapters), str(path))


def name_in(note: Any) -> str:
    """The name of the model that a note says the file is of; empty if it says none."""
    name = note.get("model") if isinstance(note, dict) else None
    return name if isinstance(name, str) and name.isprintable() else ""


def fingerprint_in(header: dict[str, Any]) -> str:
    """The fingerprint of the model that a file is of, empty if its header says none."""
    said = header["model"]
    file = said[0] if isinstance(said, list) and said else said
    return file if isinstance(file, str) and file.isalnum() else ""


class Damaged(BadInput):
    """A file that is not as it was written."""


def beginning(path: str | Path, llm: Holder | None = None) -> Beginning:
    """Read the note and the tokens of a file, and not its cache.

    Raises BadInput if that cannot be, or with `llm` if the file is not of this model and cache.
    """
    with files.opened(path) as f, _told(path):
        reader = _Reader(f)
        header = _header(reader, str(path))
        if llm is not None:
            _check_identity(header, _identity(llm), str(path))
        note = _parsed(reader.into(bytearray(header["n_note"])), "note")
        if 4 * header["n_tokens"] > reader.left:
            raise EOFError("it ends too early")
        tokens = reader.into(np.empty(header["n_tokens"], "<i4"))
        if llm is not None:
            _check_tokens(llm, tokens)
    return Beginning(header, note, tokens.astype(np.int32))


def verify(path: str | Path) -> None:
    """Raises Damaged if a file is not as it was written, BadInput if it cannot be read."""
    with files.opened(path) as f:
        digest, left = hashlib.sha256(), os.fstat(f.fileno()).st_size - _DIGEST
        while left > 0 and (piece := f.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
        if left != 0 or f.read() != digest.digest():
            raise _damaged(path, ValueError("its checksum does not match"))


def _damaged(path: str | Path, error: Exception) -> Damaged:
    return Damaged(f"'{path}' is damaged ({error}); {AGAIN}")


class _Reader:
    """Reads a file, each piece into the one buffer that it stays in, and adds up its checksum."""

    def __init__(self, f: BufferedReader) -> None:
        self._f = f
        self._digest = hashlib.sha256()
        self.left = os.fstat(f.fileno()).st_size
        """Bytes that are not read yet."""

    def line(self, limit: int) -> bytes:
        found = self._f.readline(limit)
        self._digest.update(found)
        self.left -= len(found)
        return found

    def into(self, buffer: Any) -> Any:
        """Fills `buffer` and returns it. Raises EOFError if the file is too short."""
        view = memoryview(buffer).cast("B")
        if self._f.readinto(view) != len(view):
            raise EOFError("it ends too early")
        self._digest.update(view)
        self.left -= len(view)
        return buffer

    def is_whole(self) -> bool:
        """Whether nothing is left but the right checksum."""
        expected = self._digest.digest()
        return self.left == _DIGEST and self._f.read(_DIGEST + 1) == expected


def _header(reader: _Reader, path: str) -> dict[str, Any]:
    """The line of JSON, with the names and the types that it must have."""
    magic = reader.line(len(MAGIC))
    if magic not in (MAGIC, WITH_ARCHIVE):
        raise BadInput(
            f"'{path}' was saved by another version of edgekv; {AGAIN}"
            if magic.startswith(KIND)
            else f"'{path}' {NONE}"
        )
    header = _parsed(reader.line(_HEADER), "header")
    names = {*_WRONG, "compressed", "memory", *_SIZES}
    if magic == WITH_ARCHIVE:
        names.add("archive")
    if type(header) is not dict or set(header) != names:
        raise ValueError("its header has other names")
    _check_sizes(reader, header, _SIZES)
    if magic == WITH_ARCHIVE:
        its = header["archive"]
        if type(its) is not dict or set(its) != set(_ARCHIVE):
            raise ValueError("its archive has other names")
        _check_sizes(reader, its, _ARCHIVE)
        n = its["n_tokens"]
        if not max(its["n_known"], its["n_judged"]) <= n <= header["n_tokens"]:
            raise ValueError("its archive's sizes are out of range")
    return header


def _check_sizes(reader: _Reader, header: dict[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError for sizes that no file of this length has."""
    if any(type(header[x]) is not int or not 0 <= header[x] <= reader.left for x in names):
        raise ValueError("its sizes are out of range")


def _parsed(data: bytes, what: str) -> Any:
    """The JSON value in `data`. Raises ValueError, in plain words, if there is none."""
    try:
        return json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise ValueError(f"its {what} cannot be read") from None


def _refuse(_: str) -> None:
    """NaN and infinities are no JSON, whatever Python says."""
    raise ValueError


def _check_identity(
    header: dict[str, Any], mine: dict[str, Any], path: str, model: str = ""
) -> None:
    """model: the name of the one that the file is of."""
    for name, value in mine.items():
        if json.dumps(header[name]) != json.dumps(value):  # 1, 1.0 and true are three things
            what, to_do = _WRONG.get(name) or _COMPRESSED[not value]
            what += f", {model}" * (name == "model" and bool(model))
            raise BadInput(f"'{path}' was saved with {what}: {to_do.format(_said(name, header))}")


def _said(name: str, header: dict[str, Any]) -> str:
    """A header's value in the command line's words."""
    if name == "flash_attn":
        return "on" if header[name] else "off"
    is_type = name in ("type_k", "type_v")
    return (facts.type_name(header[name]) or "with the same type") if is_type else ""


def _body(
    llm: Holder, reader: _Reader, header: dict[str, Any], archives: bool
) -> tuple[Any, state.State]:
    """What stands behind the header. Raises ValueError or EOFError if the header says otherwise."""
    form = remembered.layout(header["memory"], llm.engine.store.layers) if llm.engine else {}
    if not llm.engine and header["memory"] is not None:
        raise ValueError("it is of no compressed conversation")
    n_tokens, n_note, n_state = (header[name] for name in _SIZES)
    n_memory = remembered.n_bytes(form)
    n_archive = header["archive"]["n_bytes"] if "archive" in header else 0
    if reader.left != n_note + 4 * n_tokens + n_memory + n_state + n_archive + _DIGEST:
        raise ValueError("its sizes do not add up")
    said = reader.into(bytearray(n_note))
    tokens = reader.into(np.empty(n_tokens, "<i4"))
    arrays = reader.into(bytearray(n_memory))
    data = reader.into((ctypes.c_uint8 * n_state)())
    archive = _archive(llm, reader, header["archive"], archives) if n_archive else None
    if not reader.is_whole():
        raise ValueError("its checksum does not match")
    _check_tokens(llm, tokens)
    if llm.engine is None:
        whole_state.check(llm.model, memoryview(data).cast("B"), n_tokens)
    memory = (
        remembered.remembered(header["memory"], form, memoryview(arrays)) if llm.engine else None
    )
    now = state.State(tokens.astype(np.int32), data, memory, archive)
    return _parsed(said, "note"), now


def _archive(
    llm: Holder, reader: _Reader, its: dict[str, Any], is_wanted: bool
) -> native.Archive | None:
    """The archive in a file; None, and the conversation goes on, if `llm` can have none."""
    end, archive = reader.left - its["n_bytes"], None
    try:
        if is_wanted and llm.engine and llm.engine.settings.archive_folder is not None:
            archive = native.Archive.new(llm.ctx, its["n_tokens"], its["n_known"])
            if sum(archive.sizes()) != its["n_bytes"]:
                raise ValueError("its archive is of another size")
            for i, n in enumerate(archive.sizes()):
                archive.put_piece(i, reader.into((ctypes.c_uint8 * n)()))
            archive.index(llm.ctx, its["n_judged"])
    except BadInput as error:
        raise ValueError(error) from None
    except EdgeKVError as error:
        log.warning("edgekv: %s", error)
        archive = None
    while reader.left > end:
        reader.into(bytearray(min(reader.left - end, 1 << 20)))
    return archive


def _check_tokens(llm: Holder, tokens: NDArray[np.int32]) -> None:
    """Raises ValueError for those that would end the process where their text is looked up."""
    if len(tokens) and not (0 <= tokens.min() and tokens.max() < llm.n_vocab()):
        raise ValueError("some of its tokens are not in the vocabulary")
