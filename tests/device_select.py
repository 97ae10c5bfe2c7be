"""The CUDA kernel that selects rows beside edgekv/select.py, in a process of its own: the test device brings its own copy of ggml.

`python -m tests.device_select fake-device.so` ends with an error where they differ.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from edgekv.select import _top

ODD = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1, 1, -1], np.float32)
"""Zeros of both signs and numbers that arithmetic may take for zero, among equal ones."""


def select(lib: ctypes.CDLL, scores: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Rows that the kernel chooses, [n_head, n_rows], -1 behind the last of a head. scores [n_head, n_rows]; lengths, counts [n_head]."""
    n_head, n_rows = scores.shape
    out = np.full((n_head, n_rows), -1, np.int32)
    lib.edgekv_cuda_select_workspace.restype = ctypes.c_size_t
    work = np.empty(lib.edgekv_cuda_select_workspace(n_head, n_rows), np.uint8)
    at = [x.ctypes.data_as(ctypes.c_void_p) for x in (scores, lengths, counts, out, work)]
    assert lib.edgekv_cuda_select(at[0], ctypes.c_int64(n_rows), at[1], at[2], n_head, n_rows, at[3], ctypes.c_int64(n_rows), at[4], None) == 0
    return out


def main() -> None:
    lib = ctypes.CDLL(sys.argv[1])
    for seed in range(30):
        rng = np.random.default_rng(seed)
        n_head, n_rows = rng.integers(1, 4), rng.integers(1, 900)
        scores = np.where(rng.random((n_head, n_rows)) < 0.5, rng.choice(ODD, (n_head, n_rows)), rng.normal(size=(n_head, n_rows))).astype(np.float32)
        lengths, counts = (rng.integers(0, n_rows + 1, n_head).astype(np.int32) for _ in range(2))
        got = select(lib, scores, lengths, counts)
        for k in range(n_head):
            expected = _top(scores[k, : lengths[k]], counts[k])
            assert np.array_equal(got[k, : len(expected)], expected), f"seed {seed}, head {k}"
            assert (got[k, len(expected) :] == -1).all()


if __name__ == "__main__":
    main()
