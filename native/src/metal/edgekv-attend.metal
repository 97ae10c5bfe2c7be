// attend on Metal: few tokens over KV heads of different length. The definition of correct is
// cpu/edgekv-attend.cpp. The rows of all heads, one head after the other, are cut into equal parts.
// A threadgroup reads a part for eight queries (tokens x heads of the group): a lane has a row of
// K, then a column of V. Another kernel folds the parts. All sums are in f32.
#include "edgekv-logits.h"

// of a simd-group: running softmax of eight queries, columns lane, lane + 32, ... of their values
template <int D>
struct attend_state {
    float o[QUERIES][D / LANES];
    float m[QUERIES], l[QUERIES]; // l: of this lane's rows only
};

template <int D>
inline void attend_tile(constant edgekv_metal_layer & a, int k, int first, int n0, int len, int r0,
    int end, device const char * k_rows, device const char * v_rows, device const float * pos,
    device const int * start, device const int * after, threadgroup const float * queries, int lane,
    thread attend_state<D> & st) {
    const int G = a.n_head / a.n_head_kv, r = r0 + lane, n = min((int) LANES, end - r0);
    float s[QUERIES];
    multiply_row<QUERIES>(
        a.type_k, k_rows + (uint64_t) min(r, end - 1) * a.nb_k, a.d_k, queries, s);
    for (int i = 0; i < QUERIES; ++i) {
        const seen_rows seen = rows_seen(a, len, (n0 + i) / G, start, after);
        const alibi lower = alibi_of(a, k * G + (n0 + i) % G, first, seen.hi, pos);
        const float x = r < end && r >= seen.lo && r < seen.hi
            ? logit(s[i], a.scale, a.softcap) + lowered(lower, pos, first + r)
            : LOWEST;
        const float top = max(st.m[i], simd_max(x)), c = exp_below(st.m[i], top);
        st.m[i] = top;
        s[i] = exp_below(x, top);
        st.l[i] = st.l[i] * c + s[i];
        for (int j = 0; j < D / LANES; ++j) st.o[i][j] *= c;
    }
    for (int j = 0; j < n; ++j) {
        device const char * row = v_rows + (uint64_t) (r0 + j) * a.nb_v;
        float v[D / LANES];
        for (int c = 0; c < D / LANES; ++c)
            v[c] = c * LANES + lane < a.d_v
                ? read_value(a.type_v, row + c * chunk_bytes(a.type_v), lane)
                : 0.0f;
        for (int i = 0; i < QUERIES; ++i) {
            const float w = simd_shuffle(s[i], (ushort) j);
            for (int c = 0; c < D / LANES; ++c) st.o[i][c] += w * v[c];
        }
    }
}

// the simd-groups' sums into one: [n_parts][n_tokens][n_head][2 + d_v], maximum, sum, values.
// shared: values [QUERIES][D], then the tops
template <int D>
inline void store_part(constant edgekv_metal_attend & a, int k, int n0, int part,
    threadgroup float * shared, int lane, int simd, thread attend_state<D> & st,
    device float * parts) {
    threadgroup float * tops = shared + QUERIES * D;
    for (int i = 0; i < QUERIES; ++i) {
        st.l[i] = simd_sum(st.l[i]);
        if (lane == 0) {
            tops[(simd * QUERIES + i) * 2] = st.m[i];
            tops[(simd * QUERIES + i) * 2 + 1] = st.l[i];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int g = 0; g < SIMDGROUPS; ++g) {
        for (int i = 0; i < QUERIES && g == simd; ++i) {
            float m = LOWEST;
            for (int w = 0; w < SIMDGROUPS; ++w) m = max(m, tops[(w * QUERIES + i) * 2]);
            for (int c = 0; c < D / LANES; ++c) {
                const float y = st.o[i][c] * exp_below(st.m[i], m);
                threadgroup float & to = shared[i * D + c * LANES + lane];
                to = g ? to + y : y;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const int G = a.layer.n_head / a.layer.n_head_kv, d = a.layer.d_v;
    for (int i = simd; i < QUERIES; i += SIMDGROUPS) {
        const int n = n0 + i;
        if (n >= a.layer.n_tokens * G) continue;
        device float * to = parts +
            (((int64_t) part * a.layer.n_tokens + n / G) * a.layer.n_head + k * G + n % G) *
                (2 + d);
        float m = LOWEST, sum = 0;
        for (int w = 0; w < SIMDGROUPS; ++w) m = max(m, tops[(w * QUERIES + i) * 2]);
        for (int w = 0; w < SIMDGROUPS; ++w)
            sum += tops[(w * QUERIES + i) * 2 + 1] * exp_below(tops[(w * QUERIES + i) * 2], m);
        if (lane == 0) {
            to[0] = m;
            to[1] = sum;
        }
        for (int c = lane; c < d; c += LANES) to[2 + c] = shared[i * D + c];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// D: 64, 128 or 256, at least the heads' sizes
template <int D>
inline void attend_part(uint3 group, uint tid, threadgroup float * shared,
    constant edgekv_metal_attend & a, device const char * k_rows, device const char * v_rows,
    device const int * first, device const int * len, device const float * pos,
    device const float * q, device const int * start, device const int * after,
    device float * parts) {
    const int lane = (int) tid % LANES, simd = (int) tid / LANES, part = (int) group.x,
              n0 = (int) group.y * QUERIES;
    const int G = a.layer.n_head / a.layer.n_head_kv;
    int64_t total = 0, base = 0;
    for (int k = 0; k < a.layer.n_head_kv; ++k) total += len[k];
    const int64_t begin = total * part / a.n_parts, end = total * (part + 1) / a.n_parts;
    for (int k = 0; k < a.layer.n_head_kv; ++k) {
        const int b = begin > base ? (int) (begin - base) : 0,
                  e = end < base + len[k] ? (int) (end - base) : len[k];
        base += len[k];
        attend_state<D> st;
        for (int i = 0; i < QUERIES; ++i) {
            st.m[i] = LOWEST;
            st.l[i] = 0;
            for (int c = 0; c < D / LANES; ++c) st.o[i][c] = 0;
        }
        load_queries(a.layer, G, k * G, n0, q, shared, tid);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        device const char * k_head = k_rows + (uint64_t) first[k] * a.layer.nb_k;
        device const char * v_head = v_rows + (uint64_t) first[k] * a.layer.nb_v;
        for (int r0 = b + simd * LANES; r0 < e; r0 += SIMDGROUPS * LANES) {
            attend_tile<D>(a.layer, k, first[k], n0, len[k], r0, e, k_head, v_head, pos, start,
                after, shared, lane, st);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        store_part<D>(a, k, n0, part, shared, lane, simd, st, parts);
    }
}

#define EDGEKV_ATTEND_PART(D)                                                                 \
    kernel void edgekv_attend_part_##D(EDGEKV_PLACE,                                          \
        constant edgekv_metal_attend & a [[buffer(0)]], device const char * k [[buffer(1)]],  \
        device const char * v [[buffer(2)]], device const int * first [[buffer(3)]],          \
        device const int * len [[buffer(4)]], device const float * pos [[buffer(5)]],         \
        device const float * q [[buffer(6)]], device const int * start [[buffer(7)]],         \
        device const int * after [[buffer(8)]], device float * parts [[buffer(9)]]) {         \
        attend_part<D>(group, tid, shared, a, k, v, first, len, pos, q, start, after, parts); \
    }

EDGEKV_ATTEND_PART(64)
EDGEKV_ATTEND_PART(128)
EDGEKV_ATTEND_PART(256)

// grid [n_head, n_tokens]
kernel void edgekv_attend_combine(EDGEKV_PLACE, constant edgekv_metal_attend & a [[buffer(0)]],
    device const float * parts [[buffer(1)]], device const float * sinks [[buffer(2)]],
    device const float * recalled [[buffer(3)]], device float * dst [[buffer(4)]]) {
    (void) shared;
    const int d = a.layer.d_v;
    const int64_t at = (int64_t) group.y * a.layer.n_head + group.x,
                  step = (int64_t) a.layer.n_tokens * a.layer.n_head;
    // a part more
    const float top = a.layer.has_recalled ? max(recalled[at * (2 + d)], LOWEST) : LOWEST;
    float m = max(a.layer.has_sinks ? sinks[group.x] : LOWEST, top);
    for (int p = 0; p < a.n_parts; ++p) m = max(m, parts[(p * step + at) * (2 + d)]);
    float sum = a.layer.has_sinks ? exp_below(sinks[group.x], m) : 0.0f;
    const float c_more = exp_below(top, m);
    if (a.layer.has_recalled) sum += recalled[at * (2 + d) + 1] * c_more;
    for (int p = 0; p < a.n_parts; ++p) {
        device const float * x = parts + (p * step + at) * (2 + d);
        sum += x[1] * exp_below(x[0], m);
    }
    for (int c = (int) tid; c < d; c += THREADS) {
        float y = a.layer.has_recalled ? recalled[at * (2 + d) + 2 + c] * c_more : 0.0f;
        for (int p = 0; p < a.n_parts; ++p) {
            device const float * x = parts + (p * step + at) * (2 + d);
            y += x[2 + c] * exp_below(x[0], m);
        }
        dst[at * d + c] = sum > 0 ? y / sum : 0.0f;
    }
}
