"""Every option of the compressed cache, once: name, default, unit, help, and what it accepts.

`Llama` takes an option as kv_NAME and the command line as --kv-NAME, with EDGEKV_KV_NAME in the
environment. A new option is one field of `KVConfig`; `python -m edgekv_lab.commands.docs` writes
what else says its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from numbers import Integral
from typing import Any

from edgekv.base.defaults import MIN_TOKENS, SINK, TAIL, WINDOW
from edgekv.errors import BadInput

AUTO = "auto"
HIDDEN = ("auto", "f32", "f16", "disk", "device", "whole")
MOST = 2**31 - 1
"""The largest number of tokens that llama.cpp can count."""

Check = Callable[[Any, str], Any]
"""(value from Python or the command line, its name in messages) -> value; raises BadInput."""


@dataclass(frozen=True)
class Option:
    """What is said of an option besides its name and default."""

    help: str
    check: Check
    metavar: str = ""
    choices: tuple[str, ...] = ()
    is_python_only: bool = False
    takes: str = ""
    """The type of the argument, if the check takes more than the field has."""


def option_of(config_field: Field[Any]) -> Option:
    """Return what a field of `KVConfig` says of its option."""
    return config_field.metadata["option"]


def argument_type(config_field: Field[Any]) -> str:
    """The type that `Llama` takes for a field, as it is written in Python."""
    return option_of(config_field).takes or str(config_field.type)


def _option(default: Any, check: Check, help: str, metavar: str = "", **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(help, check, metavar, **more)})


# ---- checks


def _ratio(value: Any, name: str) -> float:
    from edgekv.methods.budget import check_ratio

    return check_ratio(value)


def _whole(least: int) -> Check:
    """A whole number from `least` to MOST, which the command line may give as text."""

    def check(value: Any, name: str) -> int:
        number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        if not isinstance(number, Integral) or isinstance(number, bool) or int(number) < least:
            raise BadInput(f"{name} {value} must be a whole number, {least} or more")
        if int(number) > MOST:
            raise BadInput(f"{name} {value} is too large; give at most {MOST:,}")
        return int(number)

    return check


def _budget(value: Any, name: str) -> Any:
    if value is None:
        return None
    if hasattr(value, "__len__") and not isinstance(value, str):
        from edgekv.methods.budget import table

        return table(value)
    try:
        return _whole(1)(value, name)
    except BadInput:
        raise BadInput(
            f"{name} {value} keeps no token; give the tokens per head, such as 1024"
        ) from None


def _number(value: Any) -> float:
    """NaN, which is in no range, for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _mebibytes(value: Any, name: str) -> float | None:
    if value is None:
        return None
    number = _number(value)
    if not 0 < number < 2**40:
        raise BadInput(f"{name} {value} is no size; give MiB above 0")
    return number


def _size(value: Any, name: str) -> int | None:
    from edgekv.base.sizes import parse_size

    return None if value is None else parse_size(value, name)


def _method(value: Any, name: str) -> str:
    from edgekv.methods import get

    return "auto" if value == "auto" else get(str(value)).name


def _one_of(*choices: str) -> Check:
    def check(value: Any, name: str) -> str:
        if value not in choices:
            raise BadInput(f"{name} '{value}' is unknown; choose one of: {', '.join(choices)}")
        return str(value)

    return check


def _path(value: Any, name: str) -> str | None:
    return None if value is None else str(value)


def _share(value: Any, name: str) -> float:
    number = _number(value)
    if not 0 <= number < 1:
        raise BadInput(f"{name} {value} is no share; give a number from 0 up to 1")
    return number


def _recall(value: Any, name: str) -> float | str:
    return AUTO if value == AUTO else _share(value, name)


def _archive(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadInput(f"{name} {value} must be 'off', 'temporary' or a folder")
    return value


def _switch(value: Any, name: str) -> bool:
    return bool(value)


# ---- the options


@dataclass(frozen=True, eq=False)
class KVConfig:
    """What stays of the KV cache. The fields are `Llama`'s arguments without their kv_.

    They mean what the options --kv-... of the command line mean (docs/cli.md). Of ratio, budget,
    budget_mb and memory the one that leaves least counts; at their defaults nothing is compressed.
    Values are checked. Raises BadInput, one line that says what to give.
    """

    ratio: float = _option(
        1.0,
        _ratio,
        metavar="R",
        help=(
            "Share of the full f16 cache's bytes to keep: 0.2 keeps 20 %, 1 everything. Cache types"
            " (-ctk, -ctv) decide how many tokens that is."
        ),
    )
    budget: Any = _option(
        None, _budget, metavar="N", help="Tokens to keep, the mean over layers and KV heads."
    )
    """In Python also a table of tokens [n_layer, n_head_kv]."""
    budget_mb: float | None = _option(
        None,
        _mebibytes,
        metavar="MIB",
        help="MiB for the kept tokens of a prompt; new tokens come on top.",
    )
    memory: int | None = _option(
        None,
        _size,
        takes="int | str | None",
        metavar="SIZE",
        help=(
            "Memory that the KV cache never exceeds between prompts, such as 2GiB; each prompt's"
            " ratio follows from it. 'edgekv fit' says what comes on top while a prompt is read."
        ),
    )
    method: str = _option(
        "auto",
        _method,
        metavar="NAME",
        help=(
            "Method that decides which tokens stay; 'edgekv methods' lists them. auto: what came "
            "nearest to the full cache when the model was prepared."
        ),
    )
    profile: str | None = _option(
        None,
        _path,
        metavar="FILE",
        help=(
            "Profile with budgets per KV head; 'none' uses no profile. Without it edgekv looks "
            "for one."
        ),
    )
    sink: int = _option(SINK, _whole(0), metavar="N", help="First tokens that always stay.")
    window: int = _option(
        WINDOW,
        _whole(1),
        metavar="N",
        help=(
            "Last tokens that always stay, and whose attention is observed; kvzap-summary lets up "
            "to 96 stay."
        ),
    )
    min_tokens: int = _option(
        MIN_TOKENS, _whole(1), metavar="N", help="A ratio never keeps fewer tokens."
    )
    hidden: str = _option(
        "auto",
        _one_of(*HIDDEN),
        choices=HIDDEN,
        help=(
            "Where hidden states wait between layers while a prompt is read: in main memory (f32, "
            "f16), in a file (disk) or on the GPU (device). whole: nowhere, all layers are read at "
            "once. auto: device where it has room, else f32, or what saves a tenth of the cache."
        ),
    )
    tail: int = _option(
        TAIL,
        _whole(1),
        metavar="N",
        help=(
            "New tokens that wait before they are compressed; with --kv-memory alone more, as long"
            " as there is room."
        ),
    )
    prefill_memory: int | None = _option(
        None,
        _size,
        takes="int | str | None",
        metavar="SIZE",
        help=(
            "Memory for products with weights while a prompt is read, such as 64MiB; with too"
            " little llama.cpp's slower ones read it. Without it as much as keeps the peak below a"
            " full f16 cache."
        ),
    )
    fast_prefill: bool = _option(
        False,
        _switch,
        help=(
            "Read prompts layer by layer where nothing is compressed, too: faster on a CPU, and"
            " logits are not bit for bit llama.cpp's."
        ),
    )
    checkpoints: bool = _option(
        True,
        _switch,
        help=(
            "Keep the state from before the last turn, from which an answer is written again"
            " without reading the prompt."
        ),
    )
    archive: str = _option(
        "off",
        _archive,
        metavar="FOLDER",
        help=(
            "Keep K and V of all tokens in a file in this folder ('temporary': the cache folder;"
            " 'off': only if --kv-recall needs it). Later prompts are read behind all of them."
        ),
    )
    recall: Any = _option(
        0.0,
        _recall,
        takes="float | str",
        metavar="R",
        help=(
            "Share of the tokens that each new token looks up in the archive, such as 0.05, besides"
            " those in memory. The index for that counts as a part of the cache. auto: 0.05 where"
            " answers came nearer with it when the model was prepared, else 0; on a GPU 0."
        ),
    )
    """A share, or 'auto'."""
    seed: int = _option(
        0, _whole(0), metavar="N", is_python_only=True, help="Seed of the method 'random'."
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value = option_of(one).check(getattr(self, one.name), f"kv_{one.name}")
            object.__setattr__(self, one.name, value)
        if self.memory is not None and self.table is not None:
            raise BadInput(
                "kv_memory decides how many tokens stay, and so does a table in "
                "kv_budget: give one of them"
            )

    @property
    def table(self) -> Any:
        """The table in `budget`, int32 [n_layer, n_head_kv]; None if it is no table."""
        return None if isinstance(self.budget, (int, type(None))) else self.budget

    @property
    def compresses(self) -> bool:
        """Whether something is to be evicted, unless the method keeps all."""
        limits = (self.budget, self.budget_mb, self.memory)
        return self.ratio < 1 or any(x is not None for x in limits)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The arguments of `Llama`: kv_ratio, kv_budget, ..."""
        return tuple(f"kv_{one.name}" for one in fields(cls))

    def arguments(self) -> dict[str, Any]:
        """Return the same as keyword arguments of `Llama`."""
        return {f"kv_{one.name}": getattr(self, one.name) for one in fields(self)}
