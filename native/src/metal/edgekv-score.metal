// score on Metal: column statistics of the attention of some queries. The definition of correct is
// cpu/edgekv-score.cpp. Two passes over K, no attention matrix: each query's log of the sum of
// exponentials, over parts of the rows and then folded; then the columns, where a lane owns a row
// and all queries of its KV head come past.
#include "edgekv-logits.h"

// ---- first pass

// grid [n_parts, n_head*n_blocks]: eight tokens of one head; out [n_parts][n_head][n_tokens][2]
kernel void edgekv_score_norm(EDGEKV_PLACE, constant edgekv_metal_score & a [[buffer(0)]],
    device const char * k_rows [[buffer(1)]], device const int * first [[buffer(2)]],
    device const int * len [[buffer(3)]], device const float * pos [[buffer(4)]],
    device const float * q [[buffer(5)]], device const int * start [[buffer(6)]],
    device const int * after [[buffer(7)]], device float * norm [[buffer(8)]]) {
    const int lane = (int) tid % LANES, simd = (int) tid / LANES, part = (int) group.x;
    const int h = (int) group.y / a.n_blocks, k = h / (a.layer.n_head / a.layer.n_head_kv),
              t0 = (int) group.y % a.n_blocks * QUERIES;
    const int begin = (int) ((int64_t) len[k] * part / a.n_parts),
              end = (int) ((int64_t) len[k] * (part + 1) / a.n_parts);
    threadgroup float * tops = shared + QUERIES * a.layer.d_k; // [SIMDGROUPS][QUERIES][2]
    load_queries(a.layer, 1, h, t0, q, shared, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device const char * head = k_rows + (uint64_t) first[k] * a.layer.nb_k;
    float m[QUERIES], l[QUERIES];
    for (int i = 0; i < QUERIES; ++i) {
        m[i] = LOWEST;
        l[i] = 0;
    }
    for (int r = begin + (int) tid; r < end; r += THREADS) {
        float s[QUERIES];
        multiply_row<QUERIES>(
            a.layer.type_k, head + (uint64_t) r * a.layer.nb_k, a.layer.d_k, shared, s);
        for (int i = 0; i < QUERIES; ++i) {
            const seen_rows seen = rows_seen(a.layer, len[k], t0 + i, start, after);
            if (r < seen.lo || r >= seen.hi) continue;
            const alibi lower = alibi_of(a.layer, h, first[k], seen.hi, pos);
            const float x = logit(s[i], a.layer.scale, a.layer.softcap) +
                lowered(lower, pos, first[k] + r),
                        top = max(m[i], x);
            l[i] = l[i] * exp_below(m[i], top) + exp_below(x, top);
            m[i] = top;
        }
    }
    for (int i = 0; i < QUERIES; ++i) {
        const float top = simd_max(m[i]), sum = simd_sum(l[i] * exp_below(m[i], top));
        if (lane == 0) {
            tops[(simd * QUERIES + i) * 2] = top;
            tops[(simd * QUERIES + i) * 2 + 1] = sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int t = t0 + (int) tid;
    if (tid >= QUERIES || t >= a.layer.n_tokens) return;
    float top = LOWEST, sum = 0;
    for (int w = 0; w < SIMDGROUPS; ++w) top = max(top, tops[(w * QUERIES + (int) tid) * 2]);
    for (int w = 0; w < SIMDGROUPS; ++w)
        sum += tops[(w * QUERIES + (int) tid) * 2 + 1] *
            exp_below(tops[(w * QUERIES + (int) tid) * 2], top);
    device float * to = norm + (((int64_t) part * a.layer.n_head + h) * a.layer.n_tokens + t) * 2;
    to[0] = top;
    to[1] = sum;
}

// grid [n_head, tokens/128]; lse [n_head][n_tokens], so high where nothing is seen that nothing is
// left of any weight
kernel void edgekv_score_fold(EDGEKV_PLACE, constant edgekv_metal_score & a [[buffer(0)]],
    device const float * norm [[buffer(1)]], device const float * sinks [[buffer(2)]],
    device float * lse [[buffer(3)]]) {
    (void) shared;
    const int h = (int) group.x, t = (int) group.y * THREADS + (int) tid;
    if (t >= a.layer.n_tokens) return;
    const int64_t at = (int64_t) h * a.layer.n_tokens + t,
                  step = (int64_t) a.layer.n_head * a.layer.n_tokens;
    float m = a.layer.has_sinks ? sinks[h] : LOWEST;
    for (int p = 0; p < a.n_parts; ++p) m = max(m, norm[(p * step + at) * 2]);
    float sum = a.layer.has_sinks ? exp_below(sinks[h], m) : 0.0f;
    for (int p = 0; p < a.n_parts; ++p)
        sum += norm[(p * step + at) * 2 + 1] * exp_below(norm[(p * step + at) * 2], m);
    lse[at] = sum > 0 ? m + log(sum) : -LOWEST;
}

// ---- second pass

// what a lane has seen of its row
struct column {
    float sum, top, entropy;
    float n, mean, m2; // of one head

    void add(float s, float lse) {
        const float p = exp_below(s, lse), delta = p - mean;
        sum += p;
        top = max(top, p);
        if (p > 0) entropy -= p * (s - lse);
        n += 1;
        mean += delta / n;
        m2 += delta * (p - mean);
    }
};

// mean and squared deviations of one head, over earlier calls too (Chan's formula)
inline void store_moments(
    constant edgekv_metal_score & a, int64_t at, column x, device float * mean, device float * m2) {
    const float seen = (float) a.n_seen, total = seen + x.n, delta = x.mean - mean[at];
    mean[at] += delta * x.n / total;
    m2[at] += x.m2 + delta * delta * seen * x.n / total;
}

// grid [rows of the longest head/128, n_head_kv]
kernel void edgekv_score_columns(EDGEKV_PLACE, constant edgekv_metal_score & a [[buffer(0)]],
    device const char * k_rows [[buffer(1)]], device const int * first [[buffer(2)]],
    device const int * len [[buffer(3)]], device const float * pos [[buffer(4)]],
    device const float * q [[buffer(5)]], device const int * start [[buffer(6)]],
    device const int * after [[buffer(7)]], device const float * lse [[buffer(8)]],
    device float * sum [[buffer(9)]], device float * top [[buffer(10)]],
    device float * entropy [[buffer(11)]], device float * mean [[buffer(12)]],
    device float * m2 [[buffer(13)]]) {
    const int G = a.layer.n_head / a.layer.n_head_kv, k = (int) group.y,
              r = (int) group.x * THREADS + (int) tid, n = len[k];
    if ((int) group.x * THREADS >= n) return;
    // lanes behind the last row store nothing
    device const char * row = k_rows + ((uint64_t) first[k] + min(r, n - 1)) * a.layer.nb_k;
    const int64_t at = (int64_t) first[k] + r;
    column c = { 0, 0, 0, 0, 0, 0 };
    for (int g = 0; g < G; ++g) {
        const int h = k * G + g;
        c.n = c.mean = c.m2 = 0;
        for (int t0 = 0; t0 < a.layer.n_tokens; t0 += QUERIES) {
            threadgroup_barrier(mem_flags::mem_threadgroup); // the queries before are used
            load_queries(a.layer, 1, h, t0, q, shared, tid);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float s[QUERIES];
            multiply_row<QUERIES>(a.layer.type_k, row, a.layer.d_k, shared, s);
            for (int i = 0; i < QUERIES && t0 + i < a.layer.n_tokens; ++i) {
                const seen_rows seen = rows_seen(a.layer, n, t0 + i, start, after);
                const alibi lower = alibi_of(a.layer, h, first[k], seen.hi, pos);
                const float x = r >= seen.lo && r < seen.hi
                    ? logit(s[i], a.layer.scale, a.layer.softcap) +
                        lowered(lower, pos, first[k] + r)
                    : LOWEST;
                c.add(x, lse[(int64_t) h * a.layer.n_tokens + t0 + i]);
            }
        }
        if (a.has_moments && r < n) store_moments(a, g * a.n_rows + at, c, mean, m2);
    }
    if (r >= n) return;
    if (a.has_sum) sum[at] += c.sum / (float) G;
    if (a.has_max) top[at] = max(top[at], c.top);
    if (a.has_entropy) entropy[at] += c.entropy;
}
