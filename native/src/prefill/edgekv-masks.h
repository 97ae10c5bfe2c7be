#pragma once
// Masks of a prompt's attention, for backends without a kernel of ours. Who sees whom depends only
// on the distance, so every chunk's mask is a window of one matrix.

#include "edgekv-scratch.h"

struct llm_graph_context;

class edgekv_masks {
public:
    explicit edgekv_masks(const edgekv_prompt & prompt) : prompt(prompt) {}

    void make(); // throws std::bad_alloc
    void clear() {
        full = {};
        swa = {};
    }
    size_t n_bytes() const { return full.n_bytes() + swa.n_bytes(); }

    // F16 [pad + n_rows, n_tokens] of the chunk whose rows begin at `row`: row j behind the pad is
    // seen by token i if 0 <= before + i - j (< n_swa). With ALiBi minus the distances, of the old
    // rows of this head too
    ggml_tensor * view(const llm_graph_context & g, const edgekv_layer & l, int64_t row, int head,
        int64_t before, int64_t n_rows, int64_t pad) const;

private:
    edgekv_matrix make_one(int64_t n_before, int n_swa) const;
    ggml_tensor * old_distances(
        const llm_graph_context & g, const edgekv_layer & l, int64_t row, int head) const;

    const edgekv_prompt & prompt;
    edgekv_matrix full, swa;
    int64_t full_at = 0, swa_at = 0; // column of "before = 0"
};
