// score, while a prompt is read: column statistics of the observed queries over the layer in work
#include "edgekv-compute.h"
#include "edgekv-context.h"
#include "edgekv-device.h"
#include "edgekv-error.h"
#include "edgekv-observers.h"
#include "edgekv-kernels.h"

#include <algorithm>

namespace {

// len, n_after: of the softmax; those of the columns leave out the rows of a piece, which nobody
// asks about
struct score_job {
    edgekv_rows rows;
    edgekv_queries queries;
    edgekv_columns columns;
    const int32_t *columns_len, *columns_after;
    const float * norm;
    std::atomic<int32_t> next { 0 };
};

void score_norm(ggml_tensor * dst, int, int nth, void * data) {
    auto & j = *(score_job *) data;
    edgekv_cpu().attend_prompt(&j.rows, &j.queries, nullptr, (float *) dst->data, &j.next, nth);
}

void score_columns(ggml_tensor * dst, int ith, int nth, void * data) {
    const auto & j = *(const score_job *) data;
    auto rows = j.rows;
    auto queries = j.queries;
    rows.len = j.columns_len;
    queries.n_after = j.columns_after;
    edgekv_cpu().score_columns(
        &rows, &queries, j.norm ? j.norm : (const float *) dst->src[0]->data, &j.columns, ith, nth);
}

// the columns, behind the norm if attention did not leave it
ggml_tensor * score_nodes(ggml_context * ctx, score_job & job) {
    ggml_tensor * norm = job.norm
        ? nullptr
        : ggml_custom_4d(ctx, GGML_TYPE_F32, 2, job.rows.n_head, job.queries.n_tokens, 1, nullptr,
              0, score_norm, GGML_N_TASKS_MAX, &job);
    return ggml_custom_4d(
        ctx, GGML_TYPE_F32, 1, 1, 1, 1, &norm, norm ? 1 : 0, score_columns, GGML_N_TASKS_MAX, &job);
}

} // namespace

void edgekv_observers::score(const edgekv_layer & l, int il, const edgekv_span & c, int64_t begin,
    int64_t end, edgekv_tally & tally, uint32_t stats) {
    const auto & s = scratches.of(l);
    const auto & capture = captured[capture_of[il]];
    // row0: behind the old rows
    const int64_t n_scored = s.cap * l.n_head_kv, at = begin - c.first, row0 = c.row + at;
    const int64_t q0 = at - seen(c).columns.first; // of the captured queries
    const int G = l.n_head / l.n_head_kv, n_q = (int) (end - begin);
    auto want = [&](uint32_t stat, std::vector<float> & x, int64_t n) {
        if ((stats & stat) && x.empty()) x.assign(n, 0.0f);
    };
    want(EDGEKV_STAT_MEAN, tally.sum, n_scored);
    want(EDGEKV_STAT_MAX, tally.max, n_scored);
    want(EDGEKV_STAT_ENTROPY, tally.entropy, n_scored);
    want(EDGEKV_STAT_VAR, tally.mean, G * n_scored);
    want(EDGEKV_STAT_VAR, tally.m2, G * n_scored);
    // the last rows are those of a piece
    const auto n_piece = (int32_t) std::max<int64_t>(0, row0 + n_q - prompt.n_tokens);
    std::vector<int32_t> first(l.n_head_kv), len(l.n_head_kv), columns_len(l.n_head_kv),
        n_after(n_q), columns_after(n_q);
    for (int k = 0; k < l.n_head_kv; ++k) {
        first[k] = (int32_t) s.origin(l, k, 0);
        len[k] = (int32_t) (l.len[k] + row0 + n_q);
        columns_len[k] = len[k] - n_piece;
    }
    for (int t = 0; t < n_q; ++t) {
        n_after[t] = n_q - 1 - t;
        columns_after[t] = std::max(0, n_after[t] - n_piece);
    }

    const auto * device = scorer(l);
    std::vector<char> host; // K of one layer, if it lies on a device that has no kernel for it
    const char * k = (const char *) s.t.k->data;
    if (!device && !ggml_backend_buffer_is_host(s.t.buf.get())) {
        host.resize(ggml_nbytes(s.t.k));
        ggml_backend_tensor_get(s.t.k, host.data(), 0, host.size());
        k = host.data();
    }
    std::vector<float> sinks;
    const auto & sp = score_params[il];
    if (sp.sinks) {
        sinks.resize(l.n_head);
        ggml_backend_tensor_get(sp.sinks, sinks.data(), 0, sinks.size() * sizeof(float));
    }

    score_job job;
    job.rows = { k, nullptr, s.t.k->nb[1], 0, s.shape.type_k, s.shape.type_v, l.d_k, l.d_v,
        l.n_head, l.n_head_kv, first.data(), len.data(), sp.scale, sp.softcap,
        sinks.empty() ? nullptr : sinks.data(), s.pos.empty() ? nullptr : s.pos.data(), l.max_bias,
        prompt.rounded };
    const int64_t width = (int64_t) l.d_k * l.n_head;
    const auto * q = (const float *) capture.queries.t->data + q0 * width;
    job.queries = { q, width, l.d_k, n_q, n_after.data(), nullptr };
    job.columns = tally.columns(n_scored);
    job.norm = capture.norm.empty() ? nullptr : capture.norm.data() + 2 * l.n_head * at;
    job.columns_len = columns_len.data();
    job.columns_after = columns_after.data();
    if (device) {
        if (!tally.on_device) tally.there.begin(l.buft, job.columns, G);
        tally.on_device = true;
        tally.there.at.n_seen = tally.n_seen;
        // those of a piece's own rows too
        device->score_columns(l.buft, scratches.device_work, job.rows, job.queries, tally.there.at);
    } else {
        edgekv_compute(edgekv_context::cpu(*prompt.ctx),
            [&](ggml_context * c0) { return score_nodes(c0, job); });
    }
    tally.n_seen += n_q;
}

const edgekv_device * edgekv_observers::scorer(const edgekv_layer & l) {
    const auto * device = l.kernels();
    return device && device->takes(l.type_k, l.d_k) ? device : nullptr;
}

void edgekv_observers::stat(int observer, edgekv_stat which, float * out) const {
    const auto & t = tally_of(observer);
    const auto & l = scratches.in_work();
    const auto & s = scratches.of(l);
    const int64_t n_out = l.len_max() + prompt.n_tokens, n_all_rows = s.cap * l.n_head_kv;
    const int G = l.n_head / l.n_head_kv;
    const std::vector<float> * x = which == EDGEKV_STAT_MEAN ? &t.sum
        : which == EDGEKV_STAT_MAX                           ? &t.max
        : which == EDGEKV_STAT_ENTROPY                       ? &t.entropy
        : which == EDGEKV_STAT_VAR                           ? &t.m2
                                                             : nullptr;
    if (!x || x->empty()) throw edgekv_error { EDGEKV_INVALID, "this statistic was not asked for" };
    for (int k = 0; k < l.n_head_kv; ++k) {
        const int64_t from = s.origin(l, k, 0), n = l.len[k] + prompt.n_tokens;
        float * o = out + k * n_out;
        std::fill(o + n, o + n_out, 0.0f);
        for (int64_t j = 0; j < n; ++j) {
            float y = (*x)[from + j];
            if (which == EDGEKV_STAT_MEAN) y /= t.n_seen;
            if (which == EDGEKV_STAT_VAR) {
                for (int g = 1; g < G; ++g) y += (*x)[g * n_all_rows + from + j];
                y /= (float) G * t.n_seen;
            }
            o[j] = y;
        }
    }
}
