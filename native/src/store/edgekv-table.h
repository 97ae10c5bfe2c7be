#pragma once
// Where the heads' rows lie and where new ones go, for all layers of one kind of memory, in that
// memory: what a graph that may be used again, and kernels on a device, read instead of numbers
// that were right when the graph was built. One upload per step.

#include "edgekv-layer.h"

struct edgekv_table {
    static constexpr int MAX_TOKENS = 64; // at once; more are read layer by layer

    // throws std::bad_alloc
    static edgekv_table make(
        const std::vector<std::unique_ptr<edgekv_layer>> & layers, ggml_backend_buffer_type_t buft);

    // views for a graph: of layer l, n tokens
    // I64 [n_head_kv*n]
    ggml_tensor * new_rows(ggml_context * ctx, const edgekv_layer & l, int64_t n) const;
    // I32 [2*n_head_kv (+ n with a window)]
    ggml_tensor * heads(ggml_context * ctx, const edgekv_layer & l, int64_t n) const;

    // of layer l: rows of the new tokens, then first row and length of each head, first visible row
    // of each token; upload sends what is set. Every layer of a step has as many tokens
    void set(const edgekv_layer & l, const std::vector<int64_t> & rows,
        const std::vector<int32_t> & start);
    void upload();

private:
    // entries of a layer among the new rows: in front of what follows as little as there is, at
    // addresses that Vulkan binds
    int64_t stride(int64_t n) const { return (n_head_kv * n + 31) / 32 * 32; }

    int n_head_kv = 1; // of the layer that has most
    int64_t n_rows_sent = 0;
    edgekv_matrix rows_on_device, heads_on_device; // [, n_layer]
    std::vector<int64_t> rows_here;
    std::vector<int32_t> heads_here;
};
