#pragma once
// The host's side of the Metal kernels: their names, what goes into which buffer, and sizes of
// grids, threadgroup memory and workspaces. Plain functions of shapes, so that they run without
// Metal (native/tests/test-metal.cpp).

#include "edgekv-metal.h"
#include "cpu/edgekv-cpu.h"

#include "ggml.h"

#include <algorithm>

namespace edgekv_metal {

// what is queued: threadgroups of EDGEKV_METAL_THREADS threads; nothing where there are no groups
struct call {
    const char * kernel;
    // n_shared: bytes of threadgroup memory, a multiple of 16
    uint32_t groups_x, groups_y, n_shared;
};

// of a kernel that uses none: each names some, so that all begin alike
constexpr uint32_t NO_SHARED = 16;

// a kernel's buffers in order, behind its arguments in buffer 0
struct kernel_buffers {
    const char * kernel;
    size_t n_args;
    const char * buffers;
};

constexpr kernel_buffers KERNELS[] = {
    { "edgekv_attend_part_64", sizeof(edgekv_metal_attend),
        "k v first len pos q start after parts" },
    { "edgekv_attend_part_128", sizeof(edgekv_metal_attend),
        "k v first len pos q start after parts" },
    { "edgekv_attend_part_256", sizeof(edgekv_metal_attend),
        "k v first len pos q start after parts" },
    { "edgekv_attend_combine", sizeof(edgekv_metal_attend), "parts sinks recalled dst" },
    { "edgekv_score_norm", sizeof(edgekv_metal_score), "k_rows first len pos q start after norm" },
    { "edgekv_score_fold", sizeof(edgekv_metal_score), "norm sinks lse" },
    { "edgekv_score_columns", sizeof(edgekv_metal_score),
        "k_rows first len pos q start after lse sum top entropy mean m2" },
    { "edgekv_gather_16", sizeof(edgekv_metal_gather), "from to index" },
    { "edgekv_gather_4", sizeof(edgekv_metal_gather), "from to index" },
    { "edgekv_gather_2", sizeof(edgekv_metal_gather), "from to index" },
    { "edgekv_merge_nearest", sizeof(edgekv_metal_nearest), "rows gone kept cosine nearest" },
    { "edgekv_merge_fold", sizeof(edgekv_metal_fold),
        "rows targets own counts begin sources weights" },
};

static_assert((int) EDGEKV_METAL_F16 == GGML_TYPE_F16 &&
        (int) EDGEKV_METAL_BF16 == GGML_TYPE_BF16 && (int) EDGEKV_METAL_Q8_0 == GGML_TYPE_Q8_0 &&
        (int) EDGEKV_METAL_Q5_1 == GGML_TYPE_Q5_1 && (int) EDGEKV_METAL_Q5_0 == GGML_TYPE_Q5_0 &&
        (int) EDGEKV_METAL_Q4_1 == GGML_TYPE_Q4_1 && (int) EDGEKV_METAL_Q4_0 == GGML_TYPE_Q4_0 &&
        (int) EDGEKV_METAL_IQ4_NL == GGML_TYPE_IQ4_NL,
    "the kernels know other numbers of cache types");

inline bool supports(ggml_type type, int d) {
    switch (type) {
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: return d > 0 && d <= 256;
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_IQ4_NL: return d > 0 && d <= 256 && d % 32 == 0;
        default: return false;
    }
}

inline uint32_t cut(int64_t n, int64_t size) { return (uint32_t) ((n + size - 1) / size); }

inline edgekv_metal_layer layer_of(const edgekv_rows & r, const edgekv_queries & q) {
    return { r.nb_k, r.nb_v, q.stride_t, q.stride_h, r.type_k, r.type_v, r.d_k, r.d_v, r.n_head,
        r.n_head_kv, q.n_tokens, r.scale, r.softcap, r.max_bias, r.sinks != nullptr,
        q.start != nullptr, q.n_after != nullptr, q.recalled != nullptr };
}

// ---- attend

// parts that give a GPU enough threadgroups (not measured). Of shapes that a graph keeps, as the
// workspace is: not of the rows
inline int attend_parts(int n_tokens, int group) {
    return std::max(1, 64 / (int) cut((int64_t) n_tokens * group, EDGEKV_METAL_QUERIES));
}

inline edgekv_metal_attend attend_args(const edgekv_metal_layer & l, int n_parts) {
    return { l, n_parts,
        (int32_t) cut((int64_t) l.n_tokens * (l.n_head / l.n_head_kv), EDGEKV_METAL_QUERIES) };
}

// bytes of parts
inline size_t attend_workspace(const edgekv_metal_attend & a) {
    return (size_t) a.n_parts * a.layer.n_tokens * a.layer.n_head * (2 + a.layer.d_v) *
        sizeof(float);
}

inline call attend_part(const edgekv_metal_attend & a) {
    const int d = std::max(a.layer.d_k, a.layer.d_v), D = d <= 64 ? 64 : d <= 128 ? 128 : 256;
    const uint32_t n_shared =
        (EDGEKV_METAL_QUERIES * D + EDGEKV_METAL_SIMDGROUPS * EDGEKV_METAL_QUERIES * 2) *
        sizeof(float);
    const char * kernel = D == 64 ? "edgekv_attend_part_64"
        : D == 128                ? "edgekv_attend_part_128"
                                  : "edgekv_attend_part_256";
    return { kernel, (uint32_t) a.n_parts, (uint32_t) a.n_blocks, n_shared };
}

inline call attend_combine(const edgekv_metal_attend & a) {
    return { "edgekv_attend_combine", (uint32_t) a.layer.n_head, (uint32_t) a.layer.n_tokens,
        NO_SHARED };
}

// ---- score

inline edgekv_metal_score score_args(
    const edgekv_rows & r, const edgekv_queries & q, const edgekv_columns & c, int n_rows_max) {
    return { layer_of(r, q), c.n_rows, c.n_seen,
        (int32_t) std::clamp<uint32_t>(cut(n_rows_max, 1024), 1, 64),
        (int32_t) cut(q.n_tokens, EDGEKV_METAL_QUERIES), c.sum != nullptr, c.max != nullptr,
        c.entropy != nullptr, c.m2 != nullptr };
}

inline size_t score_norm_bytes(const edgekv_metal_score & a) {
    return (size_t) a.n_parts * a.layer.n_head * a.layer.n_tokens * 2 * sizeof(float);
}
inline size_t score_lse_bytes(const edgekv_metal_score & a) {
    return (size_t) a.layer.n_head * a.layer.n_tokens * sizeof(float);
}

inline call score_norm(const edgekv_metal_score & a) {
    const uint32_t n_shared =
        (EDGEKV_METAL_QUERIES * a.layer.d_k + EDGEKV_METAL_SIMDGROUPS * EDGEKV_METAL_QUERIES * 2) *
        sizeof(float);
    return { "edgekv_score_norm", (uint32_t) a.n_parts, (uint32_t) (a.layer.n_head * a.n_blocks),
        n_shared };
}

inline call score_fold(const edgekv_metal_score & a) {
    return { "edgekv_score_fold", (uint32_t) a.layer.n_head,
        cut(a.layer.n_tokens, EDGEKV_METAL_THREADS), NO_SHARED };
}

inline call score_columns(const edgekv_metal_score & a, int n_rows_max) {
    const uint32_t n_shared = EDGEKV_METAL_QUERIES * a.layer.d_k * sizeof(float);
    return { "edgekv_score_columns", cut(n_rows_max, EDGEKV_METAL_THREADS),
        (uint32_t) a.layer.n_head_kv, n_shared };
}

// ---- evict

// odd: the bits of all addresses, offsets and sizes that take part, at least even
inline call gather(const edgekv_metal_gather & a, size_t odd) {
    const size_t all = odd | a.n_bytes;
    const char * kernel = all % 16 == 0 ? "edgekv_gather_16"
        : all % 4 == 0                  ? "edgekv_gather_4"
                                        : "edgekv_gather_2";
    return { kernel, cut(a.n_rows, EDGEKV_METAL_SIMDGROUPS), 1, NO_SHARED };
}

// ---- merge

inline edgekv_metal_nearest nearest_args(const edgekv_numbered & keys, int n_gone, int n_kept) {
    return { keys.nb, keys.type, keys.d, n_gone, n_kept };
}
inline call merge_nearest(const edgekv_metal_nearest & a) {
    const uint32_t n_shared =
        (a.d + 2 * EDGEKV_METAL_SIMDGROUPS) * EDGEKV_METAL_GONE * sizeof(float);
    return { "edgekv_merge_nearest", cut(a.n_gone, EDGEKV_METAL_GONE), 1, n_shared };
}

inline edgekv_metal_fold fold_args(const edgekv_numbered & to, int n) {
    return { to.nb, to.type, to.d, n, (int32_t) cut(to.d, 32) };
}
inline call merge_fold(const edgekv_metal_fold & a) {
    return { "edgekv_merge_fold", cut(a.n, EDGEKV_METAL_SIMDGROUPS), (uint32_t) a.n_chunks,
        NO_SHARED };
}

} // namespace edgekv_metal
