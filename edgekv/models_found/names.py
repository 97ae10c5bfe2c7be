"""What a model's name means: a path, 'hf:USER/REPO', 'ollama:NAME', or a name found on this
computer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches

from edgekv.demo import demo_path
from edgekv.errors import BadInput
from edgekv.models_found import ollama
from edgekv.models_found.found import Found
from edgekv.models_found.stores import everything

SHOWN_MAX = 6


def path_of(name: str) -> str:
    """The file of the model of this name. A name that begins with 'hf:' is one of Hugging Face's
    cache. Nothing is downloaded.

    Raises BadInput for a name that means no model, or several.
    """
    if name == "demo":
        return str(demo_path())
    if name.startswith("hf:"):
        return _usable(_by_name(name))
    if name.startswith("ollama:"):
        return _usable(_in_ollama(name))
    if _is_path(name):
        return name
    return _usable(_by_name(name))


def _is_path(name: str) -> bool:
    """Whether a name can only be a file's. An existing file goes before any name."""
    begins = name.startswith((".", "~", os.sep)) or os.path.isabs(name)
    return os.path.exists(name) or begins or name.lower().endswith(".gguf") or "\0" in name


def _usable(found: Found) -> str:
    """The model's file. Raises BadInput if it cannot be used."""
    if found.why_not:
        raise BadInput(f"{found.name} cannot be used: {found.why_not}")
    return found.path


def _in_ollama(name: str) -> Found:
    found = ollama.named(name.removeprefix("ollama:"))
    if found is not None:
        return found
    there = list(ollama.find())
    more = nearest(name, there) or "give the path of a GGUF file"
    raise BadInput(f"Ollama has no model '{name.removeprefix('ollama:')}' here; {more}")


def _by_name(name: str) -> Found:
    there = list(everything())
    found = matches(name, there)
    if len(found) == 1:
        return found[0]
    if found:
        names = sorted(one.name for one in found)
        more = f", and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
        raise BadInput(
            f"'{name}' means several models; give one of: {', '.join(names[:SHOWN_MAX])}{more}"
        )
    more = nearest(name, there) or "give the path of a GGUF file"
    raise BadInput(f"there is no file and no model '{name}'; {more}")


def matches(name: str, there: Iterable[Found]) -> list[Found]:
    """The models that a name means, each file once: those that it fits most exactly."""
    wanted, models = _plain(name), list(there)
    for rank in range(3):
        fits = [one for one in models if wanted in map(_plain, one.names()[rank])]
        usable = [one for one in fits if not one.why_not] or fits
        if usable:
            return list({os.path.realpath(one.path): one for one in reversed(usable)}.values())
    return []


def nearest(name: str, there: Iterable[Found]) -> str:
    """'did you mean ...' with the names that are most like it; empty if none is."""
    by_spelling: dict[str, str] = {}
    for one in there:
        for spelling in [x for names in one.names() for x in names]:
            by_spelling.setdefault(_plain(spelling), one.name)
    close = get_close_matches(_plain(name), by_spelling, n=SHOWN_MAX, cutoff=0.5)
    wanted = _plain(name).partition(":")[2] or _plain(name)
    close += [spelling for spelling in by_spelling if len(wanted) > 2 and wanted in spelling]
    names = list(dict.fromkeys(by_spelling[spelling] for spelling in close))[:3]
    return f"did you mean {' or '.join(names)}?" if names else ""


def _plain(name: str) -> str:
    """A name as it is compared: without the ending, and in small letters."""
    return name.casefold().removesuffix(".gguf")
