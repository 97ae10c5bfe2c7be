// attend, as graph nodes, for a prompt that is read layer by layer: rows go to the scratch
#include "edgekv-device.h"
#include "edgekv-nodes.h"
#include "edgekv-op.h"
#include "edgekv-prefill.h"
#include "edgekv-kernels.h"

#include "llama-graph.h"

#include <algorithm>

// how many rows in front of the n from `begin` on go along, masked
static int64_t hidden_rows(int64_t begin, int64_t n, int row_step) {
    const int64_t pad = begin % row_step,
                  more = (EDGEKV_FLASH_ROWS - (n + pad) % EDGEKV_FLASH_ROWS) % EDGEKV_FLASH_ROWS;
    return more % row_step == 0 && more <= begin - pad ? pad + more : pad;
}

// without a kernel of ours: ordinary flash attention, heads of different length one by one
static ggml_tensor * attend_prefill_graph(const llm_graph_context & g, edgekv_prefill & p,
    const edgekv_layer & l, const edgekv_attention & a) {
    const edgekv_scratch & s = p.scratches.of(l);
    const int64_t row = p.chunks.at_work().row;
    std::vector<int64_t> first(l.n_head_kv), n(l.n_head_kv);
    std::vector<ggml_tensor *> masks(l.n_head_kv);
    bool equal = true;
    for (int h = 0; h < l.n_head_kv; ++h) {
        const int64_t before = l.len[h] + row;            // rows in front of this chunk
        const int64_t skip = p.prompt.first_seen(l, row); // no token of it sees those before
        const int64_t begin = s.at(row) - before + skip, n_seen = before + g.n_tokens - skip,
                      pad = hidden_rows(begin, n_seen, l.row_step);
        first[h] = h * s.cap + begin - pad;
        n[h] = n_seen + pad;
        equal = equal && l.len[h] == l.len[0] && (l.max_bias == 0.0f || l.len[h] == 0);
        masks[h] =
            equal && h > 0 ? masks[0] : p.masks.view(g, l, row, h, before - skip, n[h] - pad, pad);
    }
    return equal ? edgekv_flash(g, s.t, a.q, first[0], n[0], l.n_head_kv, s.cap, masks[0], a.sinks,
                       a.scale, l.max_bias)
                 : edgekv_flash_heads(g, s.t, l, a.q, a.sinks, a.scale, first, n, masks);
}

// whether the device's flash attention takes this layer's rows
static bool flash_takes(const llm_graph_context & g, const edgekv_layer & l, ggml_tensor * q) {
    // of some head sizes CUDA takes only multiples of 256
    const int64_t N = l.row_step > 1 ? 255 : EDGEKV_FLASH_ROWS;
    const ggml_context_ptr ctx { ggml_init({ 8 * ggml_tensor_overhead(), nullptr, true }) };
    if (!ctx) throw std::bad_alloc();
    auto like = [&](ggml_type type, int64_t d, int64_t n, int64_t n_head) {
        return ggml_new_tensor_3d(ctx.get(), type, d, n, n_head);
    };
    ggml_tensor * mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, N, g.n_tokens);
    ggml_tensor * node = ggml_flash_attn_ext(ctx.get(), like(q->type, l.d_k, g.n_tokens, l.n_head),
        like(l.type_k, l.d_k, N, l.n_head_kv), like(l.type_v, l.d_v, N, l.n_head_kv), mask, 1.0f,
        0.0f, 0.0f);
    return ggml_backend_dev_supports_op(ggml_backend_buft_get_device(l.buft), node);
}

// one node over all heads, where the device's flash attention takes no such rows (iq4_nl on CUDA,
// say) and a kernel of ours does: slower than flash attention would be, but the rows need not come
// to the CPU. Else null
static ggml_tensor * attend_prefill_node(const llm_graph_context & g, edgekv_prefill & p,
    const edgekv_layer & l, const edgekv_attention & a) {
    ggml_tensor * q = a.q;
    const edgekv_scratch & s = p.scratches.of(l);
    const int64_t n_rows = l.len_max() + p.prompt.n_rows; // in a head at most, when all was read
    const auto * device = l.kernels();
    if (!device || p.prompt.store->graph_attend || l.max_bias != 0.0f) return nullptr;
    if (flash_takes(g, l, q) || !device->attends(l.type_k, l.type_v, l.d_k, l.d_v)) return nullptr;
    const double n_multiplications = (double) g.n_tokens * l.n_head * (l.d_k + l.d_v) * n_rows;
    if (!device->takes_at_once(n_multiplications)) return nullptr;
    if (q->nb[0] != sizeof(float)) q = ggml_cont(g.ctx0, q);
    ggml_tensor * src[] = { q, s.t.k, s.t.v, p.chunks.heads_input(g, l), a.sinks };
    ggml_tensor * node = ggml_custom_4d(g.ctx0, GGML_TYPE_F32, l.d_v, l.n_head, g.n_tokens, 1, src,
        5, edgekv_attend_node, GGML_N_TASKS_MAX, nullptr);
    edgekv_op_set(node, l.n_head_kv, a.scale, edgekv_softcap(g), 0.0f);
    return node;
}

// src: q [d_k, n_head, n_tokens], k, v, (sinks); dst [d_v, n_head, n_tokens]
static void attend_prompt(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const int64_t begin = ggml_time_us();
    const auto & prompt = *(const edgekv_prompt_rows *) userdata;
    edgekv_rows rows = prompt.rows;
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2], *sinks = dst->src[3];
    rows.k = (const char *) k->data;
    rows.nb_k = k->nb[1];
    rows.v = (const char *) v->data;
    rows.nb_v = v->nb[1];
    rows.sinks = sinks ? (const float *) sinks->data : nullptr;
    const edgekv_queries qs = { (const float *) q->data, (int64_t) (q->nb[2] / sizeof(float)),
        (int64_t) (q->nb[1] / sizeof(float)), (int) q->ne[2], nullptr,
        prompt.start.empty() ? nullptr : prompt.start.data() };
    edgekv_cpu().attend_prompt(&rows, &qs, (float *) dst->data, prompt.norm, &prompt.next, nth);
    if (ith > 0) return;
    double n_seen = 0; // pairs of a token and a row
    for (int k = 0; k < rows.n_head_kv; ++k)
        for (int t = 0; t < qs.n_tokens; ++t) {
            int lo, hi;
            edgekv::visible(rows, qs, t, k, lo, hi);
            n_seen += std::max(0, hi - lo);
        }
    prompt.work->n += n_seen * (rows.n_head / rows.n_head_kv) * (rows.d_k + rows.d_v);
    prompt.work->ms += (double) (ggml_time_us() - begin) / 1e3;
}

ggml_tensor * edgekv_prefill::attend(
    const llm_graph_context & g, const edgekv_layer & stored, const edgekv_attention & a) {
    ggml_tensor * q = a.q;
    const edgekv_layer & l = prompt.layer(stored.il);
    const edgekv_scratch & s = scratches.of(l);
    const auto & seen = chunks.seen();
    if (a.k) edgekv_store_rows(g, s.t, a.k, a.v, chunks.row_input(g, s));
    const edgekv_score_params params = { a.scale, edgekv_softcap(g), a.sinks };
    for (ggml_tensor * copy : { observers.capture_queries(g, l, a.il, seen, q, params),
             a.k ? observers.capture_raw_queries(g, l, seen, q) : nullptr }) {
        if (copy) ggml_build_forward_expand(g.gf, copy);
    }

    if (!prompt.by_kernel(l)) {
        ggml_tensor * node = attend_prefill_node(g, *this, l, a);
        return node ? node : attend_prefill_graph(g, *this, l, a);
    }

    edgekv_prompt_rows * r = chunks.prompt_rows(l, a.il);
    r->rows.scale = a.scale;
    r->rows.softcap = edgekv_softcap(g);
    if (q->nb[0] != sizeof(float)) q = ggml_cont(g.ctx0, q);
    ggml_tensor * src[] = { q, s.t.k, s.t.v, a.sinks };
    ggml_tensor * node = ggml_custom_4d(g.ctx0, GGML_TYPE_F32, l.d_v, l.n_head, g.n_tokens, 1, src,
        a.sinks ? 4 : 3, attend_prompt, GGML_N_TASKS_MAX, r);
    if (r->norm) chunks.observes(node);
    return node;
}
