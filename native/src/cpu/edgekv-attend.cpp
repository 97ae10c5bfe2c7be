// attend: decode attention over KV heads of different length. The definition of correct is
//     out[t][h] = sum_r softmax_r(scale * q[t][h].k[r]) v[r]   over the rows that token t sees in head h's KV head
// computed in parts of equal rows (whatever heads they fall into), so the work is even and the result does not depend on the
// number of threads.
#include "edgekv-tile.h"

#include <cstring>

using namespace edgekv;

// rows [r0, r1) of KV head k for the queries of tokens [t0, t1); partials start at out with stride 2 + d_v per head
static void attend_rows(const edgekv_rows & rows, const edgekv_queries & qs, int k, int t0, int t1, int r0, int r1, float * out) {
    constexpr int N = EDGEKV_TILE;
    const int G = rows.n_head/rows.n_head_kv, n_q = (t1 - t0)*G, dp = 2 + rows.d_v;

    static thread_local std::vector<float> work;
    static thread_local std::vector<const float *> q, p;
    static thread_local std::vector<float *> s, o;
    work.resize((size_t) N*std::max(rows.d_k, rows.d_v) + (size_t) n_q*N);
    q.resize(n_q); p.resize(n_q); s.resize(n_q); o.resize(n_q);
    float * tile = work.data(), * logits = tile + (size_t) N*std::max(rows.d_k, rows.d_v);

    int lo_min = r1, hi_max = r0;
    for (int t = t0; t < t1; ++t) {
        int lo, hi; visible(rows, qs, t, k, lo, hi);
        lo_min = std::min(lo_min, lo); hi_max = std::max(hi_max, hi);
        for (int g = 0; g < G; ++g) {
            const int i = (t - t0)*G + g, h = k*G + g;
            q[i] = qs.q + t*qs.stride_t + h*qs.stride_h;
            o[i] = out + ((size_t) t*rows.n_head + h)*dp;
            s[i] = logits + (size_t) i*N;
            p[i] = s[i];
        }
    }
    r0 = std::max(r0, lo_min); r1 = std::min(r1, hi_max);

    static thread_local std::vector<float *> ov; // values only
    ov.resize(n_q);
    for (int i = 0; i < n_q; ++i) ov[i] = o[i] + 2;

    for (int r = r0; r < r1; r += N) {
        const int n = std::min(N, r1 - r);
        edgekv_cpu_rows_to_f32(rows.type_k, rows.k, rows.nb_k, rows.first[k] + r, n, rows.d_k, tile);
        tile_logits(rows, tile, q.data(), n_q, n, s.data());
        for (int i = 0; i < n_q; ++i) {
            int lo, hi; visible(rows, qs, t0 + i/G, k, lo, hi);
            const int a = std::max(lo - r, 0), b = std::min(hi - r, n);
            if (a >= b) { memset(s[i], 0, n*sizeof(float)); continue; }
            float m = o[i][0];
            for (int j = a; j < b; ++j) m = std::max(m, s[i][j]);
            if (m > o[i][0]) {
                const float c = o[i][0] == -INFINITY ? 0.0f : expf(o[i][0] - m);
                o[i][0] = m;
                o[i][1] *= c;
                ggml_vec_scale_f32(rows.d_v, ov[i], c);
            }
            for (int j = 0; j < a; ++j) s[i][j] = 0;
            for (int j = b; j < n; ++j) s[i][j] = 0;
            o[i][1] += (float) ggml_vec_soft_max_f32(b - a, s[i] + a, s[i] + a, m);
        }
        edgekv_cpu_rows_to_f32(rows.type_v, rows.v, rows.nb_v, rows.first[k] + r, n, rows.d_v, tile);
        tile_mad(tile, p.data(), n_q, n, rows.d_v, ov.data());
    }
}

void edgekv_cpu_attend_part(const edgekv_rows * rows, const edgekv_queries * qs, float * out, int part, int n_parts) {
    const int dp = 2 + rows->d_v, n_head_kv = rows->n_head_kv, G = rows->n_head/n_head_kv;
    out += (size_t) part*qs->n_tokens*rows->n_head*dp;
    for (int i = 0; i < qs->n_tokens*rows->n_head; ++i) {
        out[(size_t) i*dp] = -INFINITY;
        memset(out + (size_t) i*dp + 1, 0, (dp - 1)*sizeof(float));
    }
    int64_t total = 0;
    for (int k = 0; k < n_head_kv; ++k) total += rows->len[k];
    const int64_t a = total*part/n_parts, b = total*(part + 1)/n_parts;
    const int t_step = std::max(1, 64/G);
    int64_t base = 0;
    for (int k = 0; k < n_head_kv; base += rows->len[k], ++k) {
        const int r0 = (int) (std::max(a, base) - base), r1 = (int) (std::min(b, base + rows->len[k]) - base);
        if (r0 >= r1) continue;
        for (int t = 0; t < qs->n_tokens; t += t_step) {
            attend_rows(*rows, *qs, k, t, std::min(t + t_step, qs->n_tokens), r0, r1, out);
        }
    }
}

void edgekv_cpu_attend_combine(const edgekv_rows * rows, int n_tokens, const float * parts, int n_parts, float * dst, int ith, int nth) {
    const int d = rows->d_v, dp = 2 + d, n = n_tokens*rows->n_head;
    for (int i = ith; i < n; i += nth) {
        float * o = dst + (size_t) i*d;
        memset(o, 0, d*sizeof(float));
        float m = rows->sinks ? rows->sinks[i % rows->n_head] : -INFINITY, sum = 0;
        for (int p = 0; p < n_parts; ++p) m = std::max(m, parts[((size_t) p*n + i)*dp]);
        if (rows->sinks) sum = expf(rows->sinks[i % rows->n_head] - m);
        for (int p = 0; p < n_parts; ++p) {
            const float * x = parts + ((size_t) p*n + i)*dp;
            if (x[1] == 0.0f) continue;
            const float c = expf(x[0] - m);
            sum += c*x[1];
            ggml_vec_mad_f32(d, o, x + 2, c);
        }
        if (sum > 0) ggml_vec_scale_f32(d, o, 1.0f/sum);
    }
}
