"""Sizes as people write them: 2GiB, 512MiB, 2G, 1.5GB or plain bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from edgekv.errors import BadInput

MIB = 1024 * 1024
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str | int, what: str = "size") -> int:
    """Bytes. K, M, G, T and KiB, MiB, GiB, TiB count in 1024; KB, MB, GB, TB in 1000.

    what: the name in the message. Raises BadInput for what is no size, or none above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B)?\s*", str(text), re.IGNORECASE)
    if match:
        number, unit, suffix = match.groups()
        base = 1000 if unit and (suffix or "").upper() == "B" else 1024
        if (suffix or "").upper() != "IB" or unit:
            n_bytes = int(Fraction(number) * base ** _UNITS[unit.upper()])
            if n_bytes > 0:
                return n_bytes
    raise BadInput(
        f"{what} '{text}' is no size above 0; write it like 2GiB, 512MiB, 2G or in bytes"
    )


def size_text(n_bytes: float) -> str:
    """With the unit that leaves a readable number: 2.00 GiB, 512.0 MiB."""
    for unit, digits in (("GiB", 2), ("MiB", 1), ("KiB", 1)):
        scale = 1024 ** _UNITS[unit[0]]
        if abs(n_bytes) >= scale:
            return f"{n_bytes / scale:,.{digits}f} {unit}"
    return f"{n_bytes:,.0f} bytes"


def mib(n_bytes: float) -> str:
    """A number of MiB, without the unit."""
    return f"{n_bytes / MIB:,.1f}"


def percent(part: float, whole: float) -> str:
    """A share in whole percent; 'all' of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "all"


def share(n_bytes: float, n_bytes_full: float) -> str:
    """Bytes beside those of a full f16 cache: '20 %: 66.0 of 331.0 MiB'."""
    return f"{percent(n_bytes, n_bytes_full)}: {mib(n_bytes)} of {mib(n_bytes_full)} MiB"
