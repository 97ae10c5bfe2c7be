#pragma once
// The kernels of edgekv-few.h, with AVX-512 and VNNI. Levels are the integers of a weight's values,
// not negative: one instruction multiplies 64 of them with a token's.

#include "edgekv-levels.h"

#define GGML_COMMON_IMPL_CPP // kvalues_iq4nl
#include "ggml-common.h"
#include "ggml-impl.h"
#include "repack.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__GNUC__)
#define EDGEKV_FEW 1
#include <immintrin.h>
#else
#define EDGEKV_FEW 0
#endif

#if EDGEKV_FEW
namespace edgekv {

// values in 8 bits around 0, each SIZE of them times a scale
template <int SIZE>
struct rounded {
    int8_t q[SIZE];
    float round(const float * x) { // returns the scale
        float most = 0;
        for (int i = 0; i < SIZE; ++i) most = std::max(most, std::fabs(x[i]));
        const float factor = most > 0 ? 127 / most : 0;
        for (int i = 0; i < SIZE; ++i) {
            const float up =
                x[i] * factor + 12582912.0f; // 1.5 * 2^23: its low bits are the integer
            int32_t bits;
            memcpy(&bits, &up, sizeof(bits));
            q[i] = (int8_t) bits;
        }
        return most / 127;
    }
    int sum(int begin, int n) const {
        int all = 0;
        for (int i = begin; i < begin + n; ++i) all += q[i];
        return all;
    }
};

// Tokens lie piece by piece, [pieces][n] of one of these, so that N of them are near each other.
// For weights in blocks of 32: of 64 values, with their scales as the lanes of a sum have them
struct few_pair {
    static constexpr int SIZE = 64;
    rounded<32> half[2];
    float scale[16];
    static size_t n_more(int n_in) { return (size_t) (n_in + 511) / 512 * 16; }
    // more: of each 32 values the sum, [n_in/512][n][16]; those that fill up are 0
    void make(const float * x, int at, int n, float * more) {
        for (int i = 0; i < 2; ++i) {
            const float s = half[i].round(x + 32 * i);
            std::fill_n(scale + 8 * i, 8, s);
            more[(size_t) at / 512 * 16 * n + at % 512 / 32 + i] = s * (float) half[i].sum(0, 32);
        }
    }
};
// for such weights side by side; less: what levels of 4 bits are too high by, halved
struct few_block {
    static constexpr int SIZE = 32;
    rounded<32> values;
    float scale;
    int32_t less;
    static size_t n_more(int) { return 0; }
    void make(const float * x, int, int, float *) {
        scale = values.round(x);
        less = -4 * values.sum(0, 32);
    }
};
// for weights in blocks of 256; sums: of each OF values, times their scale
template <int OF>
struct few_block_256 {
    static constexpr int SIZE = 256;
    rounded<256> values;
    float sums[16], scale, filling[15];
    static size_t n_more(int) { return 0; }
    void make(const float * x, int, int, float *) {
        scale = values.round(x);
        std::fill_n(sums, 16, 0.0f);
        for (int i = 0; i < 256 / OF; ++i) sums[i] = scale * (float) values.sum(i * OF, OF);
    }
};

// rows [r0, r1) of a weight, and N tokens from t0 on of n
struct few_work {
    const char * w;
    size_t nb;
    int r0, r1, n_in, n, t0;
    const uint32_t * words;
    float * dst; // [n][n_rows]
    int64_t n_rows;

    template <class P>
    const P * pieces() const {
        return (const P *) words;
    }
    template <class P>
    const float * more() const {
        return (const float *) (pieces<P>() + (size_t) n_in / P::SIZE * n);
    }
    float * out(int t, int r) const { return dst + (t0 + t) * n_rows + r; }
};

// Brings n blocks of B from 2 KiB ahead: the processor alone is late where tokens keep its queue
// full
template <class B>
inline void few_ahead(const B * b, int n = 1) {
    for (size_t i = 0; i < n * sizeof(B); i += 64)
        _mm_prefetch((const char *) b + 2048 + i, _MM_HINT_T0);
}

inline float few_f32(ggml_half x) { return GGML_CPU_FP16_TO_FP32(x); }
inline __m512i few_half(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
inline __m256i few_32(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }

// 16 bytes at each of two places: the low four bits of the first, its high ones, ...
inline __m512i few_nibbles(const void * a, const void * b) {
    const __m256i two =
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) a)),
            _mm_loadu_si128((const __m128i *) b), 1);
    const __m512i twice = _mm512_permutexvar_epi64(
        _mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0), _mm512_castsi256_si512(two));
    return _mm512_and_si512(
        _mm512_srlv_epi64(twice, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0)), _mm512_set1_epi8(15));
}
// 32 bytes: their low four bits, then their high ones
inline __m512i few_nibbles(const void * a) {
    const __m512i twice = _mm512_broadcast_i64x4(few_32(a));
    return _mm512_and_si512(
        _mm512_srlv_epi64(twice, _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0)), _mm512_set1_epi8(15));
}

// levels of iq4_nl and iq4_xs, 128 above their values
inline __m512i few_looked_up(__m512i nibbles) {
    const __m128i values = _mm_loadu_si128((const __m128i *) kvalues_iq4nl);
    const __m128i above = _mm_xor_si128(values, _mm_set1_epi8((char) 128));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(above), nibbles);
}

// ---- blocks of 32 values; levels: of two blocks; low: what is added to a value, of 16 blocks

// half AT of each of n blocks, up to 16; 0 for others
template <int AT, class B>
inline __m512 few_halves(const B * b, int n) {
    ggml_half x[16] = {};
    for (int i = 0; i < std::min(n, 16); ++i)
        memcpy(&x[i], (const ggml_half *) (b + i) + AT, sizeof(x[i]));
    return _mm512_cvtph_ps(few_32(x));
}
// levels are ZERO above the values
template <class B, int ZERO>
struct few_above {
    using block = B;
    static __m512 low(const block *, int, __m512 scale) {
        return _mm512_mul_ps(scale, _mm512_set1_ps(-ZERO));
    }
};
// blocks have a low
template <class B>
struct few_lowest {
    using block = B;
    static __m512 low(const block * b, int n, __m512) { return few_halves<1>(b, n); }
};
template <class BASE>
struct few_four : BASE {
    static __m512i levels(const typename BASE::block * b) { return few_nibbles(b[0].qs, b[1].qs); }
};
template <class BASE>
struct few_five : BASE {
    static __m512i levels(const typename BASE::block * b) {
        uint32_t fifth[2];
        for (int i = 0; i < 2; ++i) memcpy(&fifth[i], b[i].qh, sizeof(fifth[i]));
        const __m512i low = few_nibbles(b[0].qs, b[1].qs);
        return _mm512_mask_add_epi8(
            low, (uint64_t) fifth[1] << 32 | fifth[0], low, _mm512_set1_epi8(16));
    }
};
struct few_q8_0 : few_above<block_q8_0, 128> {
    static __m512i levels(const block * b) {
        return _mm512_xor_si512(
            few_half(few_32(b[0].qs), few_32(b[1].qs)), _mm512_set1_epi8((char) 128));
    }
};
struct few_iq4_nl : few_above<block_iq4_nl, 128> {
    static __m512i levels(const block * b) { return few_looked_up(few_nibbles(b[0].qs, b[1].qs)); }
};
using few_q4_0 = few_four<few_above<block_q4_0, 8>>;
using few_q4_1 = few_four<few_lowest<block_q4_1>>;
using few_q5_0 = few_five<few_above<block_q5_0, 16>>;
using few_q5_1 = few_five<few_lowest<block_q5_1>>;

template <class F>
struct few_of_32 {
    using token = few_pair;
    template <int N>
    static void rows(const few_work & w);
};
template <class F>
template <int N>
void few_of_32<F>::rows(const few_work & w) {
    constexpr int MOST = 1024; // blocks whose scales are made at once, a multiple of 16
    alignas(64) float scale[MOST];
    const auto * first = w.pieces<few_pair>() + w.t0;
    const float * all_sums = w.more<few_pair>() + 16 * w.t0;
    for (int r = w.r0; r < w.r1; ++r) {
        const auto * b = (const typename F::block *) (w.w + r * w.nb);
        const auto * x = first;
        const float * x_sums = all_sums;
        __m512 sums[N];
        for (auto & s : sums) s = _mm512_setzero_ps();
        for (int left = w.n_in / 32; left > 0; left -= MOST) {
            const int n = std::min(left, MOST);
            for (int i = 0; i < n; i += 16, x_sums += 16 * w.n) {
                const __m512 d = few_halves<0>(b + i, n - i), low = F::low(b + i, n - i, d);
                _mm512_store_ps(scale + i, d);
                for (int t = 0; t < N; ++t)
                    sums[t] = _mm512_fmadd_ps(low, _mm512_loadu_ps(x_sums + 16 * t), sums[t]);
            }
            const __m512i two = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
            for (int i = 0; i < n; i += 2, b += 2, x += w.n) {
                few_ahead(b, 2);
                const __m512i u = F::levels(b);
                const __m512 d = _mm512_permutexvar_ps(two,
                    _mm512_castpd_ps(
                        _mm512_castpd128_pd512(_mm_load_sd((const double *) (scale + i)))));
                for (int t = 0; t < N; ++t) {
                    const __m512i dot = _mm512_dpbusd_epi32(
                        _mm512_setzero_si512(), u, _mm512_loadu_si512(x[t].half));
                    const __m512 step = _mm512_mul_ps(d, _mm512_loadu_ps(x[t].scale));
                    sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), step, sums[t]);
                }
            }
        }
        for (int t = 0; t < N; ++t) *w.out(t, r) = _mm512_reduce_add_ps(sums[t]);
    }
}

// ---- blocks of 256 values, each 32 or 16 of them with a scale; levels: of 64 values

// eight scales and lows of six bits each, packed into 12 bytes
inline void few_six(const uint8_t * packed, __m256 & scale, __m256 & low) {
    uint32_t s[3];
    memcpy(s, packed, sizeof(s));
    constexpr uint32_t SIX = 0x3f3f3f3f, FOUR = 0x0f0f0f0f, TWO = 0x03030303;
    const __m128i all = _mm_set_epi32((int) ((s[2] >> 4 & FOUR) | (s[1] >> 6 & TWO) << 4),
        (int) (s[1] & SIX), (int) ((s[2] & FOUR) | (s[0] >> 6 & TWO) << 4), (int) (s[0] & SIX));
    scale = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all));
    low = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)));
}

// Of two bits: four values in a byte, in runs of 32
inline __m512i few_twos(const uint8_t * qs, int i) {
    const __m512i shift =
        i % 2 ? _mm512_set_epi64(6, 6, 6, 6, 4, 4, 4, 4) : _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0);
    const __m512i all = _mm512_broadcast_i64x4(few_32(qs + i / 2 * 32));
    return _mm512_and_si512(_mm512_srlv_epi64(all, shift), _mm512_set1_epi8(3));
}
// x, and MORE where bits 2i (of 32 bytes) and 2i+1 are set
template <int MORE>
inline __m512i few_and_bits(__m512i x, const uint8_t * bits, int i) {
    const __m512i bit =
        few_half(_mm256_set1_epi8((char) (1 << 2 * i)), _mm256_set1_epi8((char) (2 << 2 * i)));
    return _mm512_mask_add_epi8(x, _mm512_test_epi8_mask(_mm512_broadcast_i64x4(few_32(bits)), bit),
        x, _mm512_set1_epi8(MORE));
}

// scale, low: of each 32 or 16 values, in lanes; low: what is added to a value; lanes: the scales
// of the lanes of 64 values
struct few_eight_scales {
    using token = few_block_256<32>;
    static __m512 lanes(__m512 scale, int i) {
        const __m512i two = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
        return _mm512_permutexvar_ps(_mm512_add_epi32(two, _mm512_set1_epi32(2 * i)), scale);
    }
};
struct few_sixteen_scales {
    using token = few_block_256<16>;
    static __m512 lanes(__m512 scale, int i) {
        const __m512i four = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        return _mm512_permutexvar_ps(_mm512_add_epi32(four, _mm512_set1_epi32(4 * i)), scale);
    }
    // d times integers of 8 bits
    static __m512 scales(__m128i x, float d) {
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)), _mm512_set1_ps(d));
    }
};
struct few_q2_K : few_sixteen_scales {
    using block = block_q2_K;
    static __m512i levels(const block & b, int i) { return few_twos(b.qs, i); }
    static void scales_and_lows(const block & b, __m512 & scale, __m512 & low) {
        ggml_half d[2]; // their names differ between compilers
        memcpy(d, (const char *) (&b + 1) - sizeof(d), sizeof(d));
        const __m128i both = _mm_loadu_si128((const __m128i *) b.scales), four = _mm_set1_epi8(15);
        scale = scales(_mm_and_si128(both, four), few_f32(d[0]));
        low = scales(_mm_and_si128(_mm_srli_epi16(both, 4), four), -few_f32(d[1]));
    }
};
struct few_q3_K : few_sixteen_scales {
    using block = block_q3_K;
    static __m512i levels(const block & b, int i) {
        return few_and_bits<4>(few_twos(b.qs, i), b.hmask, i);
    }
    static void scales_and_lows(const block & b, __m512 & scale, __m512 & low) {
        uint32_t s[3]; // the low four bits of 16, then the two above of each
        memcpy(s, b.scales, sizeof(s));
        constexpr uint32_t FOUR = 0x0f0f0f0f, TWO = 0x03030303;
        const __m128i all = _mm_set_epi32((int) ((s[1] >> 4 & FOUR) | (s[2] >> 6 & TWO) << 4),
            (int) ((s[0] >> 4 & FOUR) | (s[2] >> 4 & TWO) << 4),
            (int) ((s[1] & FOUR) | (s[2] >> 2 & TWO) << 4),
            (int) ((s[0] & FOUR) | (s[2] & TWO) << 4));
        scale = scales(_mm_sub_epi8(all, _mm_set1_epi8(32)), few_f32(b.d));
        low = _mm512_mul_ps(scale, _mm512_set1_ps(-4));
    }
};
struct few_iq4_xs : few_eight_scales {
    using block = block_iq4_xs;
    static __m512i levels(const block & b, int i) {
        return few_looked_up(few_nibbles(b.qs + 32 * i, b.qs + 32 * i + 16));
    }
    static void scales_and_lows(const block & b, __m512 & scale, __m512 & low) {
        uint32_t four;
        memcpy(&four, b.scales_l, sizeof(four));
        const __m256i at = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
        const __m256i of_low =
                          _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int) four), at),
                              _mm256_set1_epi32(15)),
                      of_high = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(b.scales_h),
                                                     _mm256_srli_epi32(at, 1)),
                          _mm256_set1_epi32(3));
        const __m256i all = _mm256_sub_epi32(
            _mm256_or_si256(of_low, _mm256_slli_epi32(of_high, 4)), _mm256_set1_epi32(32));
        scale = _mm512_zextps256_ps512(
            _mm256_mul_ps(_mm256_cvtepi32_ps(all), _mm256_set1_ps(few_f32(b.d))));
        low = _mm512_mul_ps(scale, _mm512_set1_ps(-128));
    }
};
struct few_q4_K : few_eight_scales {
    using block = block_q4_K;
    static __m512i levels(const block & b, int i) { return few_nibbles(b.qs + 32 * i); }
    template <class B>
    static void scales_and_lows(const B & b, __m512 & scale, __m512 & low) {
        ggml_half d[2];
        memcpy(d, &b, sizeof(d)); // their names differ between compilers
        __m256 s, m;
        few_six(b.scales, s, m);
        scale = _mm512_castps256_ps512(_mm256_mul_ps(s, _mm256_set1_ps(few_f32(d[0]))));
        low = _mm512_zextps256_ps512(_mm256_mul_ps(m, _mm256_set1_ps(-few_f32(d[1]))));
    }
};
struct few_q5_K : few_q4_K {
    using block = block_q5_K;
    static __m512i levels(const block & b, int i) {
        return few_and_bits<16>(few_nibbles(b.qs + 32 * i), b.qh, i);
    }
};
struct few_q6_K : few_sixteen_scales {
    using block = block_q6_K;
    // in each half of a block two bits of 32 bytes are the high ones of 32 values
    static __m512i levels(const block & b, int i) {
        const __m512i ql = _mm512_loadu_si512(b.ql + i / 2 * 64);
        const __m512i low =
            _mm512_and_si512(i % 2 ? _mm512_srli_epi16(ql, 4) : ql, _mm512_set1_epi8(15));
        return _mm512_or_si512(low, _mm512_slli_epi16(few_twos(b.qh, i), 4));
    }
    static void scales_and_lows(const block & b, __m512 & scale, __m512 & low) {
        scale = scales(_mm_loadu_si128((const __m128i *) b.scales), few_f32(b.d));
        low = _mm512_mul_ps(scale, _mm512_set1_ps(-32));
    }
};

template <class F>
struct few_of_256 {
    using token = typename F::token;
    template <int N>
    static void rows(const few_work & w);
};
template <class F>
template <int N>
void few_of_256<F>::rows(const few_work & w) {
    const auto * first = w.pieces<typename F::token>() + w.t0;
    for (int r = w.r0; r < w.r1; ++r) {
        const auto * b = (const typename F::block *) (w.w + r * w.nb);
        const auto * x = first;
        __m512 sums[N];
        for (auto & s : sums) s = _mm512_setzero_ps();
        for (int i = 0; i < w.n_in; i += 256, ++b, x += w.n) {
            few_ahead(b);
            __m512 scale, low, here[N];
            F::scales_and_lows(*b, scale, low);
            for (auto & s : here) s = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m512i u = F::levels(*b, j);
                const __m512 d = F::lanes(scale, j);
                for (int t = 0; t < N; ++t) {
                    const __m512i dot = _mm512_dpbusd_epi32(
                        _mm512_setzero_si512(), u, _mm512_loadu_si512(x[t].values.q + 64 * j));
                    here[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), d, here[t]);
                }
            }
            for (int t = 0; t < N; ++t)
                sums[t] = _mm512_fmadd_ps(here[t], _mm512_set1_ps(x[t].scale),
                    _mm512_fmadd_ps(low, _mm512_loadu_ps(x[t].sums), sums[t]));
        }
        for (int t = 0; t < N; ++t) *w.out(t, r) = _mm512_reduce_add_ps(sums[t]);
    }
}

// ---- rows side by side: eight bytes of each of eight rows in turn. A row has two lanes of a sum

inline __m512i few_eight(const int8_t * q) {
    int64_t x;
    memcpy(&x, q, sizeof(x));
    return _mm512_set1_epi64(x);
}
// of eight rows, for their lanes
inline __m512 few_twice(__m256 x) {
    return _mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0),
        _mm512_castps256_ps512(x));
}
inline __m256 few_scales(const ggml_half * d) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) d));
}
inline void few_put(__m512 lanes, __m256 more, float * dst) {
    const __m512 both = _mm512_add_ps(lanes, _mm512_permute_ps(lanes, 0xb1));
    const __m512i even = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m256 rows = _mm512_castps512_ps256(_mm512_permutexvar_ps(even, both));
    _mm256_storeu_ps(dst, _mm256_add_ps(rows, more));
}

struct few_sides_q4_0 {
    using token = few_block;
    template <int N>
    static void rows(const few_work & w);
};
template <int N>
void few_sides_q4_0::rows(const few_work & w) {
    const __m512i sign = _mm512_set1_epi8((char) 0x88), four = _mm512_set1_epi8(15);
    for (int r = w.r0; r < w.r1; r += 8) {
        const auto * b = (const block_q4_0x8 *) (w.w + r * w.nb);
        const auto * x = w.pieces<few_block>() + w.t0;
        __m512 sums[N];
        for (auto & s : sums) s = _mm512_setzero_ps();
        for (int i = 0; i < w.n_in; i += 32, ++b, x += w.n) {
            few_ahead(b);
            const __m512 d = few_twice(few_scales(b->d));
            __m512i u[4];
            for (int j = 0; j < 2; ++j) {
                // repacking turned each value's highest bit
                const __m512i v = _mm512_xor_si512(_mm512_loadu_si512(b->qs + 64 * j), sign);
                u[j] = _mm512_and_si512(v, four);
                u[2 + j] = _mm512_and_si512(_mm512_srli_epi16(v, 4), four);
            }
            for (int t = 0; t < N; ++t) {
                __m512i dot = _mm512_set1_epi32(x[t].less);
                for (int j = 0; j < 4; ++j)
                    dot = _mm512_dpbusd_epi32(dot, u[j], few_eight(x[t].values.q + 8 * j));
                const __m512 step = _mm512_mul_ps(d, _mm512_set1_ps(x[t].scale));
                sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), step, sums[t]);
            }
        }
        for (int t = 0; t < N; ++t) few_put(sums[t], _mm256_setzero_ps(), w.out(t, r));
    }
}

struct few_sides_q4_K {
    using token = few_block_256<32>;
    template <int N>
    static void rows(const few_work & w);
};
template <int N>
void few_sides_q4_K::rows(const few_work & w) {
    const __m512i four = _mm512_set1_epi8(15);
    for (int r = w.r0; r < w.r1; r += 8) {
        const auto * b = (const block_q4_Kx8 *) (w.w + r * w.nb);
        const auto * x = w.pieces<few_block_256<32>>() + w.t0;
        __m512 sums[N];
        __m256 lows[N];
        for (auto & s : sums) s = _mm512_setzero_ps();
        for (auto & s : lows) s = _mm256_setzero_ps();
        for (int i = 0; i < w.n_in; i += 256, ++b, x += w.n) {
            few_ahead(b);
            const __m256 d = few_scales(b->d), d_low = few_scales(b->dmin);
            __m512 here[N];
            for (auto & s : here) s = _mm512_setzero_ps();
            for (int j = 0; j < 8; ++j) {
                __m512i u[4];
                for (int k = 0; k < 4; ++k) {
                    const __m512i v = _mm512_loadu_si512(b->qs + j / 2 * 256 + 64 * k);
                    u[k] = _mm512_and_si512(j % 2 ? _mm512_srli_epi16(v, 4) : v, four);
                }
                __m256 scale, low;
                few_six(b->scales + 12 * j, scale, low);
                const __m512 s = few_twice(_mm256_mul_ps(scale, d));
                low = _mm256_mul_ps(low, d_low);
                for (int t = 0; t < N; ++t) {
                    __m512i dot = _mm512_setzero_si512();
                    for (int k = 0; k < 4; ++k)
                        dot = _mm512_dpbusd_epi32(
                            dot, u[k], few_eight(x[t].values.q + 32 * j + 8 * k));
                    here[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), s, here[t]);
                    lows[t] = _mm256_fnmadd_ps(low, _mm256_set1_ps(x[t].sums[j]), lows[t]);
                }
            }
            for (int t = 0; t < N; ++t)
                sums[t] = _mm512_fmadd_ps(here[t], _mm512_set1_ps(x[t].scale), sums[t]);
        }
        for (int t = 0; t < N; ++t) few_put(sums[t], lows[t], w.out(t, r));
    }
}

} // namespace edgekv
#endif
