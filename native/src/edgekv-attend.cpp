// attend, as graph nodes: what build_attn does instead of copying K/V into a cache and attending to all of it.
// Two situations: a prompt that is read layer by layer (edgekv-prefill.h says where its rows lie), and new tokens behind the store.
#include "edgekv-hooks.h"
#include "edgekv-device.h"
#include "edgekv-op.h"
#include "edgekv-prefill.h"
#include "edgekv-store.h"
#include "edgekv-table.h"
#include "cpu/edgekv-cpu.h"

#include "llama-batch.h"
#include "llama-graph.h"
#include "llama-hparams.h"
#include "llama-cparams.h"

#include <algorithm>
#include <cstring>
#include <set>

static int n_parts(int64_t n_tokens) { return n_tokens == 1 ? 16 : n_tokens <= 8 ? 8 : 2; }

// [d, n_head, n_tokens] -> one row per token and head
static ggml_tensor * as_rows(ggml_context * ctx, ggml_tensor * x) {
    if (x->nb[2] != x->nb[1]*x->ne[1]) x = ggml_cont(ctx, x);
    return ggml_view_2d(ctx, x, x->ne[0], x->ne[1]*x->ne[2], x->nb[1], 0);
}

static void store_rows(const llm_graph_context & g, const edgekv_tensors & t, ggml_tensor * k, ggml_tensor * v, ggml_tensor * idx) {
    ggml_build_forward_expand(g.gf, ggml_set_rows(g.ctx0, t.k, as_rows(g.ctx0, k), idx));
    ggml_build_forward_expand(g.gf, ggml_set_rows(g.ctx0, t.v, as_rows(g.ctx0, v), idx));
}

static float softcap(const llm_graph_context & g) { return g.hparams.attn_soft_cap ? g.hparams.f_attn_logit_softcapping : 0.0f; }

// flash attention of q [d, n_head, n_tokens] over n rows of each of n_head_kv heads; with max_bias a mask has minus the distances (ALiBi)
static ggml_tensor * flash(const llm_graph_context & g, const edgekv_tensors & t, ggml_tensor * q, int64_t first, int64_t n, int n_head_kv, int64_t cap,
        ggml_tensor * mask, ggml_tensor * sinks, float scale, float max_bias) {
    auto view = [&](ggml_tensor * x) {
        return ggml_view_3d(g.ctx0, x, x->ne[0], n, n_head_kv, x->nb[1], cap*x->nb[1], first*x->nb[1]);
    };
    ggml_tensor * cur = ggml_flash_attn_ext(g.ctx0, ggml_permute(g.ctx0, q, 0, 2, 1, 3), view(t.k), view(t.v), mask, scale, max_bias, softcap(g));
    ggml_flash_attn_ext_add_sinks(cur, sinks);
    ggml_prec_set_acc(cur, GGML_PREC_F32);
    return cur; // [d_v, n_head, n_tokens]
}

// heads of different length: one call each; with ALiBi each query head has one, because a call makes its slopes of its number of heads
static ggml_tensor * flash_heads(const llm_graph_context & g, const edgekv_tensors & t, const edgekv_layer & l, ggml_tensor * q, ggml_tensor * sinks, float scale,
        const std::vector<int64_t> & first, const std::vector<int64_t> & n, const std::vector<ggml_tensor *> & masks) {
    const int G = l.n_head/l.n_head_kv, n_at_once = l.max_bias != 0.0f ? 1 : G;
    ggml_tensor * out = nullptr;
    for (int h = 0; h < l.n_head; h += n_at_once) {
        const int k = h/G;
        ggml_tensor * qk = ggml_view_3d(g.ctx0, q, q->ne[0], n_at_once, q->ne[2], q->nb[1], q->nb[2], h*q->nb[1]);
        ggml_tensor * sk = sinks ? ggml_view_1d(g.ctx0, sinks, n_at_once, h*sinks->nb[0]) : nullptr;
        const float max_bias = l.max_bias != 0.0f ? -log2f(edgekv_alibi_slope(l.max_bias, l.n_head, h)) : 0.0f; // one head's slope is 2^-max_bias
        ggml_tensor * cur = flash(g, t, qk, first[k], n[k], 1, n[k], masks[k], sk, scale, max_bias);
        out = out ? ggml_concat(g.ctx0, out, cur, 1) : cur;
    }
    return out;
}

// ---- a prompt, layer by layer

// how many rows in front of the n from `begin` on go along, masked
static int64_t hidden_rows(int64_t begin, int64_t n, int row_step) {
    const int64_t pad = begin % row_step, more = (EDGEKV_FLASH_ROWS - (n + pad) % EDGEKV_FLASH_ROWS) % EDGEKV_FLASH_ROWS;
    return more % row_step == 0 && more <= begin - pad ? pad + more : pad;
}

// without a kernel of ours: ordinary flash attention, heads of different length one by one
static ggml_tensor * attend_prefill_graph(const llm_graph_context & g, edgekv_prefill & p, const edgekv_layer & l, ggml_tensor * q, ggml_tensor * sinks, float scale) {
    const edgekv_scratch & s = p.scratch_of(l);
    std::vector<int64_t> first(l.n_head_kv), n(l.n_head_kv);
    std::vector<ggml_tensor *> masks(l.n_head_kv);
    bool equal = true;
    for (int h = 0; h < l.n_head_kv; ++h) {
        const int64_t before = l.len[h] + p.chunk_row();            // rows in front of this chunk
        const int64_t skip   = l.n_swa ? std::max<int64_t>(0, before - l.n_swa + 1) : 0; // rows that no token of it sees
        const int64_t begin = s.n_old - l.len[h] + skip, n_seen = before + g.n_tokens - skip, pad = hidden_rows(begin, n_seen, l.row_step);
        first[h] = h*s.cap + begin - pad;
        n[h]     = n_seen + pad;
        equal    = equal && l.len[h] == l.len[0] && (l.max_bias == 0.0f || l.len[h] == 0);
        masks[h] = equal && h > 0 ? masks[0] : p.mask_view(g, l, h, before - skip, n[h] - pad, pad);
    }
    return equal ? flash(g, s.t, q, first[0], n[0], l.n_head_kv, s.cap, masks[0], sinks, scale, l.max_bias)
                 : flash_heads(g, s.t, l, q, sinks, scale, first, n, masks);
}

// what the node of edgekv-op.h computes, on the CPU
static void attend_node(ggml_tensor * dst, int ith, int nth, void * userdata);

// one node over all heads, where the device's flash attention takes no such rows (iq4_nl on CUDA, say) and a kernel of ours does: slower than
// flash attention would be, but the rows need not come to the CPU. Else null
static ggml_tensor * attend_prefill_node(const llm_graph_context & g, edgekv_prefill & p, const edgekv_layer & l, ggml_tensor * q, ggml_tensor * sinks, float scale) {
    const edgekv_scratch & s = p.scratch_of(l);
    const auto * device = edgekv_device::of(l.buft);
    if (!device || p.store->graph_attend || l.max_bias != 0.0f || p.flash_takes(g, l, q) || !device->attends(l.type_k, l.type_v, l.d_k, l.d_v)) return nullptr;
    if (!device->takes_at_once((double) g.n_tokens*l.n_head*(l.d_k + l.d_v)*p.rows_in_head(l))) return nullptr;
    if (q->nb[0] != sizeof(float)) q = ggml_cont(g.ctx0, q);
    ggml_tensor * a[] = { q, s.t.k, s.t.v, p.heads_input(g, l), sinks };
    ggml_tensor * node = ggml_custom_4d(g.ctx0, GGML_TYPE_F32, l.d_v, l.n_head, g.n_tokens, 1, a, 5, attend_node, GGML_N_TASKS_MAX, nullptr);
    edgekv_op_set(node, l.n_head_kv, scale, softcap(g), 0.0f);
    return node;
}

// src: q [d_k, n_head, n_tokens], k, v, (sinks); dst [d_v, n_head, n_tokens]
static void attend_prompt(ggml_tensor * dst, int, int nth, void * userdata) {
    const auto & prompt = *(const edgekv_prompt_rows *) userdata;
    edgekv_rows rows = prompt.rows;
    const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * sinks = dst->src[3];
    rows.k = (const char *) k->data; rows.nb_k = k->nb[1];
    rows.v = (const char *) v->data; rows.nb_v = v->nb[1];
    rows.sinks = sinks ? (const float *) sinks->data : nullptr;
    const edgekv_queries qs = { (const float *) q->data, (int64_t) (q->nb[2]/sizeof(float)), (int64_t) (q->nb[1]/sizeof(float)), (int) q->ne[2], nullptr,
                                prompt.start.empty() ? nullptr : prompt.start.data() };
    edgekv_cpu_attend_prompt(&rows, &qs, (float *) dst->data, prompt.norm, &prompt.next, nth);
}

static ggml_tensor * attend_prefill(const llm_graph_context & g, edgekv_prefill & p, const edgekv_layer & l, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * sinks, float scale) {
    const edgekv_scratch & s = p.scratch_of(l);
    store_rows(g, s.t, k, v, p.row_input(g, s));
    if (ggml_tensor * copy = p.capture_queries(g, l, q, scale, softcap(g), sinks)) ggml_build_forward_expand(g.gf, copy);
    if (ggml_tensor * copy = p.capture_raw_queries(g, l, q)) ggml_build_forward_expand(g.gf, copy);

    if (!p.by_kernel(l)) {
        ggml_tensor * node = attend_prefill_node(g, p, l, q, sinks, scale);
        return node ? node : attend_prefill_graph(g, p, l, q, sinks, scale);
    }

    edgekv_prompt_rows * r = p.prompt_rows(l);
    r->rows.scale = scale;
    r->rows.softcap = softcap(g);
    if (q->nb[0] != sizeof(float)) q = ggml_cont(g.ctx0, q);
    ggml_tensor * a[] = { q, s.t.k, s.t.v, sinks };
    return ggml_custom_4d(g.ctx0, GGML_TYPE_F32, l.d_v, l.n_head, g.n_tokens, 1, a, sinks ? 4 : 3, attend_prompt, GGML_N_TASKS_MAX, r);
}

// ---- new tokens behind the store

namespace {

// Row numbers of the new tokens, and (graph path) masks. One object per graph.
struct attend_input : llm_graph_input_i {
    struct per_layer {
        edgekv_layer * l = nullptr;
        ggml_tensor *  idx = nullptr;          // I64 [n_head_kv*n_tokens]
        edgekv_table * table = nullptr;        // idx and lengths are in it, for a node that a device computes
        std::vector<ggml_tensor *> masks;      // F16 [n, n_tokens] per head, graph path only
        std::vector<int64_t> first;            // of the masked rows, within the head
        // read by the CPU kernel while it runs
        float scale = 1, cap = 0;
        int n_tokens = 0, parts = 1;
        std::vector<int32_t> start;            // first visible row of each token (sliding window)
    };

    edgekv_store * store;
    ggml_backend_sched_t sched;
    uint64_t version;
    bool fixed = true;                         // shapes do not depend on the lengths: the graph may be used again
    std::vector<std::unique_ptr<per_layer>> layers;

    attend_input(edgekv_store * s, ggml_backend_sched_t sched) : store(s), sched(sched), version(s->version) {}

    void set_input(const llama_ubatch * ubatch) override {
        const int n = ubatch->n_tokens;
        for (auto & pl : layers) set_layer(*pl, ubatch, n);
        std::set<edgekv_table *> tables;
        for (auto & pl : layers) if (pl->table) tables.insert(pl->table);
        if (!tables.empty()) ggml_backend_sched_synchronize(sched); // the step before may still read them
        for (auto * t : tables) t->upload();
        store->n_past = ubatch->pos[n - 1] + 1;
    }

    bool can_reuse(const llm_graph_params & params) override {
        return fixed && store->version == version && !layers.empty() && layers[0]->n_tokens == (int) params.ubatch.n_tokens;
    }

private:
    static void set_layer(per_layer & pl, const llama_ubatch * ubatch, int n) {
        edgekv_layer & l = *pl.l;
        std::vector<int64_t> idx((size_t) n*l.n_head_kv);
        for (int t = 0; t < n; ++t) for (int k = 0; k < l.n_head_kv; ++k) idx[(size_t) t*l.n_head_kv + k] = l.first[k] + l.len[k] + t;
        for (int k = 0; k < l.n_head_kv; ++k) {
            for (int t = 0; t < n; ++t) l.pos[k].push_back(ubatch->pos[t]);
            l.len[k] += n;
        }
        if (l.n_swa) {
            pl.start.resize(n);
            const auto & pos = l.pos[0]; // in order, the same for all heads
            for (int t = 0; t < n; ++t) {
                pl.start[t] = (int32_t) (std::upper_bound(pos.begin(), pos.end(), ubatch->pos[t] - l.n_swa) - pos.begin());
            }
        }
        if (pl.table) pl.table->set(l, idx, pl.start);
        else          ggml_backend_tensor_set(pl.idx, idx.data(), 0, ggml_nbytes(pl.idx));
        for (size_t k = 0; k < pl.masks.size(); ++k) if (pl.masks[k]) set_mask(pl, (int) k, n);
    }

    static void set_mask(per_layer & pl, int k, int n) {
        ggml_tensor * m = pl.masks[k];
        const edgekv_layer & l = *pl.l;
        std::vector<ggml_fp16_t> x(ggml_nelements(m), ggml_fp32_to_fp16(-INFINITY));
        for (int t = 0; t < n; ++t) {
            const int64_t lo = l.n_swa ? pl.start[t] : 0, hi = l.len[k] - (n - 1 - t);
            for (int64_t r = lo; r < hi; ++r) x[(size_t) t*m->ne[0] + r] = ggml_fp32_to_fp16(l.max_bias != 0.0f ? (float) (l.pos[k][r] - l.pos[k][hi - 1]) : 0.0f);
        }
        ggml_backend_tensor_set(m, x.data(), 0, ggml_nbytes(m));
    }
};

edgekv_rows rows_of(const attend_input::per_layer & pl, const ggml_tensor * k, const ggml_tensor * v, const ggml_tensor * sinks) {
    const edgekv_layer & l = *pl.l;
    return { (const char *) k->data, (const char *) v->data, k->nb[1], v->nb[1], k->type, v->type, l.d_k, l.d_v, l.n_head, l.n_head_kv,
             l.first.data(), l.len.data(), pl.scale, pl.cap, sinks ? (const float *) sinks->data : nullptr,
             l.row_pos.t ? (const float *) l.row_pos.t->data : nullptr, l.max_bias };
}

// src: q [d_k, n_head, n_tokens], k, v, (sinks); dst [2 + d_v, n_head, n_tokens, parts]
void attend_part(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto & pl = *(const attend_input::per_layer *) userdata;
    const ggml_tensor * q = dst->src[0];
    const edgekv_rows rows = rows_of(pl, dst->src[1], dst->src[2], nullptr);
    const edgekv_queries qs = { (const float *) q->data, (int64_t) (q->nb[2]/sizeof(float)), (int64_t) (q->nb[1]/sizeof(float)), (int) q->ne[2], nullptr,
                                pl.start.empty() ? nullptr : pl.start.data() };
    for (int p = ith; p < pl.parts; p += nth) edgekv_cpu_attend_part(&rows, &qs, (float *) dst->data, p, pl.parts);
}

void attend_combine(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto & pl = *(const attend_input::per_layer *) userdata;
    const edgekv_rows rows = rows_of(pl, dst->src[1], dst->src[2], dst->src[3]);
    edgekv_cpu_attend_combine(&rows, pl.n_tokens, (const float *) dst->src[0]->data, pl.parts, (float *) dst->data, ith, nth);
}

} // namespace

static attend_input * input_of(const llm_graph_context & g, edgekv_store * store) {
    for (auto & i : g.res->inputs) if (auto * a = dynamic_cast<attend_input *>(i.get())) return a;
    return (attend_input *) g.res->add_input(std::make_unique<attend_input>(store, g.sched));
}

static ggml_tensor * attend_cpu(const llm_graph_context & g, attend_input::per_layer & pl, ggml_tensor * q, ggml_tensor * sinks) {
    const edgekv_layer & l = *pl.l;
    if (q->nb[0] != sizeof(float)) q = ggml_cont(g.ctx0, q);
    ggml_tensor * a[] = { q, l.t.k, l.t.v };
    ggml_tensor * parts = ggml_custom_4d(g.ctx0, GGML_TYPE_F32, 2 + l.d_v, l.n_head, g.n_tokens, pl.parts, a, 3, attend_part, GGML_N_TASKS_MAX, &pl);
    ggml_tensor * b[] = { parts, l.t.k, l.t.v, sinks };
    return ggml_custom_4d(g.ctx0, GGML_TYPE_F32, l.d_v, l.n_head, g.n_tokens, 1, b, sinks ? 4 : 3, attend_combine, GGML_N_TASKS_MAX, &pl);
}

static void attend_node(ggml_tensor * dst, int ith, int /*nth*/, void * /*userdata*/) {
    if (ith > 0) return; // only tests come here
    edgekv_op op;
    edgekv_rows rows;
    edgekv_queries qs;
    GGML_ASSERT(edgekv_op_get(dst, op));
    edgekv_op_inputs(dst, op, rows, qs);
    const int n = n_parts(qs.n_tokens);
    std::vector<float> parts((size_t) n*qs.n_tokens*rows.n_head*(2 + rows.d_v));
    for (int p = 0; p < n; ++p) edgekv_cpu_attend_part(&rows, &qs, parts.data(), p, n);
    edgekv_cpu_attend_combine(&rows, qs.n_tokens, parts.data(), n, (float *) dst->data, 0, 1);
}

// one node for all heads, if the device of the layer's rows has a kernel for it; else null
static ggml_tensor * attend_device(const llm_graph_context & g, attend_input::per_layer & pl, ggml_tensor * q, ggml_tensor * sinks, edgekv_table & table, bool always) {
    const edgekv_layer & l = *pl.l;
    const auto * device = always ? nullptr : edgekv_device::of(l.buft);
    if (!always && !(device && device->attends(l.type_k, l.type_v, l.d_k, l.d_v))) return nullptr;
    if (q->nb[0] != sizeof(float)) q = ggml_cont(g.ctx0, q);
    ggml_tensor * a[] = { q, l.t.k, l.t.v, table.heads(g.ctx0, l, g.n_tokens), sinks, l.row_pos.t };
    ggml_tensor * node = ggml_custom_4d(g.ctx0, GGML_TYPE_F32, l.d_v, l.n_head, g.n_tokens, 1, a, 6, attend_node, GGML_N_TASKS_MAX, nullptr);
    edgekv_op_set(node, l.n_head_kv, pl.scale, pl.cap, l.max_bias);
    return always || ggml_backend_dev_supports_op(ggml_backend_buft_get_device(l.buft), node) ? node : nullptr;
}

static edgekv_table & table_of(edgekv_store & store, ggml_backend_buffer_type_t buft) {
    auto & t = store.tables[buft];
    if (!t) t = std::make_unique<edgekv_table>(edgekv_table::make(store, buft));
    return *t;
}

static ggml_tensor * attend_graph(const llm_graph_context & g, attend_input & in, attend_input::per_layer & pl, ggml_tensor * q, ggml_tensor * sinks) {
    const edgekv_layer & l = *pl.l;
    in.fixed = false;
    std::vector<int64_t> first(l.n_head_kv), n(l.n_head_kv);
    pl.masks.assign(l.n_head_kv, nullptr);
    for (int k = 0; k < l.n_head_kv; ++k) {
        first[k] = l.first[k];
        n[k] = std::min<int64_t>(l.len[k] + g.n_tokens, std::max(l.cap[k], 1)); // a graph that is only reserved has no room yet
        if (g.n_tokens == 1 && !l.n_swa && l.max_bias == 0.0f) continue;
        pl.masks[k] = ggml_new_tensor_2d(g.ctx0, GGML_TYPE_F16, n[k], g.n_tokens);
        ggml_set_input(pl.masks[k]);
    }
    return flash_heads(g, l.t, l, q, sinks, pl.scale, first, n, pl.masks);
}

static ggml_tensor * attend_store(const llm_graph_context & g, edgekv_store * store, edgekv_layer & l, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * sinks, float scale) {
    attend_input & in = *input_of(g, store);
    in.layers.push_back(std::make_unique<attend_input::per_layer>());
    auto & pl = *in.layers.back();
    pl.l = &l; pl.scale = scale; pl.cap = softcap(g); pl.n_tokens = (int) g.n_tokens; pl.parts = n_parts(g.n_tokens);
    const bool on_cpu = ggml_backend_buft_is_host(l.buft);
    if (g.n_tokens <= edgekv_table::MAX_TOKENS && (on_cpu ? store->node_attend : !store->graph_attend)) {
        edgekv_table & table = table_of(*store, l.buft);
        if (ggml_tensor * node = attend_device(g, pl, q, sinks, table, store->node_attend)) {
            pl.table = &table;
            store_rows(g, l.t, k, v, table.new_rows(g.ctx0, l, g.n_tokens));
            return node;
        }
    }
    pl.idx = ggml_new_tensor_1d(g.ctx0, GGML_TYPE_I64, (int64_t) l.n_head_kv*g.n_tokens);
    ggml_set_input(pl.idx);
    store_rows(g, l.t, k, v, pl.idx);
    return on_cpu && !store->graph_attend ? attend_cpu(g, pl, q, sinks) : attend_graph(g, in, pl, q, sinks);
}

ggml_tensor * edgekv_build_attend(const llm_graph_context & g, edgekv_store * store, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * sinks,
        float kq_scale, int il) {
    edgekv_layer & l = *store->layers[il];
    store->sched = g.sched;
    ggml_tensor * cur = store->active ? attend_prefill(g, *store->active, l, q, k, v, sinks, kq_scale)
                                      : attend_store(g, store, l, q, k, v, sinks, kq_scale);
    cur = ggml_reshape_2d(g.ctx0, cur, cur->ne[0]*cur->ne[1], cur->ne[2]);
    ggml_build_forward_expand(g.gf, cur);
    return cur;
}
