#pragma once
// What attend and score share in Metal's language: eight queries in threadgroup memory against a
// row of K per lane.

#include "edgekv-values.h"

// query n of some: token n/n_heads, head h0 + n % n_heads; [QUERIES][d_k], zeros behind the last
// token
inline void load_queries(constant edgekv_metal_layer & l, int n_heads, int h0, int n0,
    device const float * q, threadgroup float * to, uint tid) {
    for (int i = (int) tid; i < QUERIES * l.d_k; i += THREADS) {
        const int n = n0 + i / l.d_k, t = n / n_heads;
        to[i] =
            t < l.n_tokens ? q[t * l.stride_t + (h0 + n % n_heads) * l.stride_h + i % l.d_k] : 0.0f;
    }
}

// rows [lo, hi) of a head that a token sees
struct seen_rows {
    int lo, hi;
};

inline seen_rows rows_seen(constant edgekv_metal_layer & l, int len, int t,
    device const int * start, device const int * after) {
    seen_rows s = { 0, 0 };
    if (t >= l.n_tokens) return s;
    s.lo = l.has_start ? start[t] : 0;
    s.hi = len - (l.has_after ? after[t] : l.n_tokens - 1 - t);
    return s;
}

// scale, then soft cap
inline float logit(float x, float scale, float softcap) {
    x *= scale;
    return softcap == 0 ? x : softcap * precise::tanh(x / softcap);
}

// ALiBi, slopes as in edgekv-alibi.h: what is added to the logits of a query of head h that sees
// rows of a KV head, from `first` on, before `hi`
struct alibi {
    float slope, at;
}; // of the head; token of the last row that the query sees

inline alibi alibi_of(
    constant edgekv_metal_layer & l, int h, int first, int hi, device const float * pos) {
    alibi a = { 0, 0 };
    if (l.max_bias == 0.0f || hi <= 0) return a;
    int n = 1;
    while (2 * n <= l.n_head) n *= 2;
    a.slope = exp2(h < n ? -l.max_bias * (float) (h + 1) / (float) n
                         : -l.max_bias * (float) (2 * (h - n) + 1) / (float) (2 * n));
    a.at = pos[first + hi - 1];
    return a;
}

// row r of the layer, which it sees
inline float lowered(alibi a, device const float * pos, int r) {
    return a.slope == 0 ? 0.0f : a.slope * (pos[r] - a.at);
}

// e^(x - m), 0 where x is not there
inline float exp_below(float x, float m) { return x > LOWEST ? exp(x - m) : 0.0f; }
