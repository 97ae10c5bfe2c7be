#pragma once
// What adds up products of bytes in 32 bits, four to a word: weights, which have a sign, with
// tokens, which on x86 have none.
//     L: the lanes of results; MOST: of |weight|
//     AT_ONCE, HEIGHT: edgekv-words.h
//     token: the integer of one, from LEAST to LEAST + 254
//     load: AT_ONCE rows of words of weights, `step` apart; set: words of HEIGHT tokens, likewise
//     to_f32: the sums of token i of HEIGHT
// and products of pairs of int16
//     pairs: their sums; load_pairs: a register of words; set_pairs: one word in all places;
//     add_pairs: c and the products

#include "edgekv-lanes.h"

#include <cstddef>
#include <cstdint>

#if defined(__GNUC__) && (defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD))
#define EDGEKV_INT8 1 // with the lanes of edgekv-lanes.h
#else
#define EDGEKV_INT8 0
#endif

#if EDGEKV_INT8
#if defined(__AVX2__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace edgekv {

#if defined(__AVX2__)
// Registers of bytes, and of their sums
struct byte_registers {
#if defined(__AVX512VNNI__) || (defined(__AVX512BW__) && !defined(__AVXVNNI__))
    using L = simd_lanes<16, 6, 2>;
    using reg = __m512i;
    typedef int32_t sums __attribute__((vector_size(64)));
    static reg zero() { return _mm512_setzero_si512(); }
    static reg row(const uint32_t * p) { return _mm512_loadu_si512(p); }
    static reg all(uint32_t word) { return _mm512_set1_epi32((int) word); }
    // as fast as vpdpwssd, which not all have
    static reg add_pairs(reg x, reg y, reg c) {
        return _mm512_add_epi32(c, _mm512_madd_epi16(x, y));
    }
#else
    using L = simd_lanes<8, 4, 2>;
    using reg = __m256i;
    typedef int32_t sums __attribute__((vector_size(32)));
    static reg zero() { return _mm256_setzero_si256(); }
    static reg row(const uint32_t * p) { return _mm256_loadu_si256((const __m256i *) p); }
    static reg all(uint32_t word) { return _mm256_set1_epi32((int) word); }
    static reg add_pairs(reg x, reg y, reg c) {
        return _mm256_add_epi32(c, _mm256_madd_epi16(x, y));
    }
#endif
    using pairs = reg;
    static reg load_pairs(const uint32_t * p) { return row(p); }
    static reg set_pairs(uint32_t word) { return all(word); }
    static L::reg to_f32(reg c, int = 0) { return __builtin_convertvector((sums) c, L::reg); }
};

// Products are written out: gcc 12 would do those of a whole block first and write sums to the
// stack
struct byte_products : byte_registers {
    using token = uint8_t;
    static constexpr int HEIGHT = 1, LEAST = 0;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    using operand = reg;
    static constexpr int MOST = 128, AT_ONCE = 1;
    static operand load(const uint32_t * p, size_t) { return row(p); }
    static operand set(const uint32_t * p, size_t) { return all(*p); }
    static reg fma(operand weights, operand tokens, reg c) {
#if defined(__AVX512VNNI__)
        __asm__("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(tokens), "v"(weights));
#else
        __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(c) : "x"(tokens), "x"(weights));
#endif
        return c;
    }
#else
    // 16 bits hold the sum of four products: 4 * 32 * 254 < 2^15
    static constexpr int MOST = 32, AT_ONCE = 2;
    struct operand {
        reg x, y;
    };
    static operand load(const uint32_t * p, size_t step) { return { row(p), row(p + step) }; }
    static operand set(const uint32_t * p, size_t) { return { all(p[0]), all(p[1]) }; }
    static reg fma(operand weights, operand tokens, reg c) {
        reg x, y;
        __asm__("vpmaddubsw %4, %3, %1\n\tvpmaddubsw %6, %5, %2\n\tvpaddw %2, %1, %1\n\t"
                "vpmaddwd %7, %1, %1\n\tvpaddd %1, %0, %0"
            : "+v"(c), "=&v"(x), "=&v"(y)
            : "v"(tokens.x), "v"(weights.x), "v"(tokens.y), "v"(weights.y), "vm"(all(0x00010001)));
        return c;
    }
#endif
};
#else
struct pair_products {
    using pairs = int32x4_t;
    static int16x8_t load_pairs(const uint32_t * p) { return vreinterpretq_s16_u32(vld1q_u32(p)); }
    static int16x8_t set_pairs(uint32_t word) { return vreinterpretq_s16_u32(vdupq_n_u32(word)); }
    static pairs add_pairs(int16x8_t x, int16x8_t y, pairs c) {
        const auto low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
        return vaddq_s32(c, vpaddq_s32(low, vmull_high_s16(x, y)));
    }
};
#if defined(__ARM_FEATURE_MATMUL_INT8)
// an instruction multiplies two words of two tokens with those of two rows of the weight
struct byte_products : pair_products {
    using L = simd_lanes<4, 8, 2>;
    using token = int8_t;
    static constexpr int MOST = 128, AT_ONCE = 2, HEIGHT = 2, LEAST = -127;
    struct reg {
        int32x4_t of[2]; // [token][row] of the first two rows, of the others
    };
    struct operand {
        uint32x4_t of[2];
    };
    static reg zero() { return { { vdupq_n_s32(0), vdupq_n_s32(0) } }; }
    static operand load(const uint32_t * p, size_t step) {
        const uint32x4_t x = vld1q_u32(p), y = vld1q_u32(p + step);
        return { { vzip1q_u32(x, y), vzip2q_u32(x, y) } };
    }
    static uint32x4_t set(const uint32_t * p, size_t step) {
        return vcombine_u32(vld1_u32(p), vld1_u32(p + step));
    }
    static reg fma(operand weights, uint32x4_t tokens, reg c) {
        for (int i = 0; i < 2; ++i)
            c.of[i] = vmmlaq_s32(
                c.of[i], vreinterpretq_s8_u32(tokens), vreinterpretq_s8_u32(weights.of[i]));
        return c;
    }
    static L::reg to_f32(pairs c) { return (L::reg) vcvtq_f32_s32(c); }
    static L::reg to_f32(reg c, int i) {
        const auto x = vreinterpretq_s64_s32(c.of[0]), y = vreinterpretq_s64_s32(c.of[1]);
        const auto sums = i == 0 ? vzip1q_s64(x, y) : vzip2q_s64(x, y);
        return (L::reg) vcvtq_f32_s32(vreinterpretq_s32_s64(sums));
    }
};
#else
struct byte_products : pair_products {
    using L = simd_lanes<4, 5, 4>;
    using reg = int32x4_t;
    using operand = int8x16_t;
    using token = int8_t;
    static constexpr int MOST = 128, AT_ONCE = 1, HEIGHT = 1, LEAST = -127;
    static reg zero() { return vdupq_n_s32(0); }
    static operand load(const uint32_t * p, size_t) { return vreinterpretq_s8_u32(vld1q_u32(p)); }
    static operand set(const uint32_t * p, size_t) {
        return vreinterpretq_s8_u32(vld1q_dup_u32(p));
    }
    static reg fma(operand weights, operand tokens, reg c) { return vdotq_s32(c, weights, tokens); }
    static L::reg to_f32(reg c, int = 0) { return (L::reg) vcvtq_f32_s32(c); }
};
#endif
#endif

} // namespace edgekv
#endif
