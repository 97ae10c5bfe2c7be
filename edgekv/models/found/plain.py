"""Programs whose models are files in plain folders. None of the folders need exist."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from edgekv.models.found import folder, places
from edgekv.models.found.found import Found


@dataclass(frozen=True)
class Plain:
    """The store of one program. folders: where it keeps models, now and before; end: of a path that
    is no part of a model's name.
    """

    NAME: str
    folders: Callable[[], list[str]]
    end: str = ""

    def find(self) -> Iterator[Found]:
        for one in folder.find(self.NAME, self.folders()):
            yield replace(one, name=one.name.removesuffix(self.end))


def _of_gpt4all() -> list[str]:
    """Of its window, and of its Python package."""
    return [os.path.join(places.data(), "nomic.ai", "GPT4All"), places.home(".cache", "gpt4all")]


def _of_lm_studio() -> list[str]:
    return [places.home(".lmstudio", "models"), places.home(".cache", "lm-studio", "models")]


def _of_jan() -> list[str]:
    roots = [os.path.join(x, "Jan", "data") for x in (places.data(), places.settings())]
    inner = (["llamacpp", "models"], ["models"])
    return [os.path.join(root, *x) for root in (*roots, places.home("jan")) for x in inner]


gpt4all = Plain("gpt4all", _of_gpt4all)
lm_studio = Plain("lmstudio", _of_lm_studio)
jan = Plain("jan", _of_jan, "/model")
