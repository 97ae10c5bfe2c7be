#pragma once
// A tile: up to EDGEKV_TILE rows of one KV head as f32 in the first-level cache. Most CPU kernels
// read K and V through it, so a cache type needs one conversion and no kernel of its own;
// edgekv-panel.h is for the many queries of a prompt.

#include "edgekv-cpu.h"
#include "vec.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cmath>
#include <vector>

#define EDGEKV_TILE 32

// rows [first, first + n) as they were before the centre was taken from them
void edgekv_cpu_numbered_to_f32(
    const struct edgekv_numbered & rows, int64_t first, int n, float * out);

namespace edgekv {

// where GGML has no SIMD mapping for f32 (GGML_F32_EPR undefined), plain loops do the same
#if defined(GGML_SIMD) && !defined(__ARM_FEATURE_SVE) && !defined(__riscv_v_intrinsic)
#define EDGEKV_SIMD 1
#else
#define EDGEKV_SIMD 0
#endif

#if EDGEKV_SIMD
inline float hsum(GGML_F32_VEC x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(x);
#else
    float t[GGML_F32_EPR], s = 0;
    GGML_F32_VEC_STORE(t, x);
    for (int i = 0; i < GGML_F32_EPR; ++i) s += t[i];
    return s;
#endif
}

// the sums of four registers: in pairs, so that all of them cost little more than one
inline void hsum4(const GGML_F32_VEC * x, float * to) {
#if defined(__AVX512F__)
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    // each 128 bits: a b c d
    const __m512 lanes =
        _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes),
        _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(lanes), 1)));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX__)
    const __m256 lanes = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
#else
    for (int i = 0; i < 4; ++i) to[i] = hsum(x[i]);
#endif
}

// NR rows times NQ queries, held in registers
template <int NR, int NQ>
inline void dot_block(const float * k, const float * const * q, int d, float * const * s, int r) {
    GGML_F32_VEC acc[NQ][NR];
    for (int a = 0; a < NQ; ++a)
        for (int b = 0; b < NR; ++b) acc[a][b] = GGML_F32_VEC_ZERO;
    int j = 0;
    for (; j + GGML_F32_EPR <= d; j += GGML_F32_EPR) {
        GGML_F32_VEC kv[NR];
        for (int b = 0; b < NR; ++b) kv[b] = GGML_F32_VEC_LOAD(k + (size_t) (r + b) * d + j);
        for (int a = 0; a < NQ; ++a) {
            const GGML_F32_VEC qv = GGML_F32_VEC_LOAD(q[a] + j);
            for (int b = 0; b < NR; ++b) acc[a][b] = GGML_F32_VEC_FMA(acc[a][b], qv, kv[b]);
        }
    }
    for (int a = 0; a < NQ; ++a) {
        if constexpr (NR == 4) hsum4(acc[a], s[a] + r);
        else
            for (int b = 0; b < NR; ++b) s[a][r + b] = hsum(acc[a][b]);
        for (int b = 0; b < NR; ++b)
            for (int i = j; i < d; ++i) s[a][r + b] += q[a][i] * k[(size_t) (r + b) * d + i];
    }
}

template <int NQ>
inline void dot_rows(const float * k, const float * const * q, int n, int d, float * const * s) {
    int r = 0;
    for (; r + 4 <= n; r += 4) dot_block<4, NQ>(k, q, d, s, r);
    for (; r < n; ++r) dot_block<1, NQ>(k, q, d, s, r);
}

template <int NQ>
inline void mad_rows(const float * v, const float * const * p, int n, int d, float * const * o) {
    int j = 0;
    for (; j + 2 * GGML_F32_EPR <= d; j += 2 * GGML_F32_EPR) {
        GGML_F32_VEC a0[NQ], a1[NQ];
        for (int a = 0; a < NQ; ++a) {
            a0[a] = GGML_F32_VEC_LOAD(o[a] + j);
            a1[a] = GGML_F32_VEC_LOAD(o[a] + j + GGML_F32_EPR);
        }
        for (int r = 0; r < n; ++r) {
            const GGML_F32_VEC v0 = GGML_F32_VEC_LOAD(v + (size_t) r * d + j),
                               v1 = GGML_F32_VEC_LOAD(v + (size_t) r * d + j + GGML_F32_EPR);
            for (int a = 0; a < NQ; ++a) {
                const GGML_F32_VEC w = GGML_F32_VEC_SET1(p[a][r]);
                a0[a] = GGML_F32_VEC_FMA(a0[a], v0, w);
                a1[a] = GGML_F32_VEC_FMA(a1[a], v1, w);
            }
        }
        for (int a = 0; a < NQ; ++a) {
            GGML_F32_VEC_STORE(o[a] + j, a0[a]);
            GGML_F32_VEC_STORE(o[a] + j + GGML_F32_EPR, a1[a]);
        }
    }
    for (; j < d; ++j)
        for (int a = 0; a < NQ; ++a) {
            float x = o[a][j];
            for (int r = 0; r < n; ++r) x += p[a][r] * v[(size_t) r * d + j];
            o[a][j] = x;
        }
}

// the same dots against a transposed tile kt [d][EDGEKV_TILE]: rows lie in the lanes, nothing is
// summed across them
template <int NQ>
inline void dot_lanes(const float * kt, const float * const * q, int d, float * const * s) {
    constexpr int NV = EDGEKV_TILE / GGML_F32_EPR;
    GGML_F32_VEC acc[NQ][NV];
    for (int a = 0; a < NQ; ++a)
        for (int b = 0; b < NV; ++b) acc[a][b] = GGML_F32_VEC_ZERO;
    for (int j = 0; j < d; ++j) {
        GGML_F32_VEC kv[NV];
        for (int b = 0; b < NV; ++b)
            kv[b] = GGML_F32_VEC_LOAD(kt + j * EDGEKV_TILE + b * GGML_F32_EPR);
        for (int a = 0; a < NQ; ++a) {
            const GGML_F32_VEC w = GGML_F32_VEC_SET1(q[a][j]);
            for (int b = 0; b < NV; ++b) acc[a][b] = GGML_F32_VEC_FMA(acc[a][b], kv[b], w);
        }
    }
    for (int a = 0; a < NQ; ++a)
        for (int b = 0; b < NV; ++b) GGML_F32_VEC_STORE(s[a] + b * GGML_F32_EPR, acc[a][b]);
}
constexpr int LANE_QUERIES = GGML_F32_EPR >= 16 ? 4 : 2; // as many as the registers hold
#else
template <int NQ>
inline void dot_lanes(const float * kt, const float * const * q, int d, float * const * s) {
    for (int a = 0; a < NQ; ++a) {
        for (int r = 0; r < EDGEKV_TILE; ++r) s[a][r] = 0;
        for (int j = 0; j < d; ++j)
            ggml_vec_mad_f32(EDGEKV_TILE, s[a], kt + j * EDGEKV_TILE, q[a][j]);
    }
}
constexpr int LANE_QUERIES = 4;
template <int NQ>
inline void dot_rows(const float * k, const float * const * q, int n, int d, float * const * s) {
    for (int a = 0; a < NQ; ++a)
        for (int r = 0; r < n; ++r)
            ggml_vec_dot_f32(d, &s[a][r], 0, q[a], 0, k + (size_t) r * d, 0, 1);
}
template <int NQ>
inline void mad_rows(const float * v, const float * const * p, int n, int d, float * const * o) {
    for (int a = 0; a < NQ; ++a)
        for (int r = 0; r < n; ++r) ggml_vec_mad_f32(d, o[a], v + (size_t) r * d, p[a][r]);
}
#endif

// s[a][r] = q[a] . k[r] for n_q queries and n rows
inline void tile_dot(
    const float * k, const float * const * q, int n_q, int n, int d, float * const * s) {
    int a = 0;
    for (; a + 4 <= n_q; a += 4) dot_rows<4>(k, q + a, n, d, s + a);
    switch (n_q - a) {
        case 3: dot_rows<3>(k, q + a, n, d, s + a); break;
        case 2: dot_rows<2>(k, q + a, n, d, s + a); break;
        case 1: dot_rows<1>(k, q + a, n, d, s + a); break;
        default: break;
    }
}

// kt [d][EDGEKV_TILE] from k [n][d]; lanes behind n are zero
inline void tile_transpose(const float * k, int n, int d, float * kt) {
    for (int j = 0; j < d; ++j) {
        for (int r = 0; r < n; ++r) kt[j * EDGEKV_TILE + r] = k[(size_t) r * d + j];
        for (int r = n; r < EDGEKV_TILE; ++r) kt[j * EDGEKV_TILE + r] = 0;
    }
}

inline void tile_dot_transposed(
    const float * kt, const float * const * q, int n_q, int d, float * const * s) {
    int a = 0;
    for (; a + LANE_QUERIES <= n_q; a += LANE_QUERIES) dot_lanes<LANE_QUERIES>(kt, q + a, d, s + a);
    for (; a < n_q; ++a) dot_lanes<1>(kt, q + a, d, s + a);
}

// o[a] += sum over r of p[a][r] * v[r]
inline void tile_mad(
    const float * v, const float * const * p, int n_q, int n, int d, float * const * o) {
    int a = 0;
    for (; a + 4 <= n_q; a += 4) mad_rows<4>(v, p + a, n, d, o + a);
    switch (n_q - a) {
        case 3: mad_rows<3>(v, p + a, n, d, o + a); break;
        case 2: mad_rows<2>(v, p + a, n, d, o + a); break;
        case 1: mad_rows<1>(v, p + a, n, d, o + a); break;
        default: break;
    }
}

// the largest of n values and m: in lanes, because a maximum waits for the one before
inline float tile_max(const float * x, int n, float m) {
    constexpr int LANES = 16;
    int j = 0;
    if (n >= LANES) {
        float most[LANES];
        for (int i = 0; i < LANES; ++i) most[i] = x[i];
        for (j = LANES; j + LANES <= n; j += LANES)
            for (int i = 0; i < LANES; ++i) most[i] = most[i] < x[j + i] ? x[j + i] : most[i];
        for (int width = LANES / 2; width > 0; width /= 2)
            for (int i = 0; i < width; ++i)
                most[i] = most[i] < most[i + width] ? most[i + width] : most[i];
        m = std::max(m, most[0]);
    }
    for (; j < n; ++j) m = std::max(m, x[j]);
    return m;
}

// logits: dots, scaled, then the soft cap
inline void tile_logits(const edgekv_rows & rows, const float * k, const float * const * q, int n_q,
    int n, float * const * s) {
    tile_dot(k, q, n_q, n, rows.d_k, s);
    for (int a = 0; a < n_q; ++a) {
        ggml_vec_scale_f32(n, s[a], rows.softcap == 0.0f ? rows.scale : rows.scale / rows.softcap);
        if (rows.softcap != 0.0f) {
            for (int r = 0; r < n; ++r) s[a][r] = rows.softcap * tanhf(s[a][r]);
        }
    }
}

} // namespace edgekv
