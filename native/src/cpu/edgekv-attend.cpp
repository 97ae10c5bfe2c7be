// attend: attention over KV heads of different length. The definition of correct is
//     out[t][h] = sum_r softmax_r(scale * q[t][h].k[r]) v[r]   over the rows that token t sees in
//     head h's KV head
// This is for few tokens (decoding): parts of equal rows, whatever heads they fall into, then one
// fold; so the work is even and the result does not depend on the number of threads. For many
// tokens see edgekv-prompt.h.
#include "edgekv-aligned.h"
#include "edgekv-tile.h"

#include <cstring>

using namespace edgekv;

namespace {

// running softmax of some queries of one KV head: o[i] = maximum, sum, weighted values
struct queries_block {
    std::vector<const float *> q;
    std::vector<float *> o, values, s;
    std::vector<const float *> p;
    std::vector<int> lo, hi;      // visible rows of each query
    std::vector<float> slope, at; // ALiBi: of its head; token of its last row
    // registers of 64 bytes, loaded across two cache lines, would take twice as long
    aligned_floats logits_room, tile_room;
    float * tile = nullptr;
    int n = 0, lo_min = 0, hi_max = 0;

    // the queries of tokens [t0, t1) in KV head k; the state of (t, h) lies at state(t, h)
    template <typename F>
    void set(
        const edgekv_rows & rows, const edgekv_queries & qs, int k, int t0, int t1, F && state) {
        const int G = rows.n_head / rows.n_head_kv;
        n = (t1 - t0) * G;
        for (auto * x : { &o, &values, &s }) x->resize(n);
        q.resize(n);
        p.resize(n);
        lo.resize(n);
        hi.resize(n);
        slope.resize(n);
        at.resize(n);
        float * logits = logits_room.get((size_t) n * EDGEKV_TILE);
        tile = tile_room.get((size_t) EDGEKV_TILE * std::max(rows.d_k, rows.d_v));
        lo_min = INT32_MAX;
        hi_max = 0;
        for (int i = 0; i < n; ++i) {
            const int t = t0 + i / G, h = k * G + i % G;
            visible(rows, qs, t, k, lo[i], hi[i]);
            lo_min = std::min(lo_min, lo[i]);
            hi_max = std::max(hi_max, hi[i]);
            if (rows.max_bias != 0.0f && lo[i] < hi[i]) {
                slope[i] = edgekv_alibi_slope(rows.max_bias, rows.n_head, h);
                at[i] = rows.pos[rows.first[k] + hi[i] - 1];
            }
            q[i] = qs.q + t * qs.stride_t + h * qs.stride_h;
            o[i] = state(t, h);
            values[i] = o[i] + 2;
            s[i] = logits + (size_t) i * EDGEKV_TILE;
            p[i] = s[i];
        }
    }

    // rows [r, r + n) of head k, all rounded or all recent
    void load(const edgekv_rows & rows, const char * t, ggml_type type, size_t nb, int d,
        const char * recent, int k, int r, int n) {
        const int seam = rows.len[k] - rows.n_recent;
        if (r < seam) return edgekv_cpu_rows_to_f32(type, t, nb, rows.first[k] + r, n, d, tile);
        edgekv_cpu_rows_to_f32(GGML_TYPE_F16, recent, d * sizeof(ggml_fp16_t),
            (int64_t) k * rows.cap_recent + r - seam, n, d, tile);
    }

    // fold the n_rows logits in s (rows r..) into the running softmax and the value sums
    void fold(const edgekv_rows & rows, int k, int r, int n_rows) {
        for (int i = 0; i < n; ++i) {
            const int a = std::max(lo[i] - r, 0), b = std::min(hi[i] - r, n_rows);
            if (a >= b) {
                memset(s[i], 0, n_rows * sizeof(float));
                continue;
            }
            if (rows.max_bias != 0.0f)
                for (int j = a; j < b; ++j)
                    s[i][j] += slope[i] * (rows.pos[rows.first[k] + r + j] - at[i]);
            const float m = tile_max(s[i] + a, b - a, o[i][0]);
            if (m > o[i][0]) {
                const float c = o[i][0] == -INFINITY ? 0.0f : expf(o[i][0] - m);
                o[i][0] = m;
                o[i][1] *= c;
                ggml_vec_scale_f32(rows.d_v, values[i], c);
            }
            for (int j = 0; j < a; ++j) s[i][j] = 0;
            for (int j = b; j < n_rows; ++j) s[i][j] = 0;
            o[i][1] += (float) ggml_vec_soft_max_f32(b - a, s[i] + a, s[i] + a, m);
        }
        load(rows, rows.v, rows.type_v, rows.nb_v, rows.d_v, rows.recent_v, k, r, n_rows);
        tile_mad(tile, p.data(), n, n_rows, rows.d_v, values.data());
    }
};

void clear_state(float * o, int64_t n, int d_v) {
    for (int64_t i = 0; i < n; ++i) {
        o[i * (2 + d_v)] = -INFINITY;
        memset(o + i * (2 + d_v) + 1, 0, (1 + d_v) * sizeof(float));
    }
}

} // namespace

// rows [r0, r1) of KV head k; dot products by rows, because transposing a tile for a handful of
// queries does not pay
static void attend_rows(const edgekv_rows & rows, int k, int r0, int r1, queries_block & b) {
    r0 = std::max(r0, b.lo_min);
    r1 = std::min(r1, b.hi_max);
    const int seam = rows.len[k] - rows.n_recent;
    for (int r = r0, n; r < r1; r += n) {
        n = std::min(EDGEKV_TILE, (r < seam ? std::min(r1, seam) : r1) - r);
        b.load(rows, rows.k, rows.type_k, rows.nb_k, rows.d_k, rows.recent_k, k, r, n);
        tile_logits(rows, b.tile, b.q.data(), b.n, n, b.s.data());
        b.fold(rows, k, r, n);
    }
}

void edgekv_cpu_attend_part(
    const edgekv_rows * rows, const edgekv_queries * qs, float * out, int part, int n_parts) {
    static thread_local queries_block block;
    const int dp = 2 + rows->d_v, n_head_kv = rows->n_head_kv, G = rows->n_head / n_head_kv;
    out += (size_t) part * qs->n_tokens * rows->n_head * dp;
    clear_state(out, (int64_t) qs->n_tokens * rows->n_head, rows->d_v);
    int64_t total = 0;
    for (int k = 0; k < n_head_kv; ++k) total += rows->len[k];
    const int64_t a = total * part / n_parts, b = total * (part + 1) / n_parts;
    const int t_step = std::max(1, 64 / G);
    int64_t base = 0;
    for (int k = 0; k < n_head_kv; base += rows->len[k], ++k) {
        const int r0 = (int) (std::max(a, base) - base),
                  r1 = (int) (std::min(b, base + rows->len[k]) - base);
        if (r0 >= r1) continue;
        for (int t = 0; t < qs->n_tokens; t += t_step) {
            block.set(*rows, *qs, k, t, std::min(t + t_step, qs->n_tokens),
                [&](int t, int h) { return out + ((size_t) t * rows->n_head + h) * dp; });
            attend_rows(*rows, k, r0, r1, block);
        }
    }
}

void edgekv_cpu_attend_combine(const edgekv_rows * rows, int n_tokens, const float * parts,
    int n_parts, float * dst, int ith, int nth) {
    const int d = rows->d_v, dp = 2 + d, n = n_tokens * rows->n_head;
    for (int i = ith; i < n; i += nth) {
        float * o = dst + (size_t) i * d;
        memset(o, 0, d * sizeof(float));
        float m = rows->sinks ? rows->sinks[i % rows->n_head] : -INFINITY, sum = 0;
        for (int p = 0; p < n_parts; ++p) m = std::max(m, parts[((size_t) p * n + i) * dp]);
        if (rows->sinks) sum = expf(rows->sinks[i % rows->n_head] - m);
        for (int p = 0; p < n_parts; ++p) {
            const float * x = parts + ((size_t) p * n + i) * dp;
            if (x[1] == 0.0f) continue;
            const float c = expf(x[0] - m);
            sum += c * x[1];
            ggml_vec_mad_f32(d, o, x + 2, c);
        }
        if (sum > 0) ggml_vec_scale_f32(d, o, 1.0f / sum);
    }
}
