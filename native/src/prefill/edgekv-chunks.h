#pragma once
// The chunks of a prompt, llama.cpp's graphs for them, and the graphs' inputs.

#include "edgekv-graph.h"
#include "edgekv-observers.h"

#include <memory>
#include <vector>

class edgekv_chunks {
public:
    struct not_by_layer {}; // a graph that cannot be cut

    edgekv_chunks(const edgekv_prompt & prompt, const edgekv_scratches & scratches,
        edgekv_observers & observers)
        : prompt(prompt), scratches(scratches), observers(observers) {}

    // into chunks of n_ubatch tokens; throws not_by_layer, edgekv_error, std::bad_alloc
    void build();
    // memory for the values of all inputs, and what llama.cpp writes there; throws std::bad_alloc
    void place_inputs();
    void drop_inputs() { inputs.reset(); } // no layer comes any more
    void clear();
    size_t n_bytes() const { return inputs ? ggml_backend_buffer_get_size(inputs.get()) : 0; }

    const std::vector<edgekv_chunk> & all() const { return chunks; }
    int64_t width() const; // of the hidden states
    // the inputs of this chunk's graph are its own
    void bind(const edgekv_chunk & c) const;

    // ---- called while graphs are built
    const edgekv_chunk & at_work() const { return *building_for; } // the first chunk of the graph
    const edgekv_seen & seen() const { return building->observed; }
    // I64 [n_head_kv*n_tokens]: where new rows go
    ggml_tensor * row_input(const llm_graph_context & g, const edgekv_scratch & s);
    // I32 [2*n_head_kv (+ n_tokens with a window)]: see edgekv-op.h
    ggml_tensor * heads_input(const llm_graph_context & g, const edgekv_layer & l);
    // rows of layer l in the scratch, which layer il asks for the tokens of the chunk in work; kept
    // until the prompt is read
    edgekv_prompt_rows * prompt_rows(const edgekv_layer & l, int il);
    // this node leaves something for observers
    void observes(const ggml_tensor * node) { building->observing.push_back(node); }

private:
    int64_t window_step() const;
    void build_chunk(int64_t first, int64_t n, int64_t row);
    edgekv_graph & graph_for(const edgekv_chunk & c);

    // rows of each head that tokens of a chunk see: where they begin, how many there are, and of a
    // window the first that each token sees
    struct seen_rows {
        std::vector<int32_t> first, len, start;
    };
    seen_rows rows_seen(const edgekv_layer & l, const edgekv_chunk & c) const;

    const edgekv_prompt & prompt;
    const edgekv_scratches & scratches;
    edgekv_observers & observers;
    std::vector<std::unique_ptr<edgekv_graph>> graphs;
    std::vector<edgekv_chunk> chunks;
    edgekv_graph * building = nullptr;
    const edgekv_chunk * building_for = nullptr;
    ggml_backend_buffer_ptr inputs;
};
