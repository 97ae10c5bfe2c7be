// Running a slice of a graph: its inputs, the scheduler's plan, the hidden states in and out
#include "edgekv-slices.h"
#include "edgekv-backends.h"
#include "edgekv-context.h"
#include "edgekv-error.h"
#include "edgekv-switches.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <string>
#include <unordered_set>

// Without our kernels graphs grow with the rows in front of a chunk: a prompt that does not fit the
// device is better refused now.
void edgekv_slices::reserve(edgekv_hidden_mode mode, const std::string & dir) {
    const int n_slice = prompt.n_slice();
    if (n_slice > 1) {
        const bool elsewhere = mode == EDGEKV_HIDDEN_DEVICE && !prompt.on_one_device();
        hidden = std::make_unique<edgekv_hidden>(elsewhere ? EDGEKV_HIDDEN_F32 : mode,
            chunks.width(), prompt.n_all, prompt.device(), dir);
    }
    if (prompt.on_cpu()) return;
    const auto & all = chunks.all();
    const size_t last = (prompt.n_tokens + prompt.n_ubatch - 1) / prompt.n_ubatch - 1;
    for (size_t i = last > 0 ? last - 1 : 0; i < all.size(); ++i) {
        for (int slice : { 0, 1, n_slice - 1 })
            if (slice < n_slice && !all[i].graph->slices[slice].nodes.empty())
                prepare(*all[i].graph, slice);
    }
}

// The scheduler gets a slice of the graph: what goes in is a leaf, what comes out is kept. In
// place, both are the same memory: the last use of what came in is the sum that goes out.
void edgekv_slices::prepare(edgekv_graph & g, int slice) {
    auto & p = planned;
    p.graph = nullptr; // until all went well
    g.restore();
    p.nodes = g.slices[slice].nodes;
    for (auto * t : p.nodes) { // it may still point to where an earlier plan had it
        if (!t->view_src || t->view_src->op != GGML_OP_NONE) t->data = nullptr;
        t->buffer = nullptr;
    }
    p.leafs = g.inputs;
    // weights: the scheduler must know where they are
    for (auto * t : g.slices[slice].weights)
        if (t->buffer) p.leafs.push_back(t);
    p.moved.clear();
    std::unordered_set<const ggml_tensor *> moving(g.inputs.begin(), g.inputs.end());
    ggml_tensor *in = g.into(slice), *out = g.out_of(slice);
    for (auto * t : { in, out })
        if (t) {
            if (hidden->buffer()) {
                t->buffer = hidden->buffer();
                t->data = hidden->place(0);
                moving.insert(t);
            } else {
                t->buffer = nullptr;
                t->data = nullptr;
            }
        }
    if (out) out->flags |= GGML_TENSOR_FLAG_OUTPUT;
    if (in) {
        in->op = GGML_OP_NONE; // nobody looks at its sources any more
        in->flags = (in->flags & ~GGML_TENSOR_FLAG_OUTPUT) | GGML_TENSOR_FLAG_INPUT;
        p.leafs.push_back(in);
    }
    p.gf = *g.gf;
    p.gf.nodes = p.nodes.data();
    p.gf.n_nodes = (int) p.nodes.size();
    p.gf.leafs = p.leafs.data();
    p.gf.n_leafs = (int) p.leafs.size();
    p.gf.uid = 0;

    for (auto * t : p.nodes)
        if (t->view_src && moving.count(t->view_src)) p.moved.push_back(t);
    // the allocator compares counts and sizes, never topology: reserve anew for another slice
    ggml_backend_sched_reset(prompt.ctx->get_sched());
    if (!ggml_backend_sched_reserve(prompt.ctx->get_sched(), &p.gf)) throw std::bad_alloc();
}

void edgekv_slices::plan(edgekv_graph & g, int slice) {
    prepare(g, slice);
    g.restore_sources(); // reserving put the scheduler's copies there
    auto * sched = prompt.ctx->get_sched();
    if (!ggml_backend_sched_alloc_graph(sched, &planned.gf)) throw std::bad_alloc();
    if (prompt.on_cpu() && edgekv_switches::products())
        products.find(planned.gf,
            prompt.by_layer && (int64_t) prompt.tokens.size() > prompt.n_ubatch, prompt.most_work);
    planned.graph = &g;
    planned.slice = slice;
}

void edgekv_slices::run(const edgekv_chunk & c, int slice) {
    auto & ctx = *prompt.ctx;
    auto & g = *c.graph;
    const bool is_last = slice + 1 == prompt.n_slice();
    if (g.slices[slice].nodes.empty()) { // a last layer without rows or states
        if (hidden) hidden->drop(c.first, c.n_tokens);
        return;
    }
    chunks.bind(c);
    if (planned.graph != &g || planned.slice != slice) plan(g, slice);
    ggml_tensor *in = g.into(slice), *out = g.out_of(slice);
    for (auto * t : { in, out })
        if (t && hidden->buffer()) t->data = hidden->place(c.first);
    for (auto * t : planned.moved) t->data = (char *) t->view_src->data + t->view_offs;

    if (in && !hidden->load(c.first, c.n_tokens, in))
        throw edgekv_error { EDGEKV_FAILED,
            "the hidden states could not be read back from their file" };
    const edgekv_unrecorded graphs(edgekv_context::backends(ctx));
    ggml_status status;
    {
        edgekv_products::running as_ours(products, prompt.weights, prompt.levels);
        status = ctx.graph_compute(&planned.gf, true);
        // of what was stopped too: its memory is about to go
        ggml_backend_sched_synchronize(ctx.get_sched());
        as_ours.done = status == GGML_STATUS_SUCCESS;
    }
    if (status == GGML_STATUS_ABORTED)
        throw edgekv_error { EDGEKV_CANCELLED, "the computation was stopped" };
    if (status != GGML_STATUS_SUCCESS || !edgekv_devices_are_well(ctx)) {
        throw edgekv_error { EDGEKV_FAILED,
            "the GPU could not finish what it was given, perhaps for want of memory: "
            "load the model again with fewer layers there (-ngl) or smaller batches (-ub)" };
    }
    if (out && !hidden->save(c.first, c.n_tokens, out))
        throw edgekv_error { EDGEKV_FAILED,
            "the disk is full: the hidden states could not be written" };
    if (in && is_last) hidden->drop(c.first, c.n_tokens);
    if (auto * h = g.res->get_h_nextn(); h && is_last && g.has_hidden)
        edgekv_context::append_rows(ctx, h, prompt.last_hidden);
    if (is_last && c.n_outputs > 0) {
        const int64_t n_vocab = ctx.get_model().vocab.n_tokens();
        float * every = prompt.logits ? prompt.logits + c.first * n_vocab : nullptr;
        edgekv_context::take_logits(ctx, g.res->get_logits(), c.n_outputs, every);
    }
}

void edgekv_slices::clear() {
    planned = {};
    products = {};
    hidden.reset();
}
