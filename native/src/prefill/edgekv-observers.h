#pragma once
// What the observed queries say of the layer in work: their attention to each row, and their own
// distribution. Queries are copied out of the graph and judged behind each chunk.

#include "edgekv.h"
#include "edgekv-device.h"
#include "edgekv-scratch.h"
#include "cpu/edgekv-cpu.h"

#include <cstdint>
#include <utility>
#include <vector>

struct llm_graph_context;

// how a layer turns its queries
struct edgekv_query_path {
    ggml_tensor * raw = nullptr;            // [d_k, n_head, n_tokens]
    const ggml_tensor * rope = nullptr;     // null: in a way that is not known here
    const ggml_tensor * rotation = nullptr; // of quantised caches, if it is used
    float scale = 1;
};

// what the scorer needs to know of a layer, noted while its graph is built
struct edgekv_score_params {
    float scale = 1, softcap = 0;
    const ggml_tensor * sinks = nullptr;
};

// the mean over n_future positions of what turns a raw query, without scales
struct edgekv_turn {
    const ggml_tensor * rope = nullptr;
    int n_future = 0;
    std::vector<double> mean; // [d_k, d_k], image of one basis vector after the other
};

// queries of the chunk in work; the layers of a scratch take turns, but those of one slice do not
struct edgekv_capture {
    // F32 [d_k*n_head, n_observed], on the device that scores them or in host memory
    edgekv_matrix queries;
    edgekv_matrix raw_queries; // the same before RoPE, in host memory, if anybody wants them
    // [n_ubatch][n_head][2]: maximum and 1/sum of each softmax, where our kernel attends and
    // somebody scores
    std::vector<float> norm;
};

// accumulated columns of one observer in one layer
struct edgekv_tally {
    std::vector<float> sum, max, entropy, mean, m2;
    int64_t n_seen = 0;
    // of the raw queries: [n_head, d_k], and of each head the lower triangle of [d_k, d_k]
    std::vector<float> q_mean, q_m2;
    int64_t q_seen = 0;
    // where the columns are until the layer's last chunk, if a device adds them up
    edgekv_device_columns there;
    bool on_device = false;

    edgekv_columns columns(int64_t n_rows) { // those that are wanted have a size
        auto at = [](std::vector<float> & x) { return x.empty() ? nullptr : x.data(); };
        return { at(sum), at(max), at(entropy), at(mean), at(m2), n_rows, n_seen };
    }
    void clear() { // for the next layer, which takes the same memory
        edgekv_tally next;
        next.there = std::move(there);
        *this = std::move(next);
    }
};

class edgekv_observers {
public:
    edgekv_observers(const edgekv_prompt & prompt, const edgekv_scratches & scratches)
        : prompt(prompt), scratches(scratches) {}

    void add(const edgekv_observer & o); // throws edgekv_error
    void make();                         // memory beside the scratches; throws std::bad_alloc
    void clear();
    void drop_work(); // no layer comes any more: the results stay
    size_t n_bytes() const;

    edgekv_seen seen(const edgekv_span & span) const;
    // whether anybody wants columns of it in layers [begin, end)
    bool counts_columns(const edgekv_span & span, int begin, int end) const;

    // ---- called while graphs are built
    // nodes that copy the queries of those tokens, or null if nobody wants them; il: the layer that
    // asks for the rows of l
    ggml_tensor * capture_queries(const llm_graph_context & g, const edgekv_layer & l, int il,
        const edgekv_seen & seen, ggml_tensor * q, const edgekv_score_params & params);
    ggml_tensor * capture_raw_queries(const llm_graph_context & g, const edgekv_layer & l,
        const edgekv_seen & seen, ggml_tensor * q);
    // where our kernel leaves the sums of its softmaxes; null: nobody wants them
    float * norm_of(int il);
    // how quantised caches turn keys and queries, as the graph has it
    void note_rotation(const ggml_tensor * t);

    // ---- called while layers are read
    void begin_layer(int il);
    void observe(const edgekv_span & span, int il); // of which the queries have just been captured
    void end_layer(int il);

    // ---- of the layer in work; throw edgekv_error
    void stat(int observer, edgekv_stat which, float * out) const;
    void queries(int observer, int head, float * mean, float * cov) const;
    void drop_queries(int observer);
    void rotation(int n_future, float * out) const;

    double ms = 0; // spent so far

private:
    // the device that scores this layer's rows where they lie; null: the CPU does
    static const edgekv_device * scorer(const edgekv_layer & l);
    int place(int il) const { return il - prompt.begin(prompt.slice_of(il)); } // in its slice
    std::vector<edgekv_tally> & tallies_of(int il) { return tallies[place(il)]; }
    edgekv_seen::range wanted(const edgekv_span & span, uint32_t stats) const;
    int64_t most_wanted(uint32_t stats) const; // tokens of a chunk, at most
    void make_capture(const edgekv_layer & l, edgekv_capture & c) const;
    const edgekv_tally & tally_of(int observer) const; // of the layer in work; throws edgekv_error
    // of tokens [begin, end), all of the span
    void score(const edgekv_layer & l, int il, const edgekv_span & c, int64_t begin, int64_t end,
        edgekv_tally & tally, uint32_t stats);
    void tally_queries(const edgekv_layer & l, const edgekv_span & c, int64_t begin, int64_t end,
        int64_t every, edgekv_tally & tally);
    const std::vector<double> & mean_turn(const edgekv_layer & l, int n_future) const;

    const edgekv_prompt & prompt;
    const edgekv_scratches & scratches;
    std::vector<edgekv_observer> observers;
    bool wants_queries = false, wants_columns = false; // of any observer
    // one of so many tokens of a chunk has its query captured before RoPE: as `every` of all that
    // want them, or 1
    int64_t query_step = 0;
    std::vector<edgekv_capture> captured;
    std::vector<int> capture_of;                   // [n_layer] which of them; -1: no queries
    std::vector<edgekv_score_params> score_params; // [n_layer]
    std::vector<edgekv_query_path> query_paths;    // [n_layer]
    std::vector<float> key_rotation;               // of quantised caches, square
    mutable edgekv_turn turn; // the last one: most models turn all layers alike
    std::vector<std::vector<edgekv_tally>> tallies; // [most layers of a slice][observer]
};
