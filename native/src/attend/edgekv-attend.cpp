// attend, as graph nodes: what build_attn does instead of copying K/V into a cache and attending to
// all of it. Here for new tokens behind the store; a prompt is attended to as its reader says.
#include "edgekv-basis.h"
#include "edgekv-device.h"
#include "edgekv-hooks.h"
#include "edgekv-nodes.h"
#include "edgekv-op.h"
#include "edgekv-store.h"
#include "edgekv-table.h"
#include "edgekv-kernels.h"

#include "llama-batch.h"
#include "llama-graph.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace {

// In a step of a few tokens each attends as if it was alone: over parts of its own rows, which
// begin elsewhere for the next token. So a token has the same bits whether others follow it or not.
bool each_alone(int64_t n_tokens) { return n_tokens <= EDGEKV_ALIKE_MAX; }

// Row numbers of the new tokens, and (graph path) masks. One object per graph.
struct attend_input : llm_graph_input_i {
    struct per_layer {
        const edgekv_layer * l = nullptr;
        ggml_tensor * idx = nullptr; // I64 [n_head_kv*n_tokens]; null: no rows come in
        // idx and lengths are in it, for a node that a device computes
        edgekv_table * table = nullptr;
        std::vector<ggml_tensor *> masks; // F16 [n, n_tokens] per head, graph path only
        std::vector<int64_t> first;       // of the masked rows, within the head
        // read by the CPU kernel while it runs
        float scale = 1, cap = 0;
        int n_tokens = 0, parts = 1;
        edgekv_archive * archive = nullptr; // one more part is recalled from it
        std::vector<int32_t> start;         // first visible row of each token (sliding window)
        // of a token's parts, the recalled one included
        size_t n_floats() const {
            return (size_t) (parts + (archive != nullptr)) * l->n_head * (2 + l->d_v);
        }
    };

    edgekv_store * store;
    ggml_backend_sched_t sched;
    uint64_t version;
    // shapes do not depend on the lengths: the graph may be used again
    bool fixed = true;
    int first = 0; // of its tokens, in a step of several conversations
    std::vector<std::unique_ptr<per_layer>> layers;

    attend_input(edgekv_store * s, ggml_backend_sched_t sched)
        : store(s), sched(sched), version(s->version) {}

    void set_input(const llama_ubatch * ubatch) override {
        for (auto & pl : layers) set_layer(*pl, ubatch->pos + first, pl->n_tokens);
        std::set<edgekv_table *> tables;
        for (auto & pl : layers)
            if (pl->table) tables.insert(pl->table);
        // the step before may still read them
        if (!tables.empty()) ggml_backend_sched_synchronize(sched);
        for (auto * t : tables) t->upload();
    }

    bool can_reuse(const llm_graph_params & params) override {
        return fixed && store->version == version && store->several.empty() && !layers.empty() &&
            layers[0]->n_tokens == (int) params.ubatch.n_tokens;
    }

private:
    // of a layer that has the n new rows already
    static void set_layer(per_layer & pl, const llama_pos * at, int n) {
        const edgekv_layer & l = *pl.l;
        std::vector<int64_t> idx((size_t) n * l.n_head_kv);
        for (int t = 0; t < n; ++t)
            for (int k = 0; k < l.n_head_kv; ++k) {
                idx[(size_t) t * l.n_head_kv + k] = l.waits()
                    ? (int64_t) k * l.cap_recent + l.n_recent - n + t
                    : l.first[k] + l.len[k] - n + t;
            }
        if (l.n_swa) {
            pl.start.resize(n);
            const auto & pos = l.pos[0]; // in order, the same for all heads
            for (int t = 0; t < n; ++t) {
                const llama_pos oldest = l.oldest_seen(at[t]);
                pl.start[t] =
                    (int32_t) (std::lower_bound(pos.begin(), pos.end(), oldest) - pos.begin());
            }
        }
        if (pl.table) pl.table->set(l, idx, pl.start);
        else if (pl.idx) ggml_backend_tensor_set(pl.idx, idx.data(), 0, ggml_nbytes(pl.idx));
        for (size_t k = 0; k < pl.masks.size(); ++k)
            if (pl.masks[k]) set_mask(pl, (int) k, n);
    }

    static void set_mask(per_layer & pl, int k, int n) {
        ggml_tensor * m = pl.masks[k];
        const edgekv_layer & l = *pl.l;
        std::vector<ggml_fp16_t> x(ggml_nelements(m), ggml_fp32_to_fp16(-INFINITY));
        for (int t = 0; t < n; ++t) {
            const int64_t lo = l.n_swa ? pl.start[t] : 0, hi = l.len[k] - (n - 1 - t);
            for (int64_t r = lo; r < hi; ++r)
                x[(size_t) t * m->ne[0] + r] = ggml_fp32_to_fp16(
                    l.max_bias != 0.0f ? (float) (l.pos[k][r] - l.pos[k][hi - 1]) : 0.0f);
        }
        ggml_backend_tensor_set(m, x.data(), 0, ggml_nbytes(m));
    }
};

edgekv_rows rows_of(const attend_input::per_layer & pl, const ggml_tensor * k,
    const ggml_tensor * v, const ggml_tensor * sinks) {
    const edgekv_layer & l = *pl.l;
    return { (const char *) k->data, (const char *) v->data, k->nb[1], v->nb[1], k->type, v->type,
        l.d_k, l.d_v, l.n_head, l.n_head_kv, l.first.data(), l.len.data(), pl.scale, pl.cap,
        sinks ? (const float *) sinks->data : nullptr,
        l.row_pos.t ? (const float *) l.row_pos.t->data : nullptr, l.max_bias };
}

// the rows that token t sees of a step of few, as if none came after it
edgekv_rows rows_until(const edgekv_rows & all, int n_after, std::vector<int32_t> & len) {
    edgekv_rows rows = all;
    len.resize(rows.n_head_kv);
    for (int k = 0; k < rows.n_head_kv; ++k) len[k] = rows.len[k] - n_after;
    rows.len = len.data();
    if (rows.n_recent) rows.n_recent -= n_after;
    return rows;
}

edgekv_queries queries_of(const attend_input::per_layer & pl, const ggml_tensor * q) {
    return { (const float *) q->data, (int64_t) (q->nb[2] / sizeof(float)),
        (int64_t) (q->nb[1] / sizeof(float)), (int) q->ne[2], nullptr,
        pl.start.empty() ? nullptr : pl.start.data() };
}

// What each token recalls, as a part of its attention; out: the first token's, those of others lie
// `stride` floats apart. Each finds its rows as if it was alone
void recall_part(const attend_input::per_layer & pl, const edgekv_queries & qs, float * out,
    size_t stride, int ith, int nth) {
    const edgekv_layer & l = *pl.l;
    const int n_query = l.n_head / l.n_head_kv;
    for (int i = ith; i < pl.n_tokens * l.n_head_kv; i += nth) {
        const int t = i / l.n_head_kv, k = i % l.n_head_kv, h = k * n_query;
        edgekv_recalled a = pl.archive->recalled(l, k);
        a.scale = pl.scale;
        a.softcap = pl.cap;
        pl.archive->count(a,
            edgekv_cpu().recall(&a, qs.q + t * qs.stride_t + h * qs.stride_h, qs.stride_h, n_query,
                out + t * stride + (size_t) h * (2 + l.d_v)));
    }
}

// The same as a node, beside attention on a device: src q; dst [2 + d_v, n_head, n_tokens]. Index
// and archive are in main memory, so queries come here and what is recalled goes there, not its
// rows
void recall_here(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto & pl = *(const attend_input::per_layer *) userdata;
    recall_part(
        pl, queries_of(pl, dst->src[0]), (float *) dst->data, dst->nb[2] / sizeof(float), ith, nth);
}

// src: q [d_k, n_head, n_tokens], k, v, (sinks); dst [2 + d_v, n_head, n_tokens, parts], of few
// tokens [2 + d_v, n_head, parts, n_tokens]
void attend_part(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto & pl = *(const attend_input::per_layer *) userdata;
    const ggml_tensor * q = dst->src[0];
    edgekv_rows rows = rows_of(pl, dst->src[1], dst->src[2], nullptr);
    if (pl.l->n_recent) {
        rows.recent_k = (const char *) dst->src[3]->data;
        rows.recent_v = (const char *) dst->src[4]->data;
        rows.n_recent = pl.l->n_recent;
        rows.cap_recent = pl.l->cap_recent;
    }
    const edgekv_queries qs = queries_of(pl, q);
    if (!each_alone(pl.n_tokens)) {
        for (int p = ith; p < pl.parts; p += nth)
            edgekv_cpu().attend_part(&rows, &qs, (float *) dst->data, p, pl.parts);
        return;
    }
    std::vector<int32_t> len;
    for (int i = ith; i < pl.n_tokens * pl.parts; i += nth) {
        const int t = i / pl.parts;
        const edgekv_rows own = rows_until(rows, pl.n_tokens - 1 - t, len);
        const edgekv_queries one = { qs.q + t * qs.stride_t, qs.stride_t, qs.stride_h, 1, nullptr,
            qs.start ? qs.start + t : nullptr };
        edgekv_cpu().attend_part(
            &own, &one, (float *) dst->data + t * pl.n_floats(), i % pl.parts, pl.parts);
    }
    const size_t behind = (size_t) pl.parts * rows.n_head * (2 + rows.d_v);
    if (pl.archive) recall_part(pl, qs, (float *) dst->data + behind, pl.n_floats(), ith, nth);
}

void attend_combine(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto & pl = *(const attend_input::per_layer *) userdata;
    const edgekv_rows rows = rows_of(pl, dst->src[1], dst->src[2], dst->src[3]);
    const int n = each_alone(pl.n_tokens) ? 1 : pl.n_tokens,
              n_parts = pl.parts + (pl.archive != nullptr);
    const auto * parts = (const float *) dst->src[0]->data;
    for (int t = 0; t < pl.n_tokens; t += n)
        edgekv_cpu().attend_combine(&rows, n, parts + t * pl.n_floats(), n_parts,
            (float *) dst->data + (size_t) t * rows.n_head * rows.d_v, ith, nth);
}

} // namespace

static attend_input * input_of(const llm_graph_context & g, edgekv_store * store) {
    for (auto & i : g.res->inputs) {
        auto * a = dynamic_cast<attend_input *>(i.get());
        if (a && a->store == store) return a;
    }
    return (attend_input *) g.res->add_input(std::make_unique<attend_input>(store, g.sched));
}

static ggml_tensor * attend_cpu(const llm_graph_context & g, attend_input::per_layer & pl,
    ggml_tensor * q, ggml_tensor * sinks) {
    const edgekv_layer & l = *pl.l;
    if (q->nb[0] != sizeof(float)) q = ggml_cont(g.ctx0, q);
    ggml_tensor * a[] = { q, l.t.k, l.t.v, l.recent.k, l.recent.v };
    ggml_tensor * parts = ggml_custom_4d(g.ctx0, GGML_TYPE_F32, 2 + l.d_v, l.n_head, pl.n_tokens,
        pl.parts + (pl.archive != nullptr), a, l.recent.k ? 5 : 3, attend_part, GGML_N_TASKS_MAX,
        &pl);
    ggml_tensor * b[] = { parts, l.t.k, l.t.v, sinks };
    return ggml_custom_4d(g.ctx0, GGML_TYPE_F32, l.d_v, l.n_head, pl.n_tokens, 1, b, sinks ? 4 : 3,
        attend_combine, GGML_N_TASKS_MAX, &pl);
}

// one node for all heads, if the device of the layer's rows has a kernel for it; else null
static ggml_tensor * attend_device(const llm_graph_context & g, attend_input::per_layer & pl,
    ggml_tensor * q, ggml_tensor * sinks, edgekv_table & table, bool always) {
    const edgekv_layer & l = *pl.l;
    const auto * device = always ? nullptr : l.kernels();
    if (!always && !(device && device->attends(l.type_k, l.type_v, l.d_k, l.d_v))) return nullptr;
    if (q->nb[0] != sizeof(float)) q = ggml_cont(g.ctx0, q);
    ggml_tensor * recalled = pl.archive
        ? ggml_custom_4d(g.ctx0, GGML_TYPE_F32, 2 + l.d_v, l.n_head, g.n_tokens, 1, &q, 1,
              recall_here, GGML_N_TASKS_MAX, &pl)
        : nullptr;
    ggml_tensor * a[] = { q, l.t.k, l.t.v, table.heads(g.ctx0, l, g.n_tokens), sinks, l.row_pos.t,
        recalled };
    ggml_tensor * node = ggml_custom_4d(g.ctx0, GGML_TYPE_F32, l.d_v, l.n_head, g.n_tokens, 1, a, 7,
        edgekv_attend_node, GGML_N_TASKS_MAX, nullptr);
    edgekv_op_set(node, l.n_head_kv, pl.scale, pl.cap, l.max_bias);
    return always || ggml_backend_dev_supports_op(ggml_backend_buft_get_device(l.buft), node)
        ? node
        : nullptr;
}

static edgekv_table & table_of(edgekv_store & store, ggml_backend_buffer_type_t buft) {
    auto & t = store.tables[buft];
    if (!t) t = std::make_unique<edgekv_table>(edgekv_table::make(store.layers, buft));
    return *t;
}

static ggml_tensor * attend_graph(const llm_graph_context & g, attend_input & in,
    attend_input::per_layer & pl, ggml_tensor * q, ggml_tensor * sinks) {
    const edgekv_layer & l = *pl.l;
    in.fixed = false;
    std::vector<int64_t> first(l.n_head_kv), n(l.n_head_kv);
    pl.masks.assign(l.n_head_kv, nullptr);
    for (int k = 0; k < l.n_head_kv; ++k) {
        first[k] = l.first[k];
        n[k] = std::max(l.len[k], 1); // a graph that is only reserved may have no rows yet
        if (g.n_tokens == 1 && !l.n_swa && l.max_bias == 0.0f) continue;
        pl.masks[k] = ggml_new_tensor_2d(g.ctx0, GGML_TYPE_F16, n[k], g.n_tokens);
        ggml_set_input(pl.masks[k]);
    }
    return edgekv_flash_heads(g, l.t, l, q, sinks, pl.scale, first, n, pl.masks);
}

static ggml_tensor * attend_store(const llm_graph_context & g, edgekv_store * store,
    const edgekv_layer & l, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * sinks,
    float scale) {
    attend_input & in = *input_of(g, store);
    const int64_t n_tokens = q->ne[2];
    in.layers.push_back(std::make_unique<attend_input::per_layer>());
    auto & pl = *in.layers.back();
    pl.l = &l;
    pl.scale = scale;
    pl.cap = edgekv_softcap(g);
    pl.n_tokens = (int) n_tokens;
    pl.parts = edgekv_n_parts(each_alone(n_tokens) ? 1 : n_tokens);
    if (each_alone(n_tokens) && store->archive && store->archive->recalls(l))
        pl.archive = store->archive.get();
    const bool on_cpu = ggml_backend_buft_is_host(l.buft);
    if (n_tokens <= edgekv_table::MAX_TOKENS &&
        (on_cpu ? store->node_attend : !store->graph_attend)) {
        edgekv_table & table = table_of(*store, l.buft);
        if (ggml_tensor * node = attend_device(g, pl, q, sinks, table, store->node_attend)) {
            pl.table = &table;
            if (k) edgekv_store_rows(g, l.t, k, v, table.new_rows(g.ctx0, l, g.n_tokens));
            return node;
        }
    }
    if (k) {
        pl.idx = ggml_new_tensor_1d(g.ctx0, GGML_TYPE_I64, (int64_t) l.n_head_kv * n_tokens);
        ggml_set_input(pl.idx);
        // a graph that is only reserved comes before such rows
        const bool waits = l.waits() && l.recent.k;
        edgekv_store_rows(g, waits ? l.recent : l.t, k, v, pl.idx);
    }
    return on_cpu && !store->graph_attend ? attend_cpu(g, pl, q, sinks)
                                          : attend_graph(g, in, pl, q, sinks);
}

// the same for a step of several conversations, whose tokens attend to rows of a store each
static ggml_tensor * attend_several(const llm_graph_context & g, const edgekv_store * store,
    int il_rows, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * sinks,
    float scale) {
    const auto token = [&](ggml_tensor * x, int t) {
        return x ? ggml_view_3d(g.ctx0, x, x->ne[0], x->ne[1], 1, x->nb[1], x->nb[2], t * x->nb[2])
                 : nullptr;
    };
    ggml_tensor * out = nullptr;
    for (int t = 0; t < (int) g.n_tokens; ++t) {
        edgekv_store * own = store->several[g.ubatch.seq_id[t][0]];
        own->sched = g.sched;
        auto & in = *input_of(g, own);
        in.first = t;
        in.fixed = false;
        ggml_tensor * cur = attend_store(
            g, own, *own->layers[il_rows], token(q, t), token(k, t), token(v, t), sinks, scale);
        out = out ? ggml_concat(g.ctx0, out, cur, 2) : cur;
    }
    return out;
}

// latent attention gathers latent values [d_v, n_head, n_tokens]: each head makes its own of them
static ggml_tensor * from_latent(
    const llm_graph_context & g, ggml_tensor * v_mla, ggml_tensor * gathered) {
    ggml_tensor * by_head = ggml_permute(g.ctx0, gathered, 0, 2, 1, 3);
    ggml_tensor * values = ggml_mul_mat(g.ctx0, v_mla, by_head);
    return ggml_cont(g.ctx0, ggml_permute(g.ctx0, values, 0, 2, 1, 3));
}

void edgekv_scale(const llm_graph_context & g, const edgekv_store * store, int il, ggml_tensor ** q,
    ggml_tensor ** k) {
    if (!store) return;
    const edgekv_layer & l = *store->layers[store->layers[il]->reads];
    if (!l.basis) return;
    *q = ggml_mul(g.ctx0, *q, l.basis->query_scale.t);
    if (*k) *k = ggml_mul(g.ctx0, *k, l.basis->key_scale.t);
}

ggml_tensor * edgekv_build_attend(const llm_graph_context & g, edgekv_store * store,
    ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * sinks, ggml_tensor * v_mla,
    float kq_scale, int il) {
    const edgekv_layer & l = *store->layers[store->layers[il]->reads];
    store->sched = g.sched;
    if (k && l.basis && l.basis->key_centre.t) k = ggml_sub(g.ctx0, k, l.basis->key_centre.t);
    ggml_tensor * cur = store->active
        ? store->active->attend(g, l, { il, q, k, v, sinks, kq_scale })
        : store->several.empty()
        ? attend_store(g, store, l, q, k, v, sinks, kq_scale)
        : attend_several(g, store, store->layers[il]->reads, q, k, v, sinks, kq_scale);
    if (v_mla) cur = from_latent(g, v_mla, cur);
    cur = ggml_reshape_2d(g.ctx0, cur, cur->ne[0] * cur->ne[1], cur->ne[2]);
    ggml_build_forward_expand(g.gf, cur);
    return cur;
}
