"""What a model's name means: a path, 'hf:USER/REPO', 'ollama:NAME', or a name found on this
computer. Only a name that begins with 'hf:', or with Hugging Face's address, is ever downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from edgekv.errors import BadInput
from edgekv.model.header import files_of
from edgekv.models.demo import demo_path
from edgekv.models.found import ollama
from edgekv.models.found.found import Found
from edgekv.models.found.stores import everything
from edgekv.models.hub.models import download
from edgekv.models.hub.wanted import PREFIXES, is_offline, wanted

SHOWN_MAX = 6


def path_of(name: str, tell: Callable[[str], object] = len) -> str:
    """The file of the model of this name. One that begins with 'hf:' is downloaded if it is not
    on this computer, unless the environment forbids it.

    tell: called with a line before a download. Raises BadInput for a name that means no model, or
    several.
    """
    if name == "demo":
        return str(demo_path())
    if name.startswith("hf:") or _is_address(name):
        return _of_hugging_face(name, tell)
    if name.startswith("ollama:"):
        return _usable(_in_ollama(name))
    if not _is_path(name):
        return _usable(_by_name(name))
    # GPT4All and others call their models as their files are called
    is_name = not os.path.exists(name) and not _begins_path(name) and matches(name, everything())
    return _usable(_by_name(name)) if is_name else name


def check(name: str) -> None:
    """Raises BadInput for a name that means no model here, unless it might be downloaded."""
    if not name.startswith("hf:") and not _is_address(name):
        path = path_of(name)
        if not os.path.exists(path):
            raise BadInput(f"there is no file {path}; 'edgekv models' lists what is here")


def _is_address(name: str) -> bool:
    """Whether a name is an address on Hugging Face, as Ollama takes it, and means nothing here."""
    is_address = name.startswith(PREFIXES[1:]) and not os.path.exists(name)
    return is_address and not matches(name, everything())


def _of_hugging_face(name: str, tell: Callable[[str], object]) -> str:
    """The model's file; fetched where no whole one is here."""
    name = f"hf:{wanted(name)}" if _is_address(name) else name
    here = matches(name, everything())
    whole = [
        one for one in here if not one.why_not and all(map(os.path.isfile, files_of(one.path)))
    ]
    if is_offline() or len(whole) > 1:
        return _usable(_by_name(name))
    return whole[0].path if whole else download(name, tell)


def _is_path(name: str) -> bool:
    """Whether a name looks like a file's. An existing file goes before any name."""
    return os.path.exists(name) or _begins_path(name) or name.lower().endswith(".gguf")


def _begins_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or os.path.isabs(name) or "\0" in name


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
    more = nearest(name, there) or _to_do(name)
    raise BadInput(f"there is no file and no model '{name}'; {more}")


def _to_do(name: str) -> str:
    """What helps where no name is like this one."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name):
        return f"'edgekv pull {name}' downloads it from Hugging Face if it is there"
    return "give the path of a GGUF file; 'edgekv models' lists what is here"


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
