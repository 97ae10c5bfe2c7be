// attend, as graph nodes, for a prompt that is read layer by layer: rows go to the scratch
#include "edgekv-device.h"
#include "edgekv-nodes.h"
#include "edgekv-op.h"
#include "edgekv-prefill.h"
#include "cpu/edgekv-cpu.h"

#include "llama-graph.h"

#include <algorithm>

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
    return equal ? edgekv_flash(g, s.t, q, first[0], n[0], l.n_head_kv, s.cap, masks[0], sinks,
                                scale, l.max_bias)
                 : edgekv_flash_heads(g, s.t, l, q, sinks, scale, first, n, masks);
}

// one node over all heads, where the device's flash attention takes no such rows (iq4_nl on CUDA, say) and a kernel of ours does: slower than
// flash attention would be, but the rows need not come to the CPU. Else null
static ggml_tensor * attend_prefill_node(const llm_graph_context & g, edgekv_prefill & p, const edgekv_layer & l, ggml_tensor * q, ggml_tensor * sinks, float scale) {
    const edgekv_scratch & s = p.scratch_of(l);
    const auto * device = edgekv_device::of(l.buft);
    if (!device || p.store->graph_attend || l.max_bias != 0.0f || p.flash_takes(g, l, q) || !device->attends(l.type_k, l.type_v, l.d_k, l.d_v)) return nullptr;
    if (!device->takes_at_once((double) g.n_tokens*l.n_head*(l.d_k + l.d_v)*p.rows_in_head(l))) return nullptr;
    if (q->nb[0] != sizeof(float)) q = ggml_cont(g.ctx0, q);
    ggml_tensor * a[] = { q, s.t.k, s.t.v, p.heads_input(g, l), sinks };
    ggml_tensor * node = ggml_custom_4d(g.ctx0, GGML_TYPE_F32, l.d_v, l.n_head, g.n_tokens, 1, a, 5,
                                          edgekv_attend_node, GGML_N_TASKS_MAX, nullptr);
    edgekv_op_set(node, l.n_head_kv, scale, edgekv_softcap(g), 0.0f);
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

ggml_tensor * edgekv_prefill::attend(const llm_graph_context & g, const edgekv_layer & l,
                                     const edgekv_attention & a) {
    ggml_tensor * q = a.q;
    const edgekv_scratch & s = scratch_of(l);
    edgekv_store_rows(g, s.t, a.k, a.v, row_input(g, s));
    if (ggml_tensor * copy = capture_queries(g, l, q, a.scale, edgekv_softcap(g), a.sinks)) {
        ggml_build_forward_expand(g.gf, copy);
    }
    if (ggml_tensor * copy = capture_raw_queries(g, l, q)) ggml_build_forward_expand(g.gf, copy);

    if (!by_kernel(l)) {
        ggml_tensor * node = attend_prefill_node(g, *this, l, q, a.sinks, a.scale);
        return node ? node : attend_prefill_graph(g, *this, l, q, a.sinks, a.scale);
    }

    edgekv_prompt_rows * r = prompt_rows(l);
    r->rows.scale = a.scale;
    r->rows.softcap = edgekv_softcap(g);
    if (q->nb[0] != sizeof(float)) q = ggml_cont(g.ctx0, q);
    ggml_tensor * src[] = { q, s.t.k, s.t.v, a.sinks };
    return ggml_custom_4d(g.ctx0, GGML_TYPE_F32, l.d_v, l.n_head, g.n_tokens, 1, src,
                          a.sinks ? 4 : 3, attend_prompt, GGML_N_TASKS_MAX, r);
}
