"""The table in docs/devices.md of cache types and head sizes that there are kernels for, made from
what the native test programs say.

python -m tests.support_table      writes it into the page; the programs as in test_native.py
"""

from __future__ import annotations

import re

from tests.build import run
from tests.lib import ROOT
from tests.test_native import program

PROGRAMS = {"CPU": "test-kernels", "CUDA": "test-cuda", "Metal": "test-metal"}
NOT_FOR_USERS = "f32"
"""A type that the CPU kernels know and no cache has."""


def make() -> str:
    sizes = {backend: dict(of_program(name)) for backend, name in PROGRAMS.items()}
    kinds: dict[tuple[str, ...], list[str]] = {}  # those with the same sizes everywhere
    for kind in sizes["CPU"]:
        if kind != NOT_FOR_USERS:
            kinds.setdefault(tuple(of.get(kind, "no") for of in sizes.values()), []).append(kind)
    rows = [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in kinds.items()]
    return "\n".join(
        ["| cache types | " + " | ".join(sizes) + " |", "|---" * (len(sizes) + 1) + "|", *rows]
    )


def of_program(name: str) -> list[tuple[str, str]]:
    """(cache type, head sizes in words) of each line."""
    lines = [line.split("\t") for line in run(program(name), "--support").splitlines()]
    return [(kind, words(*map(int, numbers))) for kind, *numbers in lines]


def words(first: int, last: int, step: int) -> str:
    return f"{first} to {last}" if step == 1 else f"multiples of {step}, up to {last}"


PAGE = ROOT / "docs" / "devices.md"


def updated(text: str) -> str:
    """`text` of the page with its table made anew: the one behind its heading."""
    return re.sub(
        r"(## Kernels\n.*?\n\n)\|.*?\|\n\n",
        lambda found: f"{found[1]}{make()}\n\n",
        text,
        count=1,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
