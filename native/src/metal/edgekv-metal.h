#ifndef EDGEKV_METAL_H // guarded by name: this text is part of the kernels' one source too
                       // (native/metal-source.cmake)
#define EDGEKV_METAL_H
// Arguments of the Metal kernels, one struct for each in buffer 0: what host and kernels share.
// Members have the same size on both sides and lie at multiples of it, so that nothing is padded
// (native/tests/test-metal.cpp holds that). Pointers are buffers of their own; one that is not
// wanted (has_... is 0) may be any buffer.

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#define EDGEKV_THREADGROUP(n) [[threadgroup(n)]]
#else
#include <cstdint>
#define EDGEKV_THREADGROUP(n) // to a stand-in the word is nothing
#endif

// what every kernel begins with: its threadgroup, its thread of it, the threadgroup's memory
#define EDGEKV_PLACE                                                                        \
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]], \
        threadgroup float *shared EDGEKV_THREADGROUP(0)

// cache types, by ggml's numbers
enum edgekv_metal_type {
    EDGEKV_METAL_F16 = 1,
    EDGEKV_METAL_Q4_0 = 2,
    EDGEKV_METAL_Q4_1 = 3,
    EDGEKV_METAL_Q5_0 = 6,
    EDGEKV_METAL_Q5_1 = 7,
    EDGEKV_METAL_Q8_0 = 8,
    EDGEKV_METAL_IQ4_NL = 20,
    EDGEKV_METAL_BF16 = 30,
};

// what the kernels are written for: lanes of a simd-group, simd-groups and threads of a
// threadgroup, queries multiplied at once
enum {
    EDGEKV_METAL_LANES = 32,
    EDGEKV_METAL_SIMDGROUPS = 4,
    EDGEKV_METAL_THREADS = 128,
    EDGEKV_METAL_QUERIES = 8,
    EDGEKV_METAL_GONE = 16
};

// edgekv_rows and edgekv_queries of cpu/edgekv-cpu.h
struct edgekv_metal_layer {
    uint64_t nb_k, nb_v;
    int64_t stride_t, stride_h;
    int32_t type_k, type_v, d_k, d_v, n_head, n_head_kv, n_tokens;
    float scale, softcap, max_bias;
    int32_t has_sinks, has_start, has_after, has_recalled;
};

struct edgekv_metal_attend {
    edgekv_metal_layer layer;
    int32_t n_parts, n_blocks; // n_blocks: of queries (tokens x heads of a group)
};

struct edgekv_metal_score {
    edgekv_metal_layer layer;
    int64_t n_rows, n_seen;    // as in edgekv_columns
    int32_t n_parts, n_blocks; // n_blocks: of tokens
    int32_t has_sum, has_max, has_entropy, has_moments;
};

struct edgekv_metal_gather {
    uint64_t n_bytes; // of a row
    int32_t n_rows, has_index;
};

struct edgekv_metal_nearest {
    uint64_t nb;
    int32_t type, d, n_gone, n_kept;
};

struct edgekv_metal_fold {
    uint64_t nb;
    int32_t type, d, n, n_chunks; // n: rows that receive; chunks of 32 values of a row
};

#endif
