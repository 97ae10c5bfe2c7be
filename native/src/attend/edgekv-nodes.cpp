// What both ways to attend put into a graph
#include "edgekv-nodes.h"
#include "edgekv-alibi.h"
#include "edgekv-op.h"
#include "edgekv-kernels.h"

#include "llama-graph.h"
#include "llama-hparams.h"

#include <cmath>

int edgekv_n_parts(int64_t n_tokens) { return n_tokens == 1 ? 16 : n_tokens <= 8 ? 8 : 2; }

// [d, n_head, n_tokens] -> one row per token and head
static ggml_tensor * as_rows(ggml_context * ctx, ggml_tensor * x) {
    if (x->nb[2] != x->nb[1] * x->ne[1]) x = ggml_cont(ctx, x);
    return ggml_view_2d(ctx, x, x->ne[0], x->ne[1] * x->ne[2], x->nb[1], 0);
}

void edgekv_store_rows(const llm_graph_context & g, const edgekv_tensors & t, ggml_tensor * k,
    ggml_tensor * v, ggml_tensor * idx) {
    ggml_build_forward_expand(g.gf, ggml_set_rows(g.ctx0, t.k, as_rows(g.ctx0, k), idx));
    if (t.v->view_src) return; // part of K
    ggml_build_forward_expand(g.gf, ggml_set_rows(g.ctx0, t.v, as_rows(g.ctx0, v), idx));
}

float edgekv_softcap(const llm_graph_context & g) {
    return g.hparams.attn_soft_cap ? g.hparams.f_attn_logit_softcapping : 0.0f;
}

ggml_tensor * edgekv_flash(const llm_graph_context & g, const edgekv_tensors & t, ggml_tensor * q,
    int64_t first, int64_t n, int n_head_kv, int64_t cap, ggml_tensor * mask, ggml_tensor * sinks,
    float scale, float max_bias) {
    auto view = [&](ggml_tensor * x) {
        return ggml_view_3d(
            g.ctx0, x, x->ne[0], n, n_head_kv, x->nb[1], cap * x->nb[1], first * x->nb[1]);
    };
    ggml_tensor * cur = ggml_flash_attn_ext(g.ctx0, ggml_permute(g.ctx0, q, 0, 2, 1, 3), view(t.k),
        view(t.v), mask, scale, max_bias, edgekv_softcap(g));
    ggml_flash_attn_ext_add_sinks(cur, sinks);
    ggml_prec_set_acc(cur, GGML_PREC_F32);
    return cur; // [d_v, n_head, n_tokens]
}

// heads of different length: one call each; with ALiBi each query head has one, because a call
// makes its slopes of its number of heads
ggml_tensor * edgekv_flash_heads(const llm_graph_context & g, const edgekv_tensors & t,
    const edgekv_layer & l, ggml_tensor * q, ggml_tensor * sinks, float scale,
    const std::vector<int64_t> & first, const std::vector<int64_t> & n,
    const std::vector<ggml_tensor *> & masks) {
    const int G = l.n_head / l.n_head_kv, n_at_once = l.max_bias != 0.0f ? 1 : G;
    ggml_tensor * out = nullptr;
    for (int h = 0; h < l.n_head; h += n_at_once) {
        const int k = h / G;
        ggml_tensor * qk = ggml_view_3d(
            g.ctx0, q, q->ne[0], n_at_once, q->ne[2], q->nb[1], q->nb[2], h * q->nb[1]);
        ggml_tensor * sk =
            sinks ? ggml_view_1d(g.ctx0, sinks, n_at_once, h * sinks->nb[0]) : nullptr;
        // one head's slope is 2^-max_bias
        const float max_bias =
            l.max_bias != 0.0f ? -log2f(edgekv_alibi_slope(l.max_bias, l.n_head, h)) : 0.0f;
        ggml_tensor * cur =
            edgekv_flash(g, t, qk, first[k], n[k], 1, n[k], masks[k], sk, scale, max_bias);
        out = out ? ggml_concat(g.ctx0, out, cur, 1) : cur;
    }
    return out;
}

void edgekv_attend_node(ggml_tensor * dst, int ith, int /*nth*/, void * /*userdata*/) {
    if (ith > 0) return; // only tests come here
    edgekv_op op;
    edgekv_rows rows;
    edgekv_queries qs;
    GGML_ASSERT(edgekv_op_get(dst, op));
    edgekv_op_inputs(dst, op, rows, qs);
    const int n = edgekv_n_parts(qs.n_tokens);
    const size_t n_floats = (size_t) qs.n_tokens * rows.n_head * (2 + rows.d_v);
    std::vector<float> parts(n * n_floats);
    for (int p = 0; p < n; ++p) edgekv_cpu().attend_part(&rows, &qs, parts.data(), p, n);
    if (qs.recalled) parts.insert(parts.end(), qs.recalled, qs.recalled + n_floats);
    edgekv_cpu().attend_combine(&rows, qs.n_tokens, parts.data(), (int) (parts.size() / n_floats),
        (float *) dst->data, 0, 1);
}
