// Tables of rows and lengths in the memory of a device
#include "edgekv-table.h"

#include <algorithm>

edgekv_table edgekv_table::make(
    const std::vector<std::unique_ptr<edgekv_layer>> & layers, ggml_backend_buffer_type_t buft) {
    const auto n_layers = (int64_t) layers.size();
    int n_head_kv = 1;
    for (const auto & l : layers) n_head_kv = std::max(n_head_kv, l->n_head_kv);
    edgekv_table t;
    t.n_head_kv = n_head_kv;
    t.rows_on_device =
        edgekv_matrix::make(buft, GGML_TYPE_I64, t.stride(MAX_TOKENS), n_layers, "new_rows");
    t.heads_on_device =
        edgekv_matrix::make(buft, GGML_TYPE_I32, 2 * n_head_kv + MAX_TOKENS, n_layers, "heads");
    t.rows_here.resize(ggml_nelements(t.rows_on_device.t));
    t.heads_here.resize(ggml_nelements(t.heads_on_device.t));
    return t;
}

ggml_tensor * edgekv_table::new_rows(ggml_context * ctx, const edgekv_layer & l, int64_t n) const {
    return ggml_view_1d(ctx, rows_on_device.t, n * l.n_head_kv, l.il * stride(n) * sizeof(int64_t));
}

ggml_tensor * edgekv_table::heads(ggml_context * ctx, const edgekv_layer & l, int64_t n) const {
    return ggml_view_1d(ctx, heads_on_device.t, 2 * l.n_head_kv + (l.n_swa ? n : 0),
        l.il * heads_on_device.t->nb[1]);
}

void edgekv_table::set(
    const edgekv_layer & l, const std::vector<int64_t> & rows, const std::vector<int32_t> & start) {
    const int64_t n = (int64_t) rows.size() / l.n_head_kv;
    std::copy(rows.begin(), rows.end(), rows_here.begin() + l.il * stride(n));
    n_rows_sent = rows_on_device.t->ne[1] * stride(n);
    auto to = heads_here.begin() + l.il * heads_on_device.t->ne[0];
    to = std::copy(l.first.begin(), l.first.end(), to);
    to = std::copy(l.len.begin(), l.len.end(), to);
    std::copy(start.begin(), start.end(), to);
}

void edgekv_table::upload() {
    ggml_backend_tensor_set(rows_on_device.t, rows_here.data(), 0, n_rows_sent * sizeof(int64_t));
    ggml_backend_tensor_set(
        heads_on_device.t, heads_here.data(), 0, ggml_nbytes(heads_on_device.t));
}
