"""Ollama's store: manifests/HOST/NAMESPACE/NAME/TAG name blobs/sha256-DIGEST."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgekv.errors import BadInput
from edgekv.model.header import open_regular
from edgekv.models.found import places
from edgekv.models.found.files import LINK, why_not
from edgekv.models.found.found import Found, is_within

NAME = "ollama"
HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
"""What a name leaves out."""
MANIFEST_MAX = 2**20
"""Bytes of a manifest: an honest one has a few thousand."""
MANIFESTS_MAX = 10_000
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MODEL, _ADAPTER = (f"application/vnd.ollama.image.{kind}" for kind in ("model", "adapter"))


def folders() -> list[str]:
    """Where Ollama keeps models: OLLAMA_MODELS, the user's, the service's. They need not exist."""
    named = os.environ.get("OLLAMA_MODELS")
    usual = [places.home(".ollama", "models"), "/usr/share/ollama/.ollama/models"]
    return list(dict.fromkeys([*([os.path.expanduser(named)] if named else []), *usual]))


@dataclass(frozen=True)
class Tagged:
    """A model's name, taken apart."""

    host: str
    namespace: str
    model: str
    tag: str

    @classmethod
    def of(cls, text: str) -> Tagged:
        """From [HOST/][NAMESPACE/]MODEL[:TAG]. Raises BadInput for anything else."""
        head, _, last = text.rpartition("/")
        model, _, tag = last.partition(":")
        host, _, namespace = head.rpartition("/")
        found = cls(host or HOST, namespace or NAMESPACE, model, tag or TAG)
        if not all(map(_WORD.fullmatch, (found.host, found.namespace, found.model, found.tag))):
            raise BadInput(
                f"'ollama:{text}' is no name of Ollama's; write ollama:NAME or ollama:NAME:TAG"
            )
        return found

    def __str__(self) -> str:
        head = [] if self.host == HOST else [self.host]
        head += [] if self.namespace == NAMESPACE and not head else [self.namespace]
        return "/".join([*head, f"{self.model}:{self.tag}"])

    @property
    def place(self) -> str:
        """The manifest's path below the store."""
        return os.path.join("manifests", self.host, self.namespace, self.model, self.tag)


def find() -> Iterator[Found]:
    """The models of all stores; a folder that may not be read is said to be so."""
    for root in folders():
        yield from _in(root)


def named(text: str) -> Found | None:
    """The model of this name, None if no store has it. Raises BadInput for no name at all."""
    wanted = Tagged.of(text)
    for root in folders():
        if os.path.lexists(os.path.join(root, wanted.place)):
            return _found(root, wanted)
    names = (one for one in find() if one.name.casefold() == f"{NAME}:{wanted}".casefold())
    return next(names, None)


def _in(root: str) -> Iterator[Found]:
    top = os.path.join(root, "manifests")
    if os.path.isdir(root) and not os.access(root, os.R_OK | os.X_OK):
        yield Found(f"{NAME}:", root, (), "you may not read this folder of Ollama's")
        return
    n_seen = 0
    for folder, inner, tags in os.walk(top):
        inner.sort()
        parts = os.path.relpath(folder, top).split(os.sep)
        if len(parts) > 3:
            inner.clear()
        for tag in sorted(tags) if len(parts) == 3 else []:
            host, owner, model = parts
            n_seen += 1
            if n_seen > MANIFESTS_MAX:
                return
            if all(map(_WORD.fullmatch, (*parts, tag))):
                yield _found(root, Tagged(host, owner, model, tag))


def _found(root: str, name: Tagged) -> Found:
    path, why = _blob(root, os.path.join(root, name.place))
    also = [
        name.model + f":{name.tag}",
        *([str(name)[: -len(TAG) - 1], name.model] if name.tag == TAG else []),
    ]
    return Found(f"{NAME}:{name}", path, tuple(also), why)


def _blob(root: str, manifest: str) -> tuple[str, str]:
    """The model's file that a manifest names, and why it cannot be used."""
    if not is_within(manifest, root):
        return manifest, LINK
    try:
        with open_regular(manifest) as file:
            text = file.read(MANIFEST_MAX + 1)
    except OSError as error:
        return manifest, f"its manifest cannot be read ({error.strerror})"
    layers = _layers(text)
    digests = [_DIGEST.fullmatch(str(digest)) for kind, digest in layers if kind == _MODEL]
    if not digests or digests[0] is None:
        return manifest, "its manifest is damaged: 'ollama pull' writes it anew"
    blob = os.path.join(root, "blobs", f"sha256-{digests[0][1]}")
    if len(digests) > 1:
        return blob, "it lies in several files, which Ollama alone can read"
    if any(kind == _ADAPTER for kind, _ in layers):
        return blob, "it has an adapter beside the model; give both files, with -m and --lora"
    return blob, why_not(blob, root)


def _layers(text: bytes) -> list[tuple[Any, Any]]:
    """(media type, digest) of a manifest's layers; none if it is damaged."""
    if len(text) > MANIFEST_MAX:
        return []
    try:
        layers = json.loads(text)["layers"]
        return [(layer["mediaType"], layer["digest"]) for layer in layers]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
