// Rows scored, moved and merged on Metal: the functions of edgekv-cuda.h by their names, for a
// library that does not link to this one. What a thread queues goes to the device in one graph of
// one node when it waits: ggml-metal remembers of one command buffer only whether it failed. It
// runs behind what the device was given before, because there is one queue.
#include "edgekv-metal-job.h"
#include "edgekv-metal-op.h"
#include "edgekv-metal-queue.h"
#include "cuda/edgekv-cuda.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml-metal/ggml-metal-context.h"

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace {

using namespace edgekv_metal;

// ---- memory

struct memory {
    ggml_metal_device_t dev;
    ggml_metal_buffer_t buffer;
    size_t n_bytes;
};

// by first address; never destroyed, as memory may be given back when the program ends
struct all_memory {
    std::mutex mutex;
    std::map<const char *, memory> known;
};
all_memory & everything() {
    static auto & all = *new all_memory;
    return all;
}

// an address may lie at the end: an array of no length
memory memory_at(const void * p) {
    auto & all = everything();
    const std::lock_guard<std::mutex> lock(all.mutex);
    auto it = all.known.upper_bound((const char *) p);
    if (it == all.known.begin()) return {};
    --it;
    return (size_t) ((const char *) p - it->first) <= it->second.n_bytes ? it->second : memory();
}

ggml_metal_buffer_id place(const void * p) {
    const memory m = memory_at(p);
    GGML_ASSERT(m.buffer);
    ggml_tensor t = {}; // of no size, at the address
    t.data = const_cast<void *>(p);
    return ggml_metal_buffer_get_id(m.buffer, &t);
}

// ---- jobs

using job = std::function<void(ggml_metal_device_t, ggml_metal_encoder_t)>;

using jobs = std::vector<job>; // each behind the one before
thread_local std::map<ggml_metal_device_t, jobs> g_queued;

void run_here(ggml_tensor *, int, int, void *) { GGML_ABORT("jobs for Metal"); }

struct free_context {
    void operator()(ggml_context * x) const { ggml_free(x); }
};

// of a device, made when first wanted and not freed at the end: its last words might find a logger
// that is gone
ggml_metal_t & context_of(ggml_metal_device_t dev) {
    static std::map<ggml_metal_device_t, ggml_metal_t> all;
    ggml_metal_t & ctx = all[dev];
    if (!ctx && (ctx = ggml_metal_init(dev))) ggml_metal_set_n_cb(ctx, 0);
    return ctx;
}

std::mutex & one_by_one() {
    static std::mutex m;
    return m;
} // a context is for one thread

// whether all went well that a context has waited for: it knows, and says so when it is given
// something, if it be nothing
int state_of(ggml_metal_t ctx) {
    ggml_cgraph nothing = {};
    return ggml_metal_graph_compute(ctx, &nothing);
}

// 0 when all of them have run, or an error
int run(ggml_metal_t ctx, jobs & all) {
    const std::unique_ptr<ggml_context, free_context> g(ggml_init(
        { ggml_tensor_overhead() + ggml_graph_overhead_custom(1, false), nullptr, true }));
    if (!g) return GGML_STATUS_ALLOC_FAILED;
    ggml_cgraph * graph = ggml_new_graph_custom(g.get(), 1, false);
    ggml_build_forward_expand(
        graph, ggml_custom_4d(g.get(), GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, run_here, 1, &all));
    const int status = ggml_metal_graph_compute(ctx, graph);
    ggml_metal_synchronize(ctx);
    return status == GGML_STATUS_SUCCESS ? state_of(ctx) : status;
}

// on the device of some memory; 0, or an error
int queue_job(const void * where, job j) {
    const memory m = memory_at(where);
    if (m.dev) g_queued[m.dev].push_back(std::move(j));
    else g_queued.clear(); // nobody will wait for them, and their memory may go
    return m.dev ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

int wait(const void * where) {
    const memory m = memory_at(where);
    if (!m.dev) return GGML_STATUS_FAILED;
    jobs all = std::exchange(g_queued[m.dev], {});
    if (all.empty()) return GGML_STATUS_SUCCESS;
    const std::lock_guard<std::mutex> lock(one_by_one());
    ggml_metal_t & ctx = context_of(m.dev);
    if (!ctx) return GGML_STATUS_FAILED;
    const int status = run(ctx, all);
    if (status != GGML_STATUS_SUCCESS) { // it would refuse everything from now on
        ggml_metal_free(ctx);
        ctx = nullptr;
    }
    return status;
}

int state(ggml_backend_t b) { return state_of((ggml_metal_t) b->context); }

// ---- functions by name

bool attend_supports(ggml_type type_k, ggml_type type_v, int d_k, int d_v) {
    return supports(type_k, d_k) && supports(type_v, d_v);
}

size_t score_workspace(const edgekv_rows * rows, int n_tokens, int n_rows_max) {
    edgekv_queries qs = {};
    qs.n_tokens = n_tokens;
    const auto a = score_args(*rows, qs, {}, n_rows_max);
    return score_norm_bytes(a) + score_lse_bytes(a);
}

int score(const edgekv_rows * rows, const edgekv_queries * qs, const edgekv_columns * cols,
    int n_rows_max, void * workspace, void *) {
    const auto a = score_args(*rows, *qs, *cols, n_rows_max);
    const char *norm = (const char *) workspace, *lse = norm + score_norm_bytes(a);
    return queue_job(workspace,
        [a, n_rows_max, workspace, norm, lse, rows = *rows, qs = *qs, cols = *cols](
            ggml_metal_device_t dev, ggml_metal_encoder_t enc) {
            // what is not wanted may be any buffer
            auto at = [&](const void * p) { return place(p ? p : workspace); };
            queue(dev, enc, score_norm(a), a,
                { at(rows.k), at(rows.first), at(rows.len), at(rows.pos), at(qs.q), at(qs.start),
                    at(qs.n_after), at(norm) });
            ggml_metal_encoder_memory_barrier(enc);
            queue(dev, enc, score_fold(a), a, { at(norm), at(rows.sinks), at(lse) });
            ggml_metal_encoder_memory_barrier(enc);
            queue(dev, enc, score_columns(a, n_rows_max), a,
                { at(rows.k), at(rows.first), at(rows.len), at(rows.pos), at(qs.q), at(qs.start),
                    at(qs.n_after), at(lse), at(cols.sum), at(cols.max), at(cols.entropy),
                    at(cols.mean), at(cols.m2) });
        });
}

int gather_rows(
    const char * from, char * to, size_t n_bytes, const int32_t * index, int n_rows, void *) {
    const edgekv_metal_gather a = { n_bytes, n_rows, index != nullptr };
    return queue_job(to, [=](ggml_metal_device_t dev, ggml_metal_encoder_t enc) {
        const auto source = place(from), target = place(to);
        queue(dev, enc, gather(a, source.offs | target.offs), a,
            { source, target, index ? place(index) : source });
    });
}

size_t merge_workspace(const edgekv_numbered *, int) { return 0; }

int find_nearest(const edgekv_numbered * keys, const int32_t * gone, int n_gone,
    const int32_t * kept, int n_kept, float * cosine, int32_t * nearest, void *, void *) {
    const auto a = nearest_args(*keys, n_gone, n_kept);
    return queue_job(
        keys->base, [=, base = keys->base](ggml_metal_device_t dev, ggml_metal_encoder_t enc) {
            queue(dev, enc, merge_nearest(a), a,
                { place(base), place(gone), place(kept), place(cosine), place(nearest) });
        });
}

int fold(const edgekv_numbered * to, const edgekv_shares * s, const int32_t * begin, void *) {
    const auto a = fold_args(*to, s->n);
    return queue_job(to->base,
        [a, begin, base = to->base, s = *s](ggml_metal_device_t dev, ggml_metal_encoder_t enc) {
            queue(dev, enc, merge_fold(a), a,
                { place(base), place(s.rows), place(s.own), place(s.counts), place(begin),
                    place(s.sources), place(s.weights) });
        });
}

// whether all kernels are there, for heads of up to 256 values: they were compiled just now. 1; 0:
// nobody asked for them; -1: they are not
int ready(ggml_backend_dev_t dev) {
    if (!wanted()) return 0;
    // the most that any of them takes
    const uint32_t n_shared = merge_nearest({ 0, GGML_TYPE_F16, 256, 1, 1 }).n_shared;
    for (const auto & k : KERNELS)
        if (!can_run((ggml_metal_device_t) dev->context, { k.kernel, 1, 1, n_shared })) return -1;
    return 1;
}

template <typename F>
void * as(F * f) {
    return (void *) f;
} // F: what the caller takes it for

} // namespace

bool edgekv_metal_run_job(
    ggml_metal_device * dev, ggml_metal_encoder * enc, const ggml_tensor * node) {
    ggml_custom_op_params p;
    memcpy(&p, node->op_params, sizeof(p));
    if (p.fun != run_here) return false;
    bool first = true;
    for (const auto & j : *(const jobs *) p.userdata) {
        if (!first) ggml_metal_encoder_memory_barrier(enc);
        j(dev, enc);
        first = false;
    }
    return true;
}

void edgekv_metal_memory_made(ggml_metal_device * dev, ggml_metal_buffer * buffer, size_t n_bytes) {
    auto & all = everything();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.known[(const char *) ggml_metal_buffer_get_base(buffer)] = { dev, buffer, n_bytes };
}

void edgekv_metal_memory_gone(ggml_metal_buffer * buffer) {
    auto & all = everything();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.known.erase((const char *) ggml_metal_buffer_get_base(buffer));
}

void * edgekv_metal_function(const char * name) {
    static const std::pair<const char *, void *> all[] = {
        { "edgekv_metal_ready", as<int(ggml_backend_dev_t)>(ready) },
        { "edgekv_metal_attend_supports",
            as<decltype(edgekv_cuda_attend_supports)>(attend_supports) },
        { "edgekv_metal_score_workspace",
            as<decltype(edgekv_cuda_score_workspace)>(score_workspace) },
        { "edgekv_metal_score", as<decltype(edgekv_cuda_score)>(score) },
        { "edgekv_metal_gather", as<decltype(edgekv_cuda_gather)>(gather_rows) },
        { "edgekv_metal_merge_workspace",
            as<decltype(edgekv_cuda_merge_workspace)>(merge_workspace) },
        { "edgekv_metal_merge_nearest", as<decltype(edgekv_cuda_merge_nearest)>(find_nearest) },
        { "edgekv_metal_merge_fold", as<decltype(edgekv_cuda_merge_fold)>(fold) },
        { "edgekv_metal_wait", as<decltype(edgekv_cuda_wait)>(wait) },
        { "edgekv_metal_state", as<int(ggml_backend_t)>(state) },
    };
    for (const auto & [known, function] : all)
        if (strcmp(name, known) == 0) return function;
    return nullptr;
}
