"""What a name of Hugging Face's means: USER/REPO, USER/REPO:QUANT or USER/REPO/FILE."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgekv.errors import BadInput
from edgekv.models.found import quants

PREFIXES = ("hf:", "https://huggingface.co/", "huggingface.co/", "hf.co/")
"""What may stand in front of a name; Ollama writes hf.co/."""
_REPO = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "LLAMA_OFFLINE", "LLAMA_ARG_OFFLINE")
_YES = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class Wanted:
    """A model that was named on Hugging Face.

    repo: USER/REPO; quant: a quantisation, empty for the usual one; file: a name in the
    repository, empty for the one of `quant`.
    """

    repo: str
    quant: str = ""
    file: str = ""

    def __str__(self) -> str:
        return self.repo + (f"/{self.file}" if self.file else f":{self.quant}" * bool(self.quant))

    def files(self, there: Sequence[str]) -> list[str]:
        """The names of the model's files among those of the repository, all parts.

        Raises BadInput if there is none, with those that there are.
        """
        names = sorted(name for name in there if is_safe(name) and quants.is_model(name))
        first = self.file if self.file in names else None
        if not self.file:
            first = quants.best(names, self.quant)
        if first is None:
            raise BadInput(f"{self.repo} has no {self._missing()}; {_choice(names)}")
        part = quants.split_of(first)
        parts = part.names if part else [first]
        lost = [name for name in parts if name not in names]
        if lost:
            raise BadInput(f"{self.repo} lacks {lost[0]}, a part of the model; take another one")
        return parts

    def _missing(self) -> str:
        return f"file {self.file}" if self.file else f"GGUF file of {self.quant or 'a model'}"


def wanted(name: str) -> Wanted:
    """What a name means, with or without one of PREFIXES.

    Raises BadInput for what is no name.
    """
    rest = name
    for prefix in PREFIXES:
        rest = rest.removeprefix(prefix)
    user, _, rest = rest.partition("/")
    repo, _, file = rest.partition("/")
    repo, _, quant = repo.partition(":")
    full = f"{user}/{repo}"
    safe = is_safe(file) and not quant if file else re.fullmatch(r"[\w.-]*", quant)
    if not _REPO.fullmatch(full) or ".." in full or "--" in full or not safe:
        what = f"'{name}' is no name of Hugging Face's; write USER/REPO or USER/REPO:QUANT"
        if "/" not in name:
            what += f"; 'ollama pull {name}' gets one of Ollama's, which is found here"
        raise BadInput(what)
    return Wanted(full, quant, file)


def is_safe(name: str) -> bool:
    """Whether a file's name in a repository stays below a folder, whatever it says."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts)


def is_offline() -> bool:
    """Whether the environment forbids downloads, in Hugging Face's or llama.cpp's words."""
    return any(os.environ.get(name, "").upper() in _YES for name in _OFFLINE)


def _choice(names: Sequence[str]) -> str:
    """What to take instead."""
    firsts = [one for one in names if (part := quants.split_of(one)) is None or part.number == 1]
    tags = list(dict.fromkeys(filter(None, map(quants.tag, firsts)))) or firsts
    if not tags:
        return "take a repository with GGUF files: their names often end with -GGUF"
    return f"there are {', '.join(tags[:12])}{' and others' if len(tags) > 12 else ''}"
