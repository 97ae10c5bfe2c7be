"""Summary rows of one head, made natively: `edgekv.methods.centroid_merge` says what they are."""

from __future__ import annotations

from ctypes import byref, c_int32

import numpy as np
from numpy.typing import NDArray

from edgekv.native.bindings import CCentroidParams, CLost, f32, lib


def centroids(
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    kept: tuple[NDArray[np.float32], NDArray[np.float32]],
    queries: NDArray[np.float32],
    each: tuple[float, float],
    params: dict[str, float],
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]:
    """Keys [m, d_k] and values [m, d_v] that stand for the rows keys [n, d_k], values [n, d_v] of a
    head that keeps the keys and values kept [n_kept, d_k] and [n_kept, d_v], for queries
    [n_queries, d_k]; and the group [n] of each row. Its threads leave the interpreter alone; how
    many they are changes no result.

    each: how many rows each of `keys`, of `kept` stands for; params: the fields of the C structure.
    Raises BadInput if there are no rows.
    """
    keys, values, kept_keys, kept_values, queries = (
        np.ascontiguousarray(x, np.float32) for x in (keys, values, *kept, queries)
    )
    (n, d_k), d_v = keys.shape, values.shape[1]
    assert len(values) == n and kept_keys.shape[1] == queries.shape[1] == d_k
    assert kept_values.shape == (len(kept_keys), d_v)
    n_groups = min(int(params["n_groups"]), n)
    found_keys = np.empty((n_groups, d_k), np.float32)
    found_values = np.empty((n_groups, d_v), np.float32)
    label, n_found = np.empty(n, np.int32), c_int32()
    rows = [f32(x) for x in (keys, values, kept_keys, kept_values, queries)]
    lost = CLost(*rows, n, len(kept_keys), len(queries), d_k, d_v, *each)
    how = CCentroidParams(**{**params, "n_groups": n_groups})
    lib.edgekv_centroids(lost, how, found_keys, found_values, byref(n_found), label)
    return found_keys[: n_found.value], found_values[: n_found.value], label
