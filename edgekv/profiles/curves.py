"""Published LU-KV curves: `.npy`, float [99, n_layer, n_head_kv], the share that each head *loses*
when 0.01 .. 0.99 of all rows go.
"""

from __future__ import annotations

import numpy as np

from edgekv.base import files
from edgekv.errors import BadInput
from edgekv.model.header import open_regular
from edgekv.model.identity import Identity
from edgekv.profiles.file import Profile

N_CURVE = 99
IS_CURVE = files.begins_with(b"\x93NUMPY")
REMOVED = np.arange(1, N_CURVE + 1) / (N_CURVE + 1)
_LEAST = 0.01
"""What every head keeps, as in the paper; files with less would take heads out altogether."""


def read_curve(path: str, model: Identity, score: str = "", command: str = "") -> Profile:
    """The profile that a curve file holds for `model`.

    Raises BadInput if it is no such file or does not have the model's shape.
    """
    try:
        open_regular(path).close()
        removed = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror or 'no .npy file'}); name a .npy file"
        ) from None
    except (ValueError, EOFError, OverflowError, SyntaxError, MemoryError, RecursionError):
        raise BadInput(f"{path} is no .npy file, or it is damaged") from None
    expected = N_CURVE, model.n_layer, max(model.n_head_kv)
    if getattr(removed, "shape", None) != expected or removed.dtype.kind != "f":
        raise BadInput(
            f"{path} is no curve for this model: it needs numbers of shape"
            f" {' x '.join(map(str, expected))} (ratios x layers x KV heads)"
        )
    kept = 1 - np.asarray(removed, np.float64)[::-1]
    if not ((kept >= 0) & (kept <= 1)).all():
        raise BadInput(f"{path} is no curve: not all of its shares lie between 0 and 1")
    exists = np.arange(expected[2]) < np.asarray(model.n_head_kv)[:, None]
    shares = np.where(exists, np.maximum(kept, _LEAST), 0).astype(np.float32)
    return Profile(
        model,
        "imported",
        tuple(round(float(r), 6) for r in 1 - REMOVED[::-1]),
        shares,
        score,
        command=command,
    )


def write_curve(profile: Profile, path: str) -> None:
    """Write a profile as such a file, float32.

    Raises BadInput if that cannot be written, or if anything but a .npy file is there.
    """
    removed = np.stack([1 - profile.shares_at(1 - r) for r in REMOVED]).astype(np.float32)
    with files.replaced(path, IS_CURVE, ".npy file") as f:
        np.save(f, removed)
