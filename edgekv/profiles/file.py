"""A profile and its file: a small GGUF with `general.type = kvbudget`.

Keys `edgekv.profile.*` say for which model and score it is and how it was made; the tensor
`edgekv.profile.shares` has the kept shares. Written beside and renamed. A profile may come from
anywhere, so nothing that a file says is believed: it is read within limits, only the keys and types
below count, and its text is made safe to print.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.base import files
from edgekv.base.defaults import SINK, WINDOW
from edgekv.base.text import one_line
from edgekv.errors import BadInput
from edgekv.methods.kvzap import PAIRS, Surrogate, n_features
from edgekv.model.header import DAMAGE, Header, Tensor, open_regular
from edgekv.model.identity import Identity
from edgekv.profiles import winners
from edgekv.profiles.winners import Winners
from edgekv.version import __version__

KINDS = ("probe", "lukv", "evolkv", "imported")
TYPE, FORMAT = "kvbudget", 1
IS_PROFILE = files.contains(TYPE.encode())
_KEY = "edgekv.profile."
_TENSOR, _MAPS = _KEY + "shares", _KEY + "surrogate"
_MAX_BYTES = 1 << 24
"""80 layers of 8 KV heads with maps take 0.6 MiB. The most that a published model takes are 9 MiB,
for 7,840 KV heads (BLOOM-176B), so a larger file is something else."""
_MAX_ROWS = 1 << 24
_MAX_TEXT = 4000
_F32 = 0  # ggml's type number


@dataclass(frozen=True, eq=False)
class Profile:
    """Which share of its rows each KV head keeps, for a grid of global ratios.

    shares: float32 [n_ratio, n_layer, n_head_kv], 0..1; a head that is 0 everywhere takes no part
    (it does not exist, or its layer keeps a sliding window). ratios: rising, above 0 and below 1,
    or 1 itself. Raises BadInput if these do not fit together or do not fit the model.
    """

    model: Identity
    kind: str
    """How it was made, one of KINDS."""
    ratios: tuple[float, ...]
    shares: NDArray[np.float32]
    score: str = ""
    """The score that it was made for; empty if it serves any."""
    window: int = WINDOW
    sink: int = SINK
    calibration: str = ""
    """SHA-256 (hex) of the texts it was made from; empty if unknown."""
    command: str = ""
    """The command line that made it, without folders."""
    made_by: str = field(default=f"edgekv {__version__}")
    seed: int | None = None
    """Seed of what was drawn while the profile was made; None if nothing was."""
    surrogate: Surrogate | None = None
    """What the score kvzap needs; None if it was not made."""
    contest: Winners | None = None
    """What came nearest to the full cache; None if no contest was held."""
    path: str = ""
    """The file that it was found in; empty if it is not in one."""

    def __post_init__(self) -> None:
        wrong = _wrong(self)
        if wrong:
            raise BadInput(f"the profile is damaged: {wrong}; make it again with 'edgekv profile'")

    @property
    def heads(self) -> NDArray[np.bool_]:
        """bool [n_layer, n_head_kv]: the heads that take part."""
        return np.asarray((self.shares > 0).any(axis=0))

    def shares_at(self, ratio: float) -> NDArray[np.float64]:
        """float64 [n_layer, n_head_kv]: kept shares for one global ratio, 0 < ratio <= 1.

        Linear between the grid's ratios (0 keeps nothing, 1 everything), then scaled, none above 1,
        so that the mean over the heads that take part is `ratio`.
        """
        assert 0 < ratio <= 1
        heads = self.heads
        grid = np.concatenate([[0.0], self.ratios, [1.0]])
        table = np.concatenate(
            [np.zeros((1, heads.sum())), self.shares[:, heads], np.ones((1, heads.sum()))]
        )
        i = min(int(np.searchsorted(grid, ratio)), len(grid) - 1)
        part = (ratio - grid[i - 1]) / (grid[i] - grid[i - 1])
        out = np.zeros(heads.shape)
        out[heads] = scale(table[i - 1] * (1 - part) + table[i] * part, ratio)
        return out

    def check(
        self, model: Identity, score: str = "", name: str = "the profile", kind: str = ""
    ) -> None:
        """Raises BadInput unless it is of `model`, for `score` and of `kind` (empty: any)."""
        difference = model.difference(self.model)
        if difference:
            raise BadInput(
                f"{name} belongs to another model ({difference}); make one with 'edgekv profile"
                " probe -m MODEL -o FILE'"
            )
        if score and self.score and score != self.score:
            raise BadInput(
                f"{name} was made for the score '{self.score}', not for '{score}'; use that score"
                " or another profile"
            )
        if kind and kind != self.kind:
            raise BadInput(
                f"{name} is a profile of the kind '{self.kind}', not '{kind}'; make one with"
                f" 'edgekv profile {kind}', or write budget=profile"
            )


def scale(shares: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    """`shares` [n] times the factor that brings the mean, values above 1 cut to 1, to `mean`."""
    falling = np.sort(np.maximum(shares, 1e-9))[::-1]
    rest = np.cumsum(falling[::-1])[::-1]  # rest[i]: sum of all but the i largest
    total = mean * len(shares)
    factors = (total - np.arange(len(shares))) / rest  # if the i largest are cut to 1
    fits = np.flatnonzero(factors * falling <= 1)
    n_full = fits[0] if len(fits) else len(shares) - 1
    return np.minimum(np.maximum(shares, 1e-9) * factors[n_full], 1.0)


def _wrong(p: Profile) -> str | None:
    """What is wrong with a profile, None if nothing is."""
    shares, ratios = p.shares, np.asarray(p.ratios, np.float64)
    if p.score and not re.fullmatch(r"[\w-]{1,64}", p.score):
        return "the name of its score is none"
    if not (0 <= p.window <= _MAX_ROWS and 0 <= p.sink <= _MAX_ROWS):
        return "its window or its sink is out of range"
    if p.kind not in KINDS:
        return f"'{p.kind[:40]}' is no kind of profile"
    if (
        ratios.ndim != 1
        or not len(ratios)
        or not (
            np.isfinite(ratios).all()
            and ratios[0] > 0
            and ratios[-1] <= 1
            and (np.diff(ratios) > 0).all()
        )
    ):
        return "its ratios do not rise from above 0 to at most 1"
    expected = len(ratios), p.model.n_layer, max(p.model.n_head_kv, default=0)
    if shares.shape != expected:
        return (
            f"its table is {' x '.join(map(str, shares.shape))}, not"
            f" {' x '.join(map(str, expected))} (ratios x layers x KV heads)"
        )
    if not np.isfinite(shares).all() or shares.min(initial=0) < 0 or shares.max(initial=0) > 1:
        return "not all of its shares lie between 0 and 1"
    exists = np.arange(expected[2]) < np.asarray(p.model.n_head_kv)[:, None]
    if p.heads[~exists].any() or not p.heads.any():
        return "it gives tokens to heads that do not exist, or to none"
    maps = p.surrogate.weights if p.surrogate else None
    if maps is not None and (
        maps.shape != (*expected[1:], n_features(p.model.d_head_k, p.model.d_head_v) + 1)
        or not np.isfinite(maps).all()
    ):
        return "its maps do not fit the model"
    return None


# ---- files


def write(profile: Profile, path: str | os.PathLike[str], is_ours: bool = False) -> None:
    """Write `profile` to `path`, which is as before unless all went well.

    is_ours: whatever is there may go, because the place is edgekv's own.
    Raises BadInput if it cannot be written, or if anything but a profile is there.
    """
    data = _as_bytes(profile)
    with files.replaced(path, files.anything if is_ours else IS_PROFILE, "profile") as f:
        f.write(data)


def _as_bytes(profile: Profile) -> bytes:
    with tempfile.TemporaryDirectory() as folder:  # gguf writes to names only
        path = Path(folder) / "profile.gguf"
        _write(profile, path)
        return path.read_bytes()


def _write(profile: Profile, path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, TYPE)
    writer.add_type(TYPE)
    writer.add_name("KV budget profile")
    add: dict[type, Any] = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, (kind, value_of) in _OWN.items():
        if (value := value_of(profile)) not in ("", None):
            add[kind](_KEY + key, value)
    writer.add_tensor(_TENSOR, np.ascontiguousarray(profile.shares, np.float32))
    if profile.surrogate:
        writer.add_tensor(_MAPS, np.ascontiguousarray(profile.surrogate.weights, np.float32))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


_OWN: dict[str, tuple[type, Callable[[Profile], Any]]] = {
    "format": (int, lambda p: FORMAT),
    "model.architecture": (str, lambda p: p.model.arch),
    "model.n_layer": (int, lambda p: p.model.n_layer),
    "model.n_head_kv": (list, lambda p: list(p.model.n_head_kv)),
    "model.d_head_k": (int, lambda p: p.model.d_head_k),
    "model.d_head_v": (int, lambda p: p.model.d_head_v),
    "model.embedding_sha256": (str, lambda p: p.model.embedding),
    "model.attention_sha256": (str, lambda p: p.model.attention),
    "kind": (str, lambda p: p.kind),
    "score": (str, lambda p: p.score),
    "window": (int, lambda p: p.window),
    "sink": (int, lambda p: p.sink),
    "ratios": (list, lambda p: [float(r) for r in p.ratios]),
    "calibration_sha256": (str, lambda p: p.calibration),
    "command": (str, lambda p: one_line(p.command[:_MAX_TEXT])),
    "made_by": (str, lambda p: p.made_by),
    "seed": (int, lambda p: p.seed),
    "surrogate.pairs": (str, lambda p: p.surrogate.pairs if p.surrogate else ""),
    "contest": (str, lambda p: p.contest.text() if p.contest else ""),
}
"""Keys of a profile's own: the type of each, and its value; one that is empty is not written."""
_TYPES: dict[str, type] = {"general.type": str, "general.architecture": str, "general.name": str}
_TYPES |= {_KEY + name: kind for name, (kind, _) in _OWN.items()}
"""All that a profile may say."""


def read(path: str | os.PathLike[str]) -> Profile:
    """The profile in `path`. Raises BadInput, one line, for anything that is none or is damaged."""
    try:
        with open_regular(path) as f:
            data = f.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be read ({why}); name a kvbudget-*.gguf file") from None
    if data[:4] != b"GGUF" or len(data) > _MAX_BYTES:
        raise BadInput(f"{path} is no profile; name a kvbudget-*.gguf file")
    try:
        return _parse(data)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except DAMAGE:
        todo = "make it again with 'edgekv profile'"
        raise BadInput(f"{path} is a damaged profile; {todo}") from None


def _parse(data: bytes) -> Profile:
    """Raises BadInput, or one of DAMAGE."""
    header = Header(data)
    if header.meta.get("general.type") != TYPE:
        raise BadInput("this is a GGUF file, but no profile; name a kvbudget-*.gguf file")
    if header.meta.get(_KEY + "format") != FORMAT:
        raise BadInput(
            "the profile is of another edgekv version; make it again with 'edgekv profile'"
        )
    keys: dict[str, Any] = {}
    for name, value in header.meta.items():
        if type(value) is not _TYPES[name]:
            raise TypeError("another type of value")
        keys[name.removeprefix(_KEY)] = (
            one_line(value[:_MAX_TEXT]) if isinstance(value, str) else value
        )
    if header.tensors.keys() - {_TENSOR, _MAPS}:
        raise KeyError("a tensor that no profile has")
    shape = keys["model.n_layer"], tuple(keys["model.n_head_kv"])
    sizes = keys["model.d_head_k"], keys["model.d_head_v"]
    hashes = keys["model.embedding_sha256"], keys.get("model.attention_sha256", "")
    model = Identity(keys["model.architecture"], *shape, *sizes, *hashes)
    tensors = {name: _table(header, tensor) for name, tensor in header.tensors.items()}
    maps = tensors.get(_MAPS)
    surrogate = None
    if maps is not None:
        surrogate = Surrogate(maps, PAIRS[PAIRS.index(keys["surrogate.pairs"])])
    texts = {name: keys.get(name, "") for name in ("score", "command", "made_by")}
    contest = winners.parse(keys["contest"]) if "contest" in keys else None
    return Profile(
        model,
        keys["kind"],
        tuple(round(float(r), 6) for r in keys["ratios"]),
        tensors[_TENSOR],
        window=keys["window"],
        sink=keys["sink"],
        calibration=keys.get("calibration_sha256", ""),
        seed=keys.get("seed"),
        surrogate=surrogate,
        contest=contest,
        **texts,
    )


def _table(header: Header, tensor: Tensor) -> NDArray[np.float32]:
    """A tensor's values, in a copy. Raises ValueError if they are no f32 or missing."""
    n, begin = math.prod(tensor.dims), header.n_bytes + tensor.offset
    if tensor.kind != _F32 or begin + 4 * n > len(header.file):
        raise ValueError("no table of f32 within the file")
    return np.frombuffer(header.file, "<f4", n, begin).reshape(tensor.dims[::-1]).astype(np.float32)
