"""What edgekv.h says of a layer and of a store. Fields stand in the order of its structures."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerInfo:
    """Shape of one layer's cache; `bytes_row` is one K row and one V row of one KV head, with ALiBi
    a float more. A layer without attention has no KV head.
    """

    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    type_k: int
    type_v: int
    n_swa: int
    bytes_row: int
    reads: int = -1
    """The layer whose K and V it attends to, where layers share them; -1: not said, its own."""
    v_in_k: int = 0
    """1: V is the first d_v values of K (latent attention), and takes no bytes of its own."""
    has_basis: int = field(default=0, compare=False)
    """1: keys are scaled, and the mean of their bias is taken from them, before they are stored in
    a quantised type, which changes no softmax. `Store.rows` gives whole keys.
    """
    rounds_late: int = field(default=0, compare=False)
    """1: rows are f16 until they have to be rounded to the cache's types: while a prompt is read,
    and the newest behind it (`edgekv.memory.limit.RECENT`).
    """

    @property
    def selects(self) -> bool:
        """Whether entries of the layer are chosen: it attends, and to everything."""
        return self.n_head_kv > 0 and self.n_swa == 0

    @property
    def waits(self) -> bool:
        """Whether new entries wait in f16 before they are rounded. Those of windows do not."""
        return bool(self.rounds_late) and self.selects

    @property
    def stored(self) -> list[tuple[int, int]]:
        """Type and number of values of what an entry stores: K, and V unless it is part of K."""
        k, v = (self.type_k, self.d_k), (self.type_v, self.d_v)
        return [k] if self.v_in_k else [k, v]


@dataclass(frozen=True)
class MemoryInfo:
    """What the store holds, and what it takes.

    n_past: tokens that went in; boundary: where the recent buffer begins; bytes of the store now
    and at the peak; bytes of recurrent layers' state and of the copy that `Store.mark` made of it,
    and tokens in the copy (-1: there is none); of the archive its bytes, whether prompts are read
    behind it, whether the conversation can go back to any token, and whether it did; tokens that
    the next step may have so that rows are rounded behind the same ones as by steps of one; bytes
    that tokens looked up in the archive. See edgekv.h.
    """

    n_past: int
    boundary: int
    bytes_now: int
    bytes_peak: int
    bytes_recurrent: int
    bytes_mark: int
    n_mark: int
    bytes_archive: int = 0
    bytes_index: int = 0
    has_archive: int = 0
    can_go_back: int = 0
    went_back: int = 0
    n_alike: int = 0
    bytes_recalled: int = 0

    @property
    def fixed(self) -> int:
        """Tokens that cannot be taken back one by one."""
        return 0 if self.goes_anywhere else self.exact

    @property
    def goes_anywhere(self) -> bool:
        """Whether the conversation can go back to any token, by its archive."""
        return bool(self.can_go_back) and not self.bytes_recurrent

    @property
    def exact(self) -> int:
        """Tokens behind which the cache can be what it was; further back rows are others."""
        return self.n_past if self.bytes_recurrent else self.boundary
