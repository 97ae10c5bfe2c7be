"""A conversation beside the one in a context."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any

import numpy as np

from edgekv.native.bindings import lib


class Place:
    """A place beside a context's store for one conversation, empty at first.

    Raises EdgeKVError if there is no memory for it.
    """

    def __init__(self, ctx: Any) -> None:
        self._place = lib.edgekv_parked_new(ctx)
        # not at the end of Python, where a model that was not closed may still want it
        weakref.finalize(self, lib.edgekv_parked_free, self._place).atexit = False

    def swap(self, ctx: Any) -> None:
        """The conversation in the context and the one here change places; no row is copied.

        Raises EdgeKVError while a prompt is being read, in another context, or without memory.
        """
        lib.edgekv_parked_swap(ctx, self._place)

    @staticmethod
    def step(ctx: Any, places: Sequence[Place | None], tokens: Sequence[int]) -> None:
        """Evaluate one token of each of several conversations in one pass: of those in the places,
        and of the one in the context for None. They stay where they are. Logits of token i have the
        index i.

        The context was made for so many sequences (n_seq_max, kv_unified). With recurrent layers
        the one in the context comes first. Raises EdgeKVError where that cannot be: all are as
        before then, or lost where recurrent layers had gone on already.
        """
        there = [None if place is None else place._place for place in places]
        n, given = len(there), np.array(tokens, np.int32)
        lib.edgekv_step_several(ctx, n, (c_void_p * n)(*there), given)

    @property
    def n_bytes(self) -> int:
        """Bytes that the conversation here takes."""
        return int(lib.edgekv_parked_bytes(self._place))

    @property
    def n_bytes_archive(self) -> int:
        """Of the file of its archive."""
        return int(lib.edgekv_parked_archive_bytes(self._place))
