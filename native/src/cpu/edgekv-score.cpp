// score: column statistics of the attention of some queries, without ever holding the attention matrix.
//     a[t][h][r] = softmax_r(scale * q[t][h].k[r]) over the rows that token t sees
// Two passes over K: maxima and sums of each query's softmax, then the columns. Work is cut by rows, so threads never share one.
#include "edgekv-aligned.h"
#include "edgekv-tile.h"

#include <cstring>

using namespace edgekv;

namespace {

constexpr int MANY_QUERIES = 16; // of one head: from here on transposing a tile pays

struct workspace {
    aligned_floats tile_room, tile_t_room, logits_room;
    float * tile, * tile_t;
    std::vector<const float *> q;
    std::vector<float *> s;
};

// logits of one tile for the n_tokens queries of head h
float ** head_logits(const edgekv_rows & rows, const edgekv_queries & qs, workspace & w, int h, int n) {
    float * logits = w.logits_room.get((size_t) qs.n_tokens*EDGEKV_TILE);
    w.q.resize(qs.n_tokens); w.s.resize(qs.n_tokens);
    for (int t = 0; t < qs.n_tokens; ++t) {
        w.q[t] = qs.q + t*qs.stride_t + h*qs.stride_h;
        w.s[t] = logits + (size_t) t*EDGEKV_TILE;
    }
    if (qs.n_tokens >= MANY_QUERIES) tile_dot_transposed(w.tile_t, w.q.data(), qs.n_tokens, rows.d_k, w.s.data());
    else                             tile_dot(w.tile, w.q.data(), qs.n_tokens, n, rows.d_k, w.s.data());
    tile_scale(rows, qs.n_tokens, n, w.s.data());
    return w.s.data();
}

void load_keys(const edgekv_rows & rows, const edgekv_queries & qs, workspace & w, int k, int r, int n) {
    w.tile = w.tile_room.get((size_t) EDGEKV_TILE*rows.d_k);
    edgekv_cpu_rows_to_f32(rows.type_k, rows.k, rows.nb_k, rows.first[k] + r, n, rows.d_k, w.tile);
    if (qs.n_tokens < MANY_QUERIES) return;
    w.tile_t = w.tile_t_room.get((size_t) EDGEKV_TILE*rows.d_k);
    tile_transpose(w.tile, n, rows.d_k, w.tile_t);
}

// the highest of n logits, at least m; m rises rarely, so that is asked of all together
float highest(const float * s, int n, float m) {
    int n_higher = 0;
    for (int j = 0; j < n; ++j) n_higher += s[j] > m;
    for (int j = 0; n_higher > 0 && j < n; ++j) m = std::max(m, s[j]);
    return m;
}

// a part is a range of whole tiles, the same fraction of every head
void part_rows(int len, int part, int n_parts, int & r0, int & r1) {
    const int64_t n_tiles = (len + EDGEKV_TILE - 1)/EDGEKV_TILE;
    r0 = (int) (n_tiles*part/n_parts*EDGEKV_TILE);
    r1 = std::min<int>((int) (n_tiles*(part + 1)/n_parts*EDGEKV_TILE), len);
}

} // namespace

void edgekv_cpu_score_norm(const edgekv_rows * rows, const edgekv_queries * qs, float * out, int part, int n_parts) {
    static thread_local workspace w;
    const int G = rows->n_head/rows->n_head_kv;
    out += (size_t) part*rows->n_head*qs->n_tokens*2;
    for (int i = 0; i < rows->n_head*qs->n_tokens; ++i) { out[2*i] = -INFINITY; out[2*i + 1] = 0; }
    for (int k = 0; k < rows->n_head_kv; ++k) {
        int r0, r1; part_rows(rows->len[k], part, n_parts, r0, r1);
        for (int r = r0; r < r1; r += EDGEKV_TILE) {
            const int n = std::min(EDGEKV_TILE, r1 - r);
            load_keys(*rows, *qs, w, k, r, n);
            for (int h = k*G; h < (k + 1)*G; ++h) {
                float ** s = head_logits(*rows, *qs, w, h, n);
                for (int t = 0; t < qs->n_tokens; ++t) {
                    int lo, hi; visible(*rows, *qs, t, k, lo, hi);
                    const int a = std::max(lo - r, 0), b = std::min(hi - r, n);
                    if (a >= b) continue;
                    float * ml = out + ((size_t) h*qs->n_tokens + t)*2;
                    const float m = highest(s[t] + a, b - a, ml[0]);
                    if (m > ml[0]) { ml[1] *= ml[0] == -INFINITY ? 0.0f : expf(ml[0] - m); ml[0] = m; }
                    ml[1] += (float) ggml_vec_soft_max_f32(b - a, s[t] + a, s[t] + a, m);
                }
            }
        }
    }
}

void edgekv_cpu_score_fold(const edgekv_rows * rows, const edgekv_queries * qs, const float * parts, int n_parts, float * out, int ith, int nth) {
    const int n = rows->n_head*qs->n_tokens; // queries of all heads
    for (int i = ith; i < n; i += nth) {
        const float sink = rows->sinks ? rows->sinks[i/qs->n_tokens] : -INFINITY;
        float m = sink, sum = 0;
        for (int p = 0; p < n_parts; ++p) m = std::max(m, parts[((size_t) p*n + i)*2]);
        for (int p = 0; p < n_parts; ++p) {
            const float * x = parts + ((size_t) p*n + i)*2;
            if (x[1] > 0) sum += x[1]*expf(x[0] - m);
        }
        if (rows->sinks) sum += expf(sink - m);
        out[2*i] = m;
        out[2*i + 1] = sum > 0 ? 1.0f/sum : 0.0f;
    }
}

void edgekv_cpu_score_columns(const edgekv_rows * rows, const edgekv_queries * qs, const float * norm,
        const edgekv_columns * cols, int part, int n_parts) {
    static thread_local workspace w;
    const int G = rows->n_head/rows->n_head_kv, n_t = qs->n_tokens;
    for (int k = 0; k < rows->n_head_kv; ++k) {
        int r0, r1; part_rows(rows->len[k], part, n_parts, r0, r1);
        if (r0 >= r1) continue;
        for (int r = r0; r < r1; r += EDGEKV_TILE) {
            const int n = std::min(EDGEKV_TILE, r1 - r);
            load_keys(*rows, *qs, w, k, r, n);
            float sum[EDGEKV_TILE] = {}, mx[EDGEKV_TILE] = {}, ent[EDGEKV_TILE] = {};
            for (int g = 0; g < G; ++g) {
                float ** s = head_logits(*rows, *qs, w, k*G + g, n);
                const float * of_head = norm + (size_t) (k*G + g)*n_t*2;
                float hs[EDGEKV_TILE] = {};
                for (int t = 0; t < n_t; ++t) {
                    int lo, hi; visible(*rows, *qs, t, k, lo, hi);
                    const int a = std::max(lo - r, 0), b = std::min(hi - r, n);
                    for (int j = 0; j < std::min(a, n); ++j) s[t][j] = 0;
                    for (int j = std::max(b, 0); j < n; ++j) s[t][j] = 0;
                    if (a >= b) continue;
                    ggml_vec_soft_max_f32(b - a, s[t] + a, s[t] + a, of_head[2*t]);
                    const float c = of_head[2*t + 1];
                    for (int j = a; j < b; ++j) {
                        const float p = s[t][j]*c;
                        s[t][j] = p;
                        hs[j] += p;
                        mx[j] = std::max(mx[j], p);
                    }
                    if (cols->entropy) for (int j = a; j < b; ++j) if (s[t][j] > 0) ent[j] -= s[t][j]*logf(s[t][j]);
                }
                for (int j = 0; j < n; ++j) sum[j] += hs[j]/G;
                if (cols->m2) { // exact within the call, Chan's formula between calls
                    float * mean = cols->mean + g*cols->n_rows + rows->first[k] + r, * m2 = cols->m2 + g*cols->n_rows + rows->first[k] + r;
                    const float na = (float) cols->n_seen, nb = (float) n_t;
                    for (int j = 0; j < n; ++j) {
                        const float mu = hs[j]/nb;
                        float q = 0;
                        for (int t = 0; t < n_t; ++t) q += (s[t][j] - mu)*(s[t][j] - mu);
                        const float delta = mu - mean[j];
                        mean[j] += delta*nb/(na + nb);
                        m2[j]   += q + delta*delta*na*nb/(na + nb);
                    }
                }
            }
            const int64_t at = rows->first[k] + r;
            for (int j = 0; j < n; ++j) {
                if (cols->sum)     cols->sum[at + j]     += sum[j];
                if (cols->max)     cols->max[at + j]      = std::max(cols->max[at + j], mx[j]);
                if (cols->entropy) cols->entropy[at + j] += ent[j];
            }
        }
    }
}
