"""What stores have in common that are plain folders of GGUF files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from edgekv.models.found import quants
from edgekv.models.found.files import gguf_files
from edgekv.models.found.found import Found


def find(source: str, roots: Iterable[str]) -> Iterator[Found]:
    """The models of the folders, named 'source:FOLDERS/FILE' without the ending."""
    for root in dict.fromkeys(roots):
        for file in gguf_files(root):
            if quants.is_model(file.name):
                yield Found(f"{source}:{quants.stem(file.name)}", file.path, (), file.why_not)
