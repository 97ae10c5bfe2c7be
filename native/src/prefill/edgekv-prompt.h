#pragma once
// The prompt that is being read: its tokens, where their rows go, and how far it is. The parts of a
// prefill look at it.

#include "edgekv-store.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

struct llama_context;

// tokens that go through a layer together, and where their rows begin behind the old ones: every
// piece begins behind the prompt
struct edgekv_span {
    int64_t first = 0, n_tokens = 0, row = 0;
};

// tokens [first, second) of a span, counted from its first, of which somebody wants columns, or the
// queries before RoPE
struct edgekv_seen {
    using range = std::pair<int64_t, int64_t>;
    range columns, queries;
    bool operator==(const edgekv_seen & o) const {
        return columns == o.columns && queries == o.queries;
    }
};

// by the CPU's kernels
struct edgekv_work {
    double ms = 0, n = 0; // multiply-adds
};

struct edgekv_prompt {
    llama_context * ctx = nullptr; // null: it was freed
    edgekv_store * store = nullptr;
    std::vector<llama_token> tokens; // of the prompt, then of the pieces
    std::vector<int64_t> pieces;     // how many tokens each has
    int64_t n_tokens = 0;            // of the prompt
    int64_t n_all = 0, n_rows = 0;   // with all pieces; with the longest piece
    float * logits = nullptr;        // [n_tokens, n_vocab] of every token, if they are wanted
    int64_t n_hidden = 0; // of so many last tokens hidden states are wanted, as heads take them
    mutable std::vector<float> last_hidden; // [.., n_embd_out] of those that were read
    int64_t n_ubatch = 0;                   // of a chunk, at most
    llama_pos pos0 = 0;                     // of the first token
    size_t most_work = SIZE_MAX;            // bytes, of products
    // what attention multiplies may have the 8 bits of bf16, as products with weights do
    bool rounded = false;
    bool by_layer = true;  // false: its graphs cannot be cut, all layers are read at once
    std::vector<int> ends; // [n_slice] the layer behind each slice, see cut

    mutable edgekv_work weights, levels, attention;

    int il_done = -1; // the layer in work
    bool ended = false;
    bool broken = false; // a layer was left half read: hidden states are overwritten

    // how many of the n tokens from `first` on have logits: all of the prompt's, or its last one
    int64_t outputs_of(int64_t first, int64_t n) const {
        const int64_t begin = logits ? 0 : n_tokens - 1;
        return std::max<int64_t>(0, std::min(first + n, n_tokens) - std::max(first, begin));
    }
    // whether hidden states of a chunk are wanted
    bool has_hidden(const edgekv_span & c) const {
        return c.first < n_tokens && c.first + c.n_tokens > n_tokens - n_hidden;
    }
    // with the rows of earlier turns that the prompt is read behind: those in the store, or, by
    // the archive, all
    const edgekv_layer & layer(int il) const {
        return archived.empty() || !archived[il] ? *store->layers[il] : *archived[il];
    }
    bool in_archive(const edgekv_layer & l) const { return !archived.empty() && archived[l.il]; }
    // [n_layer] or none; without tensors, and without a list of their tokens, which are all
    std::vector<std::unique_ptr<edgekv_layer>> archived;
    // what is read goes into the archive, all that went before is there
    void use_archive();
    // Layers that are read together: each by itself, but those that share K and V, with the layers
    // that they have them from, are the last slice
    void cut();
    int n_slice() const { return (int) ends.size(); }
    int slice_of(int il) const {
        return (int) (std::upper_bound(ends.begin(), ends.end(), il) - ends.begin());
    }
    int begin(int slice) const { return slice > 0 ? ends[slice - 1] : 0; }
    bool alone(int il) const { return ends[slice_of(il)] - begin(slice_of(il)) == 1; }
    // row of a head that is the first that the token at `row` behind the old ones sees; rows of a
    // layer with a window lie in order
    int64_t first_seen(const edgekv_layer & l, int64_t row) const {
        if (!l.n_swa) return 0;
        return std::max<int64_t>(0, l.len[0] + l.oldest_seen((llama_pos) (pos0 + row)) - pos0);
    }
    // the first that layers lie on; null: all are in main memory
    ggml_backend_dev_t device() const;
    bool on_cpu() const { return !device(); }
    bool on_one_device() const;
    // whether our kernel on the CPU attends to this layer
    bool by_kernel(const edgekv_layer & l) const {
        return !store->graph_attend && ggml_backend_buft_is_host(l.buft);
    }
};
