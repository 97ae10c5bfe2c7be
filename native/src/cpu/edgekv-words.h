#pragma once
// Words of 32 bits that a processor multiplies and adds up: one f32 or, where it has instructions
// for them, a pair of bf16, a pair of int16 (edgekv-int16.h) or four int8 (edgekv-int8.h).
//     L: the lanes of results; N of them in a register; ROWS x VECTORS: a block of results
//     n_words: of a row of d values
//     LEVELS: those of weights are levels (edgekv-levels.h), not made of f32
//     TILES: blocks are multiplied by edgekv-tiles.h, not by fma
//     SCALES: words that stand before each BLOCK words of integers, as f32; 0: there are none
//     SPAN: blocks whose tokens have one step
//     scope: lives on a thread while it multiplies
//     PER: values in a word; row: makes words of one row of f32, filled with 0; of levels with a
//     step from block to block
//     fma: acc[i] += the product of words b[i] and a, summed over values
//     result: of a block's sums, whose first words are a and b
// of levels
//     PARTS: scales of a weight's block
//     AT_ONCE: words that fma takes; HEIGHT: rows of a whose results share a register
//     weights: what stands before a block of weights; add: a block's sums to others
//     HAS_LOW: whether weights have a low; LOW_AT: its word of those before a block
// and for attention
//     join: word i has the i-th value of each of PER registers, up to 2^LOG2_MOST if they are
//     integers; add_up: acc[i] += its values; power: 2^x, as near as a word can be

#include "edgekv-lanes.h"

#include <cstddef>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

// whether the flags have products of pairs of bf16
#if defined(__AVX512BF16__) || \
    (defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__aarch64__) && defined(__GNUC__))
#define EDGEKV_PAIRS 1
#else
#define EDGEKV_PAIRS 0
#endif

namespace edgekv {

// what words of floats have in common
struct float_words {
    static constexpr int BLOCK = 0, SCALES = 0, SPAN = 1;
    static constexpr bool TILES = false, LEVELS = false;
    static constexpr float LOG2_MOST = 0;
    struct scope {};
};

template <class LANES>
struct f32_words : float_words {
    using L = LANES;
    static constexpr int PER = 1, N = L::N, ROWS = L::ROWS, VECTORS = L::VECTORS;
    static int n_words(int d) { return d; }
    using reg = typename L::reg;
    using operand = typename L::reg;
    static reg zero() { return L::set(0.0f); }
    static operand load(const uint32_t * p) { return L::load((const float *) p); }
    static operand set(const uint32_t * p) {
        float x;
        memcpy(&x, p, sizeof(x));
        return L::set(x);
    }
    static reg fma(operand a, operand b, reg c) { return L::fma(a, b, c); }
    static reg result(reg sum, const uint32_t *, const uint32_t *) { return sum; }
    static void store(uint32_t * p, operand a) { L::store((float *) p, a); }
    static operand join(const reg * x) { return x[0]; }
    static reg power(reg x) { return exp2<L>(x); }
    static reg add_up(operand a, reg c) { return L::add(c, a); }
    static void row(const float * x, int n, uint32_t * words) { memcpy(words, x, n * sizeof(*x)); }
};

#if defined(__AVX__)
// 8 rows of 8 words become columns
inline void turn_8(const uint32_t * from, size_t step, uint32_t * to, size_t to_step) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps((const float *) (from + i * step));
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    // a[4 g + j] has, of columns j and j + 4, the four values of rows 4 g to 4 g + 3
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
            a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
        }
    for (int j = 0; j < 4; ++j) {
        _mm256_storeu_ps(
            (float *) (to + j * to_step), _mm256_permute2f128_ps(a[j], a[4 + j], 0x20));
        _mm256_storeu_ps(
            (float *) (to + (j + 4) * to_step), _mm256_permute2f128_ps(a[j], a[4 + j], 0x31));
    }
}
#endif

// 16 rows of 16 words become columns
inline void turn_16(const uint32_t * from, size_t step, uint32_t * to, size_t to_step) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * step);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    }
    // a[4 g + j] has, of columns j, j + 4, j + 8, j + 12, the four values of rows 4 g to 4 g + 3
    for (int j = 0; j < 4; ++j) {
        const __m512i low01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88),
                      high01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd),
                      low23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88),
                      high23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        b[j] = _mm512_shuffle_i32x4(low01, low23, 0x88);
        b[j + 8] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
        b[j + 4] = _mm512_shuffle_i32x4(high01, high23, 0x88);
        b[j + 12] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
    }
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_step, b[i]);
#elif defined(__AVX__)
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 16; j += 8)
            turn_8(from + i * step + j, step, to + j * to_step + i, to_step);
#else
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) to[j * to_step + i] = from[i * step + j];
#endif
}

#if EDGEKV_PAIRS
struct bf16_words : float_words {
    using L = best_lanes;
    static constexpr int PER = 2, N = L::N;
    static int n_words(int d) { return (d + 1) / 2; }
#if defined(__AVX512BF16__)
    static constexpr int ROWS = 12, VECTORS = 2;
    using reg = __m512;
    using operand = __m512bh;
    static reg zero() { return _mm512_setzero_ps(); }
    static operand load(const uint32_t * p) { return (__m512bh) _mm512_loadu_si512(p); }
    static operand set(const uint32_t * p) { return (__m512bh) _mm512_set1_epi32((int) *p); }
    static reg fma(operand a, operand b, reg c) { return _mm512_dpbf16_ps(c, a, b); }
    static void store(uint32_t * p, operand a) { _mm512_storeu_si512(p, (__m512i) a); }
    template <class R> // a register of edgekv-lanes.h
    static operand join(const R * x) {
        const __m512i in_turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25,
            9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return (__m512bh) _mm512_permutexvar_epi16(in_turn, (__m512i) behind(x[0], x[1]));
    }
    static reg add_up(operand a, reg c) {
        return fma(a, (__m512bh) _mm512_set1_epi16(0x3f80), c); // of ones
    }
    // the values of x, then those of y
    static operand behind(L::reg x, L::reg y) {
        return _mm512_cvtne2ps_pbh((__m512) y, (__m512) x);
    }
    // 2^x = 2^floor(x) 2^f, 0 <= f < 1, in half of exp2's instructions: relative error
    // below 1.1e-4, and a word's is 2e-3
    static L::reg power(L::reg x) {
        const auto f = (L::reg) _mm512_reduce_ps((__m512) x, 1);
        auto p = L::fma(f, L::set(0.0780240f), L::set(0.2260671f));
        p = L::fma(p, f, L::set(0.6958335f));
        p = L::fma(p, f, L::set(0.9998925f));
        return (L::reg) _mm512_scalef_ps((__m512) p, (__m512) x);
    }
#else
    static constexpr int ROWS = L::ROWS, VECTORS = L::VECTORS;
    using reg = L::reg;
    using operand = bfloat16x8_t;
    static reg zero() { return L::set(0.0f); }
    static operand load(const uint32_t * p) { return vreinterpretq_bf16_u32(vld1q_u32(p)); }
    static operand set(const uint32_t * p) { return vreinterpretq_bf16_u32(vld1q_dup_u32(p)); }
    static reg fma(operand a, operand b, reg c) { return (reg) vbfdotq_f32((float32x4_t) c, a, b); }
    static void store(uint32_t * p, operand a) { vst1q_u32(p, vreinterpretq_u32_bf16(a)); }
    static operand join(const reg * x) {
        const uint16x8_t both = vreinterpretq_u16_bf16(behind(x[0], x[1]));
        const uint16x4_t first = vget_low_u16(both), second = vget_high_u16(both);
        return vreinterpretq_bf16_u16(
            vcombine_u16(vzip1_u16(first, second), vzip2_u16(first, second)));
    }
    static reg add_up(operand a, reg c) { // gcc 12 takes ones of bf16 for ones of f16
        const auto words = (L::bits) a;
        return L::add(L::add(c, (reg) (words << 16)), (reg) (words & 0xffff0000));
    }
    static operand behind(reg x, reg y) {
        return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t) x), (float32x4_t) y);
    }
    static reg power(reg x) { return exp2<L>(x); }
#endif
    static reg result(reg sum, const uint32_t *, const uint32_t *) { return sum; }
    static void row(const float * x, int n, uint32_t * words) {
        int i = 0;
        for (; i + 2 * N <= n; i += 2 * N)
            store(words + i / 2, behind(L::load(x + i), L::load(x + i + N)));
        if (i == n) return;
        float rest[2 * N] = {};
        memcpy(rest, x + i, (n - i) * sizeof(*x));
        uint32_t last[N];
        store(last, behind(L::load(rest), L::load(rest + N)));
        memcpy(words + i / 2, last, (size_t) (n - i + 1) / 2 * sizeof(*last));
    }
};
#endif

} // namespace edgekv
