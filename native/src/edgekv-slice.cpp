// Running a slice of a graph: its inputs, the scheduler's plan, the hidden states in and out
#include "edgekv-backends.h"
#include "edgekv-context.h"
#include "edgekv-prefill.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <string>

// ---- plan: the scheduler gets a slice

void edgekv_graph::restore_sources() {
    for (size_t i = 0; i < sources.size(); ++i) std::copy_n(sources[i].begin(), GGML_MAX_SRC, gf->nodes[i]->src);
}

// as it was built, before a slice was planned
void edgekv_graph::restore() {
    restore_sources();
    for (size_t i = 0; i < resid.size(); ++i) {
        resid[i]->op     = resid_op[i];
        resid[i]->flags &= ~(GGML_TENSOR_FLAG_INPUT | GGML_TENSOR_FLAG_OUTPUT);
    }
}

// Without our kernels graphs grow with the rows in front of a chunk: a prompt that does not fit the device is better refused now.
void edgekv_prefill::reserve() {
    if (on_cpu()) return;
    const size_t last = (n_tokens + n_ubatch - 1)/n_ubatch - 1;
    for (size_t i = last > 0 ? last - 1 : 0; i < chunks.size(); ++i) {
        for (int slice : { 0, 1, n_slice() - 1 }) if (slice < n_slice()) prepare(*chunks[i].graph, slice);
    }
}

// the graph's inputs are this chunk's
void edgekv_prefill::bind(const edgekv_chunk & c) {
    auto & g = *c.graph;
    for (size_t i = 0; i < g.inputs.size(); ++i) g.inputs[i]->data = c.inputs[i];
    for (auto & [s, t] : g.rows) {
        if (!t->data) continue; // no layer stores rows there
        auto * x = (int64_t *) t->data;
        const int64_t n_head_kv = s->t.k->ne[1]/s->cap;
        for (int64_t i = 0; i < c.n_tokens; ++i) for (int64_t k = 0; k < n_head_kv; ++k) *x++ = k*s->cap + s->n_old + c.row + i;
    }
    for (auto & [l, t] : g.heads) {
        if (!t->data) continue;
        auto * x = (int32_t *) t->data;
        for (int64_t k = 0; k < l->n_head_kv; ++k) *x++ = (int32_t) (k*scratch_of(*l).cap + scratch_of(*l).n_old - l->len[k]);
        for (int64_t k = 0; k < l->n_head_kv; ++k) *x++ = (int32_t) (l->len[k] + c.row + c.n_tokens);
        for (int64_t i = 0; i < c.n_tokens && l->n_swa; ++i) *x++ = (int32_t) std::max<int64_t>(0, l->len[0] + c.row + i + 1 - l->n_swa);
    }
    for (auto & r : g.prompt_rows) {
        const auto & l = *r->layer;
        r->next = 0;
        for (int k = 0; k < l.n_head_kv; ++k) r->len[k] = (int32_t) (l.len[k] + c.row + c.n_tokens);
        for (size_t t = 0; t < r->start.size(); ++t) r->start[t] = (int32_t) std::max<int64_t>(0, l.len[0] + c.row + (int64_t) t + 1 - l.n_swa);
    }
}

// The scheduler gets a slice of the graph: what goes in is a leaf, what comes out is kept. In place, both are the same memory: the last
// use of what came in is the sum that goes out.
void edgekv_prefill::prepare(edgekv_graph & g, int slice) {
    auto & p = planned;
    p.graph = nullptr; // until all went well
    g.restore();
    std::vector<ggml_tensor *> replay;
    if (!slice_nodes(g, slice, p.nodes, replay)) throw edgekv_error { EDGEKV_FAILED, "the graph changed between chunks" };
    for (auto * t : replay) { // it may still point to where an earlier slice had it
        if (!t->view_src || t->view_src->op != GGML_OP_NONE) t->data = nullptr;
        t->buffer = nullptr;
    }
    p.leafs = g.inputs;
    for (int i = 0; i < g.gf->n_leafs; ++i) { // weights: the scheduler must know where they are
        ggml_tensor * t = g.gf->leafs[i];
        if (t->buffer && !(t->flags & GGML_TENSOR_FLAG_INPUT)) p.leafs.push_back(t);
    }
    p.moved.clear();
    std::unordered_set<const ggml_tensor *> moving(g.inputs.begin(), g.inputs.end());
    ggml_tensor * in = slice > 0 ? g.resid[slice - 1] : nullptr, * out = slice + 1 < n_slice() ? g.resid[slice] : nullptr;
    for (auto * t : { in, out }) if (t) {
        if (hidden->buffer()) { t->buffer = hidden->buffer(); t->data = hidden->place(0); moving.insert(t); }
        else                  { t->buffer = nullptr; t->data = nullptr; }
    }
    if (out) out->flags |= GGML_TENSOR_FLAG_OUTPUT;
    if (in) {
        in->op = GGML_OP_NONE; // nobody looks at its sources any more
        in->flags = (in->flags & ~GGML_TENSOR_FLAG_OUTPUT) | GGML_TENSOR_FLAG_INPUT;
        p.leafs.push_back(in);
    }
    p.gf = *g.gf;
    p.gf.nodes   = p.nodes.data();
    p.gf.n_nodes = (int) p.nodes.size();
    p.gf.leafs   = p.leafs.data();
    p.gf.n_leafs = (int) p.leafs.size();
    p.gf.uid     = 0;

    for (auto * t : p.nodes) if (t->view_src && moving.count(t->view_src)) p.moved.push_back(t);
    // the allocator compares counts and sizes, never topology: reserve anew for another slice
    ggml_backend_sched_reset(ctx->get_sched());
    if (!ggml_backend_sched_reserve(ctx->get_sched(), &p.gf)) throw std::bad_alloc();
}

void edgekv_prefill::plan(edgekv_graph & g, int slice) {
    prepare(g, slice);
    g.restore_sources(); // reserving put the scheduler's copies there
    if (!ggml_backend_sched_alloc_graph(ctx->get_sched(), &planned.gf)) throw std::bad_alloc();
    planned.graph = &g;
    planned.slice = slice;
}

void edgekv_prefill::run_slice(const edgekv_chunk & c, int slice) {
    auto & g = *c.graph;
    bind(c);
    if (planned.graph != &g || planned.slice != slice) plan(g, slice);
    ggml_tensor * in = slice > 0 ? g.resid[slice - 1] : nullptr, * out = slice + 1 < n_slice() ? g.resid[slice] : nullptr;
    for (auto * t : { in, out }) if (t && hidden->buffer()) t->data = hidden->place(c.first);
    for (auto * t : planned.moved) t->data = (char *) t->view_src->data + t->view_offs;

    if (in && !hidden->load(c.first, c.n_tokens, in)) throw edgekv_error { EDGEKV_FAILED, "the hidden states could not be read back from their file" };
    const edgekv_unrecorded graphs(edgekv_context::backends(*ctx));
    const ggml_status status = ctx->graph_compute(&planned.gf, true);
    ggml_backend_sched_synchronize(ctx->get_sched()); // of what was stopped too: its memory is about to go
    if (status == GGML_STATUS_ABORTED) throw edgekv_error { EDGEKV_CANCELLED, "the computation was stopped" };
    if (status != GGML_STATUS_SUCCESS || !edgekv_devices_are_well(*ctx)) {
        throw edgekv_error { EDGEKV_FAILED, "the GPU could not finish what it was given, perhaps for want of memory: "
                                            "load the model again with fewer layers there (-ngl) or smaller batches (-ub)" };
    }
    if (out && !hidden->save(c.first, c.n_tokens, out)) throw edgekv_error { EDGEKV_FAILED, "the disk is full: the hidden states could not be written" };
    if (slice + 1 == n_slice() && c.has_output) {
        edgekv_context::take_logits(*ctx, g.res->get_logits());
    }
}
