"""What Ollama's protocol says of models, from the headers of their files: no weight is read."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from edgekv.model.header import files_of, header_of
from edgekv.models.found import quants
from edgekv.native import llama_cpp
from edgekv.serve.errors import ApiError

VERSION = "0.12.11"
"""The version of Ollama whose fields these are: clients ask for it before they use some."""
SIZES = {"Small": "_S", "Medium": "_M", "Large": "_L"}
"""What stands behind a quantisation in llama.cpp's names and in Ollama's."""


@dataclass(frozen=True)
class Model:
    """A model file. time: of its last change, seconds since 1970; size: bytes of all its files;
    meta: its metadata without long values; n_params: numbers in its tensors.
    """

    path: str
    time: float = 0.0
    size: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)
    n_params: int = 0

    @classmethod
    def of(cls, path: str) -> Model:
        """What can be read of a file; a damaged one has a name and a size."""
        stamps = [os.stat(one) for one in files_of(path) if os.path.isfile(one)]
        times, sizes = [s.st_mtime for s in stamps], [s.st_size for s in stamps]
        return _read(path, max(times, default=0.0), sum(sizes))

    @property
    def arch(self) -> str:
        return str(self.meta.get("general.architecture", ""))

    @property
    def template(self) -> str:
        return str(self.meta.get("tokenizer.chat_template", ""))

    @property
    def is_embedder(self) -> bool:
        return f"{self.arch}.pooling_type" in self.meta

    def listed(self, name: str) -> dict[str, Any]:
        """An entry of /api/tags. Its digest is of place, size and time: no weights are read."""
        stamp = f"{os.path.realpath(self.path)} {self.size} {self.time}"
        return {
            "name": name,
            "model": name,
            "modified_at": _time(self.time),
            "size": self.size,
            "digest": hashlib.sha256(stamp.encode("utf-8", "replace")).hexdigest(),
            "details": self.details,
        }

    @property
    def details(self) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self.arch,
            "families": [self.arch],
            "parameter_size": _number(self.n_params),
            "quantization_level": self._quantization(),
        }

    def shown(self, template: str = "", parameters: str = "", verbose: bool = False) -> Any:
        """The answer of /api/show. template: in the place of the file's."""
        template = template or self.template
        return {
            "license": str(self.meta.get("general.license", "")),
            "modelfile": f"FROM {self.path}\n",
            "parameters": parameters,
            "template": template,
            "details": self.details,
            "model_info": {
                **{k: v for k, v in self.meta.items() if verbose or not isinstance(v, list)},
                "general.parameter_count": self.n_params,
            },
            "capabilities": self._capabilities(template),
            "modified_at": _time(self.time),
        }

    def _capabilities(self, template: str) -> list[str]:
        if self.is_embedder:
            return ["embedding"]
        return ["completion", "tools", *(["thinking"] if may_think(template) else [])]

    def _quantization(self) -> str:
        """As Ollama writes it, such as Q4_K_M."""
        kind = self.meta.get("general.file_type")
        if type(kind) is not int:
            return quants.tag(self.path)
        name, _, size = (llama_cpp.llama_ftype_name(kind) or b"").decode().partition(" - ")
        return name.removeprefix("all ") + SIZES.get(size, "")


@lru_cache(maxsize=1024)
def _read(path: str, time: float, size: int) -> Model:
    meta, n_params = dict[str, Any](), 0
    for one in files_of(path):
        if header := header_of(one):
            meta = meta or header.meta
            n_params += sum(math.prod(tensor.dims) for tensor in header.tensors.values())
    return Model(path, time, size, meta, n_params)


def may_think(template: str) -> bool:
    """Whether a chat template knows of thoughts."""
    return any(word in template for word in ("think", "reasoning"))


def missing(name: str) -> ApiError:
    """In Ollama's words, which clients look for."""
    return ApiError(404, f"model '{name}' not found")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def _number(n: int) -> str:
    """As Ollama writes numbers of parameters: 8B, 3.2B, 494.03M."""
    if n >= 1e9:
        return f"{n / 1e9:.1f}B".replace(".0B", "B")
    if n >= 1e6:
        return f"{n / 1e6:.2f}M".replace(".00M", "M")
    return f"{n / 1e3:.0f}K" if n >= 1e3 else str(n)
