// Windows of one matrix as masks
#include "edgekv-masks.h"

#include "llama-graph.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <vector>

edgekv_matrix edgekv_masks::make_one(int64_t n_before, int n_swa) const {
    const ggml_fp16_t inf = ggml_fp32_to_fp16(-INFINITY);
    const auto & layers = prompt.store->layers;
    const bool alibi = std::any_of(
        layers.begin(), layers.end(), [](const auto & l) { return l->max_bias != 0.0f; });
    const int64_t n_mask = std::min(prompt.n_ubatch, prompt.n_rows);
    int n_hidden = 0; // columns that nobody sees
    for (const auto & l : layers) {
        n_hidden = std::max(n_hidden, l->row_step - 1 + EDGEKV_FLASH_ROWS - 1);
    }
    auto m = edgekv_matrix::make(
        layers.back()->buft, GGML_TYPE_F16, n_before + n_mask + n_hidden, n_mask, "mask");
    std::vector<ggml_fp16_t> row(m.t->ne[0]);
    for (int64_t i = 0; i < n_mask; ++i) {
        for (int64_t j = 0; j < m.t->ne[0]; ++j) {
            const int64_t dist = n_before + i - j;
            const bool sees = dist >= 0 && (n_swa == 0 || dist < n_swa);
            row[j] = sees ? ggml_fp32_to_fp16(alibi ? (float) -dist : 0.0f) : inf;
        }
        ggml_backend_tensor_set(m.t, row.data(), i * m.t->nb[1], m.t->nb[1]);
    }
    return m;
}

void edgekv_masks::make() {
    int64_t n_old = 0;
    int n_swa = 0;
    bool any_full = false;
    for (int il = 0; il < (int) prompt.store->layers.size(); ++il) {
        const auto & l = prompt.layer(il);
        const bool slides = l.n_swa && !l.chunked;
        if (slides) n_swa = l.n_swa;
        if (l.n_head_kv == 0 || slides) continue;
        any_full = true;
        n_old = std::max<int64_t>(n_old, l.len_max());
    }
    if (any_full) {
        full_at = n_old + prompt.n_rows;
        full = make_one(full_at, 0);
    }
    if (n_swa) {
        swa_at = n_swa;
        swa = make_one(swa_at, n_swa);
    }
}

// F16 [rows, n_tokens]: minus the distances of a head's old rows, which lie anywhere in front of
// the chunk
ggml_tensor * edgekv_masks::old_distances(
    const llm_graph_context & g, const edgekv_layer & l, int64_t row, int head) const {
    const int64_t n = l.len[head], at = prompt.pos0 + row;
    ggml_tensor * rows = ggml_view_1d(g.ctx0, l.row_pos.t, n, l.first[head] * sizeof(float));
    ggml_tensor * tokens = ggml_reshape_2d(
        g.ctx0, ggml_arange(g.ctx0, (float) at, (float) (at + g.n_tokens), 1.0f), 1, g.n_tokens);
    ggml_tensor * all =
        ggml_repeat(g.ctx0, rows, ggml_new_tensor_2d(g.ctx0, GGML_TYPE_F32, n, g.n_tokens));
    return ggml_cast(g.ctx0, ggml_sub(g.ctx0, all, tokens), GGML_TYPE_F16);
}

ggml_tensor * edgekv_masks::view(const llm_graph_context & g, const edgekv_layer & l, int64_t row,
    int head, int64_t before, int64_t n, int64_t pad) const {
    // a window that does not slide begins with a chunk: all that is not skipped is seen
    const bool slides = l.n_swa && !l.chunked;
    ggml_tensor * m = slides ? swa.t : full.t;
    // their distances are not those of a window
    const int64_t n_old = l.max_bias != 0.0f ? l.len[head] : 0;
    before -= n_old;
    n -= n_old;
    const int64_t at = (slides ? swa_at : full_at) - before;
    GGML_ASSERT(at >= 0 && at + n <= m->ne[0]);
    auto columns = [&](int64_t first, int64_t n) { // some backends want no gaps
        return ggml_cont(
            g.ctx0, ggml_view_2d(g.ctx0, m, n, g.n_tokens, m->nb[1], first * sizeof(ggml_fp16_t)));
    };
    ggml_tensor * mask = columns(at, n);
    if (n_old > 0) mask = ggml_concat(g.ctx0, old_distances(g, l, row, head), mask, 0);
    return pad ? ggml_concat(g.ctx0, columns(m->ne[0] - pad, pad), mask, 0) : mask;
}
