#pragma once
// Kernels of ours on a device, found by name in the backend that owns the memory: this library does not link to it.

#include "edgekv-store.h"
#include "cuda/edgekv-cuda.h"

struct edgekv_device {
    decltype(edgekv_cuda_attend_supports)  * attend_supports;
    decltype(edgekv_cuda_score_workspace)  * score_workspace;
    decltype(edgekv_cuda_score)            * score;
    decltype(edgekv_cuda_gather)           * gather;
    decltype(edgekv_cuda_wait)             * wait;

    static const edgekv_device * of(ggml_backend_buffer_type_t buft); // null: none, as for main memory

    // rows src + index[0..n) of one tensor, or rows [src, src + n) without an index, to rows [dst, ..) of another; throws std::runtime_error
    void move_rows(const ggml_tensor * from, const int32_t * index, int64_t src, ggml_tensor * to, int64_t dst, int n) const;
    // as on the CPU; only rows.k lies on the device. work: memory there, made larger when needed. throws std::runtime_error, std::bad_alloc
    void score_columns(ggml_backend_buffer_type_t buft, edgekv_matrix & work, edgekv_rows rows, edgekv_queries qs, edgekv_columns cols) const;

private:
    void check(int error, const char * what) const;
};
