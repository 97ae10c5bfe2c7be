#pragma once
// A prompt, layer by layer. llama.cpp's own graph is built once per chunk of n_ubatch tokens and cut at the layers' outputs; the
// loops are turned round (all chunks of a layer, then the next layer), so only one layer's K/V exist in full. See docs/architecture.md.

#include "edgekv.h"
#include "edgekv-device.h"
#include "edgekv-hidden.h"
#include "edgekv-recurrent.h"
#include "edgekv-store.h"
#include "cpu/edgekv-cpu.h"

#include "ggml-impl.h"
#include "llama-graph.h"
#include "llama-memory.h"

#include <array>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <unordered_set>
#include <vector>

// Numbers of rows that flash attention of devices is made for: with others, CUDA's loads K and V anew for each query head of a group
constexpr int EDGEKV_FLASH_ROWS = 256;

// One layer in full: head k owns rows [k*cap, (k + 1)*cap); its kept rows of earlier turns end at n_old, the new tokens follow.
// So the row of a new token is the same in every layer and head. On a device EDGEKV_FLASH_ROWS - 1 rows in front of the longest head's are nobody's.
struct edgekv_scratch {
    edgekv_tensors t;
    edgekv_matrix  queries;       // F32 [d_k*n_head, n_observed], on the device that scores them or in host memory
    edgekv_matrix  raw_queries;   // the same before RoPE, in host memory, if anybody wants them
    std::vector<float> norm;      // [n_ubatch][n_head][2] of the chunk in work: maximum and 1/sum of each softmax, where our kernel attends and somebody scores
    std::vector<float> pos;       // with ALiBi: token of each row
    int64_t cap = 0, n_old = 0;
    size_t  n_bytes() const { return t.n_bytes() + queries.n_bytes() + raw_queries.n_bytes() + pos.size()*sizeof(float); }
};

// how a layer turns its queries
struct edgekv_query_path {
    ggml_tensor *       raw = nullptr;  // [d_k, n_head, n_tokens]
    const ggml_tensor * rope = nullptr; // null: in a way that is not known here
    const ggml_tensor * rotation = nullptr; // of quantised caches, if it is used
    float               scale = 1;
};

// what the scorer needs to know of a layer, noted while its graph is built
struct edgekv_score_params { float scale = 1, softcap = 0; const ggml_tensor * sinks = nullptr; };

// what the CPU kernel reads while a chunk's slice runs
struct edgekv_prompt_rows {
    const edgekv_layer * layer = nullptr;
    std::vector<int32_t> first, len, start; // per head; first visible row of each token (sliding window)
    edgekv_rows rows;
    float * norm = nullptr;
    mutable std::atomic<int32_t> next { 0 }; // the kernel's threads share its work out by it
};

// tokens of the prompt and of the pieces behind it that go through a layer together
struct edgekv_chunk {
    llama_memory_context_ptr mctx;
    struct edgekv_graph * graph = nullptr;
    int64_t first = 0, n_tokens = 0;
    int64_t row = 0;                       // where its rows begin behind the old ones; every piece begins behind the prompt
    bool    has_output = false;
    std::vector<void *> inputs;            // its values for the graph's inputs
};

// One of llama.cpp's graphs. Chunks that are alike take turns in it: a graph takes about a megabyte, and a long prompt has many chunks.
struct edgekv_graph {
    std::unique_ptr<llm_graph_result> res;
    ggml_cgraph * gf = nullptr;
    int64_t n_tokens = 0;
    bool    has_output = false;
    int32_t cleared = -1;                  // the recurrent state that begins anew, of the conversation's first chunk
    std::pair<int64_t, int64_t> observed;  // tokens of the chunk whose queries are captured
    std::vector<int> cut;                  // [n_slice + 1] node where each slice begins
    std::vector<ggml_tensor *> resid;      // [n_slice - 1] hidden states behind each slice
    std::vector<ggml_op> resid_op;
    std::vector<ggml_tensor *> inputs;
    std::vector<std::pair<const edgekv_scratch *, ggml_tensor *>> rows; // input: row of each new token and head
    std::vector<std::pair<const edgekv_layer *, ggml_tensor *>> heads; // input: where each head's rows lie, see edgekv-op.h
    std::vector<std::unique_ptr<edgekv_prompt_rows>> prompt_rows; // of each layer
    // [n_nodes] as built, where there is more than one backend: the scheduler puts copies of its own in their place, and forgets them
    std::vector<std::array<ggml_tensor *, GGML_MAX_SRC>> sources;
    void restore_sources();
    void restore();
};

// the mean over n_future positions of what turns a raw query, without scales
struct edgekv_turn {
    const ggml_tensor * rope = nullptr;
    int n_future = 0;
    std::vector<double> mean;              // [d_k, d_k], image of one basis vector after the other
};

// a slice of a graph as the scheduler has it
struct edgekv_planned {
    edgekv_graph * graph = nullptr;
    int slice = -1;
    ggml_cgraph gf;
    std::vector<ggml_tensor *> nodes, leafs, moved; // moved: views of what has another address for each chunk
};

// accumulated columns of one observer in one layer
struct edgekv_tally {
    std::vector<float> sum, max, entropy, mean, m2;
    int64_t n_seen = 0;
    std::vector<float> q_mean, q_m2; // of the raw queries: [n_head, d_k], [n_head, d_k, d_k]
    int64_t q_seen = 0;
    edgekv_device_columns there;     // where the columns are until the layer's last chunk, if a device adds them up
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

struct edgekv_error : std::runtime_error {
    edgekv_status status;
    edgekv_error(edgekv_status status, const std::string & what) : std::runtime_error(what), status(status) {}
};

struct edgekv_row_list { int32_t n; const int32_t * rows; };

// rows of one head, some of which are about to be evicted: row i lies at first + (order ? order[i] : i)
struct edgekv_head_rows {
    const edgekv_tensors * t;
    int64_t first;
    int32_t n;
    const int32_t * order;
};

struct edgekv_prefill {
    static std::unique_ptr<edgekv_prefill> begin(llama_context * ctx, const edgekv_prefill_params & params); // throws
    ~edgekv_prefill();
    void lose_context() noexcept; // it is being freed: all memory goes back, and nothing can be read any more

    void run(int il);             // throws edgekv_error
    void keep(const int32_t * counts, const int32_t * rows);
    void nearest(int il, int head, const edgekv_row_list & gone, const edgekv_row_list & kept, float * cosine, int32_t * nearest) const;
    void merge(int il, int head, const edgekv_merge & m);
    void shrink(int il, const int32_t * counts);
    void end();
    void stat(int observer, edgekv_stat which, float * out) const;
    void rows(int head, float * k, float * v) const;
    void some_rows(int head, const edgekv_row_list & which, float * k, float * v) const;
    void foretell(int head, const edgekv_map & map, int n_weights, float * out, float * unlike) const;
    void queries(int observer, float * mean, float * cov) const;
    void rotation(int n_future, float * out) const;

    // whether all devices of a context computed what they were given, as far as they say so only when they are asked
    static bool devices_are_well(llama_context & ctx);

    // ---- called while graphs are built (edgekv-attend.cpp)
    const edgekv_scratch & scratch_of(const edgekv_layer & l) const { return *scratches[scratch_index[l.il]]; }
    bool by_kernel(const edgekv_layer & l) const { return !store->graph_attend && ggml_backend_buft_is_host(l.buft); }
    int64_t chunk_row() const { return building_for->row; }
    ggml_tensor * row_input(const llm_graph_context & g, const edgekv_scratch & s);
    ggml_tensor * capture_queries(const llm_graph_context & g, const edgekv_layer & l, ggml_tensor * q, float scale, float softcap, ggml_tensor * sinks);
    ggml_tensor * capture_raw_queries(const llm_graph_context & g, const edgekv_layer & l, ggml_tensor * q);
    // I32 [2*n_head_kv (+ n_tokens with a window)]: see edgekv-op.h
    ggml_tensor * heads_input(const llm_graph_context & g, const edgekv_layer & l);
    // whether the device's flash attention takes this layer's rows
    bool flash_takes(const llm_graph_context & g, const edgekv_layer & l, ggml_tensor * q) const;
    int64_t rows_in_head(const edgekv_layer & l) const { return l.len_max() + n_rows; } // at most, when all has been read
    // rows of layer l in the scratch, for the tokens of the chunk in work; kept until the prompt is read
    edgekv_prompt_rows * prompt_rows(const edgekv_layer & l);
    // F16 [pad + n_rows, n_tokens], for backends without a kernel of ours: row j behind the pad is seen by token i if
    // 0 <= before + i - j (< n_swa). With ALiBi minus the distances, of the old rows of this head too
    ggml_tensor * mask_view(const llm_graph_context & g, const edgekv_layer & l, int head, int64_t before, int64_t n_rows, int64_t pad);

    llama_context * ctx = nullptr;
    edgekv_store *  store = nullptr;
    bool by_layer = true;
    int  il_done = -1;            // the layer in work
    double score_ms = 0;          // spent on statistics so far

private:
    ggml_backend_dev_t device() const;
    bool on_cpu() const { return !device(); }
    bool on_one_device() const;
    void make_scratches();
    void make_masks();
    ggml_tensor * old_distances(const llm_graph_context & g, const edgekv_layer & l, int head) const;
    void build_chunks();
    void build_chunk(int64_t first, int64_t n, int64_t row);
    edgekv_graph & graph_for(const edgekv_chunk & c);
    bool find_cuts(edgekv_graph & g) const;
    bool slice_nodes(const edgekv_graph & g, int slice, std::vector<ggml_tensor *> & nodes, std::vector<ggml_tensor *> & replay) const;
    void place_inputs();
    void lay_out_old(int il);
    void run_chunks(int begin, int end);
    void forget();
    void bind(const edgekv_chunk & c);
    void reserve();
    void prepare(edgekv_graph & g, int slice);
    void plan(edgekv_graph & g, int slice);
    void run_slice(const edgekv_chunk & c, int slice);
    void fetch_logits(const edgekv_graph & g);
    void observe(const edgekv_chunk & c, int il);
    void fetch_columns(int il);
    const edgekv_device * scorer(const edgekv_layer & l) const; // the device that scores this layer's rows where they lie; null: the CPU does
    void score(const edgekv_layer & l, const edgekv_chunk & c, int64_t begin, int64_t end, edgekv_tally & tally, uint32_t stats);
    const std::vector<double> & mean_turn(const edgekv_layer & l, int n_future) const;
    void tally_queries(const edgekv_layer & l, const edgekv_chunk & c, int64_t begin, int64_t end, int64_t every, edgekv_tally & tally);
    int64_t rotation_size() const { return (int64_t) std::lround(std::sqrt((double) key_rotation.size())); }
    void note_peak();
    edgekv_layer & finished(int il, int head) const; // a layer that was kept, and a head of it; throws edgekv_error
    edgekv_head_rows rows_read(int head) const; // of the layer in work, all of them; throws edgekv_error
    edgekv_head_rows rows_of(int il, int head) const; // before they are evicted; throws edgekv_error
    const edgekv_layer & in_work() const;  // the layer that was read last, while its rows are there; throws edgekv_error
    std::pair<int64_t, int64_t> observed(int64_t first, int64_t n) const; // tokens of [first, first + n) that any observer wants
    int  n_slice() const { return by_layer ? (int) store->layers.size() : 1; }

    std::vector<llama_token> tokens;
    int64_t n_tokens = 0, n_all = 0, n_rows = 0; // of the prompt; with all pieces; with the longest piece
    int64_t n_ubatch = 0, max_observed = 0;
    std::vector<int64_t> pieces;
    llama_pos pos0 = 0;
    std::vector<edgekv_observer> observers;
    std::string dir;
    edgekv_hidden_mode hidden_mode = EDGEKV_HIDDEN_F32;
    edgekv_progress progress = nullptr;
    void * progress_data = nullptr;
    int  n_done = 0;

    std::vector<std::unique_ptr<edgekv_scratch>> scratches;
    std::vector<int> scratch_index;        // [n_layer]
    std::vector<edgekv_score_params> score_params; // [n_layer]
    std::vector<edgekv_query_path> query_paths;    // [n_layer]
    bool wants_queries = false, wants_columns = false; // of any observer
    int64_t query_step = 0; // one of so many tokens of a chunk has its query captured before RoPE: as `every` of all that want them, or 1
    std::vector<float> key_rotation;       // of quantised caches, square
    mutable edgekv_matrix device_work;     // on a device with kernels of ours
    mutable edgekv_turn turn;              // the last one: most models turn all layers alike
    std::vector<std::vector<edgekv_tally>> tallies; // [n_layer or 1][observer]
    std::vector<std::unique_ptr<edgekv_layer>> fresh; // the layers to be
    // [n_layer][n_head_kv] rows of a head that is still whole, best first: it lies in token order, but may have to shrink
    std::vector<std::vector<std::vector<int32_t>>> ranked;
    std::vector<std::unique_ptr<edgekv_graph>> graphs;
    std::vector<edgekv_chunk> chunks;
    edgekv_graph * building = nullptr;
    const edgekv_chunk * building_for = nullptr; // the first chunk of it
    edgekv_planned planned;
    std::unique_ptr<edgekv_hidden> hidden;
    ggml_backend_buffer_ptr inputs;
    edgekv_matrix mask_full, mask_swa;
    int64_t mask_full_at = 0, mask_swa_at = 0; // column of "before = 0"
    edgekv_recurrent_state before;         // what recurrent layers held before the prompt
    bool evicted = false, ended = false;
    bool broken = false;          // a layer was left half read: its hidden states are overwritten
};
