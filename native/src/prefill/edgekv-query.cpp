// Queries as they were before positions turned them: from their mean and covariance follows what
// later tokens will ask, wherever they stand. llama.cpp's own graph says how a layer turns its
// queries; that part of it is walked backwards and, for later positions, repeated.
#include "edgekv-basis.h"
#include "edgekv-compute.h"
#include "edgekv-context.h"
#include "edgekv-error.h"
#include "edgekv-kernels.h"
#include "edgekv-observers.h"

#include "llama-graph.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// Whether all pairs of values turn by a token's one position. With several positions per token
// (M-RoPE) those of a text are equal, but for the last one, which is 0
static bool turns_alike(const ggml_tensor & rope) {
    return !(rope.op_params[2] & GGML_ROPE_TYPE_MROPE) || rope.op_params[11 + 3] == 0;
}

// from the query that attention gets back to the one that entered RoPE; unknown if there is
// anything else on the way
static edgekv_query_path trace(ggml_tensor * q, const edgekv_layer & l) {
    edgekv_query_path path;
    for (ggml_tensor * t = q; t;) {
        if (t->src[0] && ggml_nelements(t) != ggml_nelements(t->src[0]) && t->op != GGML_OP_MUL_MAT)
            return path;
        switch (t->op) {
            case GGML_OP_RESHAPE:
            case GGML_OP_VIEW:
            case GGML_OP_CONT: t = t->src[0]; break;
            case GGML_OP_SCALE: {
                float sb[2];
                memcpy(sb, t->op_params, sizeof(sb));
                if (sb[1] != 0.0f) return path;
                path.scale *= sb[0];
                t = t->src[0];
                break;
            }
            case GGML_OP_MUL: // whole keys meet queries without their scale
                if (!l.basis || t->src[1] != l.basis->query_scale.t) return path;
                t = t->src[0];
                break;
            case GGML_OP_MUL_MAT: // the rotation of quantised caches, applied to blocks of a head
                if (strcmp(t->src[0]->name, "attn_inp_k_rot") != 0 || path.rotation) return path;
                path.rotation = t->src[0];
                t = t->src[1];
                break;
            case GGML_OP_ROPE:
                if (!turns_alike(*t)) return path;
                path.rope = t;
                path.raw = t->src[0];
                return path;
            default: return path;
        }
    }
    return path;
}

static int64_t n_lower(int64_t d) { return d * (d + 1) / 2; } // of a triangle

static int64_t next_multiple(int64_t x, int64_t of) { return (x + of - 1) / of * of; }

ggml_tensor * edgekv_observers::capture_raw_queries(const llm_graph_context & g,
    const edgekv_layer & l, const edgekv_seen & seen, ggml_tensor * q) {
    const auto [a, b] = seen.queries;
    if (a == b || !l.selects()) return nullptr;
    auto & path = query_paths[l.il] = trace(q, l);
    if (!path.rope) return nullptr;
    const int64_t first = next_multiple(a, query_step),
                  n = next_multiple(b, query_step) / query_step - first / query_step;
    if (n == 0) return nullptr;
    ggml_tensor * x = path.raw;
    auto & raw = captured[capture_of[l.il]].raw_queries;
    if (!raw.t) // only now it is known that this layer's queries can be looked at
        raw = edgekv_matrix::make(ggml_backend_cpu_buffer_type(), GGML_TYPE_F32,
            (int64_t) l.d_k * l.n_head,
            next_multiple(most_wanted(EDGEKV_STAT_QUERIES), query_step) / query_step,
            "raw queries");
    ggml_tensor * to = raw.t;
    ggml_tensor * src = ggml_view_3d(
        g.ctx0, x, x->ne[0], x->ne[1], n, x->nb[1], query_step * x->nb[2], first * x->nb[2]);
    ggml_tensor * dst =
        ggml_view_3d(g.ctx0, to, x->ne[0], x->ne[1], n, x->ne[0] * sizeof(float), to->nb[1], 0);
    return ggml_cpy(g.ctx0, src, dst);
}

namespace {

// n queries of all heads, `step` floats apart, that join those of a tally (Chan's formula, so that
// large means lose nothing)
struct joining {
    const float * x;
    int64_t step, n, d, n_head, n_seen;
    float *mean, *m2;   // [n_head][d], [n_head][n_lower(d)]
    float *now, *delta; // [n_head][d] to work with: a thread of ggml's cannot throw
};

void join_head(const joining & j, int64_t h) {
    const int64_t d = j.d;
    const float * x = j.x + h * d;
    float *mean = j.mean + h * d, *m2 = j.m2 + h * n_lower(d);
    float *now = j.now + h * d, *delta = j.delta + h * d;
    std::fill_n(now, d, 0.0f);
    for (int64_t t = 0; t < j.n; ++t)
        for (int64_t i = 0; i < d; ++i) now[i] += x[t * j.step + i];
    const auto na = (float) j.n_seen, nb = (float) j.n, both = na * nb / (na + nb);
    for (int64_t i = 0; i < d; ++i) {
        now[i] /= nb;
        delta[i] = now[i] - mean[i];
        mean[i] += delta[i] * nb / (na + nb);
    }
    edgekv_cpu().moments(x, j.step, (int) j.n, (int) d, now, m2);
    for (int64_t i = 0; i < d; ++i)
        for (int64_t k = 0; k <= i; ++k) *m2++ += delta[i] * delta[k] * both;
}

void join_heads(ggml_tensor *, int ith, int nth, void * data) {
    const auto & j = *(const joining *) data;
    for (int64_t h = ith; h < j.n_head; h += nth) join_head(j, h);
}

} // namespace

// queries of tokens [begin, end) of span c join the tally
void edgekv_observers::tally_queries(const edgekv_layer & l, const edgekv_span & c, int64_t begin,
    int64_t end, int64_t every, edgekv_tally & tally) {
    if (!query_paths[l.il].rope) return;
    const int64_t first = next_multiple(begin - c.first, every),
                  n = next_multiple(end - c.first, every) / every - first / every;
    if (n == 0) return;
    const int64_t first_captured = next_multiple(seen(c).queries.first, query_step); // token
    const int64_t d = l.d_k, H = l.n_head, w = d * H;
    const auto * raw = (const float *) captured[capture_of[l.il]].raw_queries.t->data;
    if (tally.q_mean.empty()) {
        tally.q_mean.assign(w, 0.0f);
        tally.q_m2.assign(H * n_lower(d), 0.0f);
    }
    std::vector<float> work(2 * w);
    joining j { raw + (first - first_captured) / query_step * w, every / query_step * w, n, d, H,
        tally.q_seen, tally.q_mean.data(), tally.q_m2.data(), work.data(), work.data() + w };
    edgekv_compute(edgekv_context::cpu(*prompt.ctx), [&](ggml_context * c0) {
        return ggml_custom_4d(c0, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, join_heads,
            (int) std::min<int64_t>(H, 64), &j);
    });
    tally.q_seen += n;
}

void edgekv_observers::queries(int observer, int head, float * mean, float * cov) const {
    const auto & t = tally_of(observer);
    const auto & l = scratches.in_work();
    if (head < 0 || head >= l.n_head) throw edgekv_error { EDGEKV_INVALID, "no such query head" };
    if (t.q_mean.empty())
        throw edgekv_error {
            EDGEKV_UNSUPPORTED,
            "this model's queries are not turned by plain rotary positions, or they were not asked for"
        };
    const int64_t d = l.d_k;
    std::copy_n(t.q_mean.data() + head * d, d, mean);
    const float * m2 = t.q_m2.data() + head * n_lower(d);
    for (int64_t i = 0; i < d; ++i)
        for (int64_t j = 0; j <= i; ++j) cov[i * d + j] = cov[j * d + i] = *m2++ / (float) t.q_seen;
}

void edgekv_observers::drop_queries(int observer) {
    auto & t = const_cast<edgekv_tally &>(tally_of(observer));
    t.q_mean = {};
    t.q_m2 = {};
    edgekv_trim_heap(); // what they were looked at with
}

void edgekv_observers::rotation(int n_future, float * out) const {
    const auto & l = scratches.in_work();
    if (n_future < 1 || n_future > 1 << 20)
        throw edgekv_error { EDGEKV_INVALID, "give a number of later positions" };
    if (!query_paths[l.il].rope)
        throw edgekv_error { EDGEKV_UNSUPPORTED,
            "this model's queries are not turned by plain rotary positions" };
    const auto & mean = mean_turn(l, n_future);
    const double scale = (double) query_paths[l.il].scale * score_params[l.il].scale;
    const int64_t d = l.d_k;
    for (int64_t i = 0; i < d; ++i)
        for (int64_t j = 0; j < d; ++j) out[j * d + i] = (float) (mean[i * d + j] * scale);
}

const std::vector<double> & edgekv_observers::mean_turn(
    const edgekv_layer & l, int n_future) const {
    const auto & path = query_paths[l.il];
    const int64_t d = l.d_k;
    const ggml_tensor * factors = path.rope->src[2];
    if (turn.rope && turn.n_future == n_future && (int64_t) turn.mean.size() == d * d &&
        turn.rope->src[2] == factors &&
        memcmp(turn.rope->op_params, path.rope->op_params, sizeof(path.rope->op_params)) == 0)
        return turn.mean;
    std::vector<double> sum(d * d, 0.0);
    // a token has several positions
    const bool several = path.rope->op_params[2] & GGML_ROPE_TYPE_MROPE;
    // positions at once, as many as take 1 MiB
    const int step = (int) std::max<int64_t>(1, (1 << 18) / (d * d));
    for (int first = 0; first < n_future; first += step) {
        const int64_t n = std::min(step, n_future - first);
        ggml_tensor *basis = nullptr, *pos = nullptr, *ff = nullptr, *rot = nullptr;
        edgekv_compute(
            edgekv_context::cpu(*prompt.ctx),
            [&](ggml_context * c0) {
                basis = ggml_new_tensor_3d(c0, GGML_TYPE_F32, d, d, n);
                pos = ggml_new_tensor_1d(c0, GGML_TYPE_I32, several ? GGML_MROPE_SECTIONS * n : n);
                if (factors) ff = ggml_new_tensor_1d(c0, GGML_TYPE_F32, ggml_nelements(factors));
                const auto * op = path.rope->op_params;
                int sections[GGML_MROPE_SECTIONS];
                memcpy(sections, op + 11, sizeof(sections));
                ggml_tensor * y = several
                    ? ggml_rope_multi(
                          c0, basis, pos, ff, op[1], sections, op[2], 0, 1, 1, 0, 1, 0, 0)
                    : ggml_rope_ext(c0, basis, pos, ff, op[1], op[2], 0, 1, 1, 0, 1, 0, 0);
                memcpy(y->op_params, path.rope->op_params, sizeof(y->op_params));
                if (!path.rotation) return y;
                const int64_t m = std::lround(std::sqrt((double) key_rotation.size()));
                rot = ggml_new_tensor_2d(c0, GGML_TYPE_F32, m, m);
                return ggml_mul_mat(c0, rot, ggml_reshape_2d(c0, y, m, d * d * n / m));
            },
            [&] {
                auto * x = (float *) basis->data;
                for (int64_t p = 0; p < n; ++p)
                    for (int64_t i = 0; i < d; ++i)
                        for (int64_t j = 0; j < d; ++j) *x++ = i == j ? 1.0f : 0.0f;
                for (int64_t p = 0; p < ggml_nelements(pos); ++p) {
                    const int64_t at = prompt.pos0 + prompt.n_tokens + first + p % n;
                    ((int32_t *) pos->data)[p] = p < 3 * n ? (int32_t) at : 0;
                }
                if (ff) ggml_backend_tensor_get(factors, ff->data, 0, ggml_nbytes(ff));
                if (rot) memcpy(rot->data, key_rotation.data(), ggml_nbytes(rot));
            },
            [&](const ggml_tensor * out) {
                const auto * y = (const float *) out->data;
                for (int64_t p = 0; p < n; ++p)
                    for (int64_t i = 0; i < d * d; ++i) sum[i] += *y++;
            });
    }
    for (double & x : sum) x /= n_future;
    turn = { path.rope, n_future, std::move(sum) };
    return turn.mean;
}
