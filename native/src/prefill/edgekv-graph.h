#pragma once
// llama.cpp's graph of a chunk, cut at the outputs of its layers.

#include "edgekv-scratch.h"
#include "cpu/edgekv-cpu.h"

#include "ggml-impl.h"
#include "llama-graph.h"
#include "llama-memory.h"

#include <array>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

// what the CPU kernel reads while a chunk's slice runs
struct edgekv_prompt_rows {
    const edgekv_layer * layer = nullptr;
    // per head; first visible row of each token (sliding window)
    std::vector<int32_t> first, len, start;
    edgekv_rows rows;
    float * norm = nullptr;
    edgekv_work * work = nullptr;
    mutable std::atomic<int32_t> next { 0 }; // the kernel's threads share its work out by it
};

// what a slice of a graph computes, in order, and the weights and rows of the cache that it reads
struct edgekv_slice {
    std::vector<ggml_tensor *> nodes, weights;
};

// One of llama.cpp's graphs. Chunks that are alike take turns in it: a graph takes about a
// megabyte, and a long prompt has many chunks.
struct edgekv_graph {
    std::unique_ptr<llm_graph_result> res;
    ggml_cgraph * gf = nullptr;
    int64_t n_tokens = 0;
    int64_t n_outputs = 0; // of them, the last ones
    int32_t cleared = -1; // the recurrent state that begins anew, of the conversation's first chunk
    bool has_hidden = false;          // hidden states are wanted, as heads take them
    edgekv_seen observed;             // tokens of the chunk whose queries are captured
    std::vector<int> cut;             // [n_slice + 1] node where each slice begins
    std::vector<edgekv_slice> slices; // [n_slice]
    std::vector<ggml_tensor *> resid; // [n_slice - 1] hidden states behind each slice
    std::vector<ggml_op> resid_op;
    std::vector<ggml_tensor *> inputs;
    // input: row of each new token and head
    std::vector<std::pair<const edgekv_scratch *, ggml_tensor *>> rows;
    // input: where each head's rows lie, see edgekv-op.h
    std::vector<std::pair<const edgekv_layer *, ggml_tensor *>> heads;
    std::vector<std::unique_ptr<edgekv_prompt_rows>> prompt_rows; // of each layer
    std::vector<const ggml_tensor *> observing; // nodes that leave something for observers
    // [n_nodes] as built, where there is more than one backend: the scheduler puts copies of its
    // own in their place, and forgets them
    std::vector<std::array<ggml_tensor *, GGML_MAX_SRC>> sources;

    // behind each layer, one slice for each; false if it cannot be cut there
    bool find_cuts(int n_slice);
    // between the cuts, as the graph was built: once, because it takes longer than a small model's
    // layer. False if what comes before a slice leads to the output of another layer
    bool find_slices();
    // hidden states that go into a slice, and that come out of it; null: the first, the last
    ggml_tensor * into(int slice) const { return slice > 0 ? resid[slice - 1] : nullptr; }
    ggml_tensor * out_of(int slice) const {
        return slice < (int) resid.size() ? resid[slice] : nullptr;
    }
    void keep_sources();
    void restore_sources();
    void restore(); // as it was built, before a slice was planned

private:
    bool find_slice(int i, edgekv_slice & slice) const;
    void drop_unread(std::vector<ggml_tensor *> & nodes) const;
};

// tokens of the prompt and of the pieces behind it that go through a layer together
struct edgekv_chunk : edgekv_span {
    llama_memory_context_ptr mctx;
    edgekv_graph * graph = nullptr;
    int64_t n_outputs = 0;      // of its last tokens
    std::vector<void *> inputs; // its values for the graph's inputs
};
