#pragma once
// Words of four integers of 8 bits, for weights that are such integers: w = scale*u + low, |u| up
// to MOST (edgekv-levels.h). Tokens are rounded, block by block, as llama.cpp rounds them for such
// weights, but to x = step*q + base, from the block's least value: a block is seldom as far below 0
// as above.
//     sum of w x = scale*step * sum of u q + base * scale * sum of u + low * sum of x
// Weights without a `low` need no third term: what is done for a block beside its products counts,
// since 8 instructions add 32 values of a register of results up.

#include "edgekv-lanes.h"
#include "edgekv-levels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__GNUC__) // with the lanes of edgekv-lanes.h
#include <immintrin.h>

namespace edgekv {

struct token_block {
    using E = simd_lanes<8, 4, 2>;
    float step, base, sum; // sum: of its values, as they were rounded
    uint8_t q[32];

    explicit token_block(const float * x) {
        // written in vectors: gcc's own code goes from value to value
        auto low = E::load(x), high = low, sums = low;
        for (int i = E::N; i < 32; i += E::N) {
            const auto v = E::load(x + i);
            low = E::if_less(v, low, v, low);
            high = E::max(v, high);
            sums = E::add(sums, v);
        }
        float least = low[0], most = high[0], total = sums[0];
        for (int i = 1; i < E::N; ++i) {
            least = std::min(least, low[i]);
            most = std::max(most, high[i]);
            total += sums[i];
        }
        base = least + 0.0f * total; // what is not a number stays so
        step = (0.5f * most - 0.5f * least) / 127;
        const float factor = step > 0 ? 1 / step : 0;
        int all = 0;
        for (int i = 0; i < 32; ++i) {
            // the low bits of 1.5 * 2^23 and a number are the number
            const float rounded = (x[i] - base) * factor + 12582912.0f;
            int32_t bits;
            memcpy(&bits, &rounded, sizeof(bits));
            q[i] = (uint8_t) bits;
            all += q[i];
        }
        sum = step * (float) all + 32 * base;
    }
};
static_assert(sizeof(token_block) == sizeof(weight_block), "their words meet");

// registers of bytes, or of sums of 32 bits
#if defined(__AVX512VNNI__)
using bytes = __m512i;
using byte_lanes = simd_lanes<16, 12, 2>;
inline bytes load_bytes(const uint32_t * p) { return _mm512_loadu_si512(p); }
inline bytes set_bytes(uint32_t word) { return _mm512_set1_epi32((int) word); }
inline byte_lanes::reg sums_to_f32(bytes sums) {
    return (byte_lanes::reg) _mm512_cvtepi32_ps(sums);
}
#else
using bytes = __m256i;
using byte_lanes = simd_lanes<8, 4, 2>;
inline bytes load_bytes(const uint32_t * p) { return _mm256_loadu_si256((const __m256i *) p); }
inline bytes set_bytes(uint32_t word) { return _mm256_set1_epi32((int) word); }
inline byte_lanes::reg sums_to_f32(bytes sums) {
    return (byte_lanes::reg) _mm256_cvtepi32_ps(sums);
}
#endif

// LOW: whether weights have a `low`
template <bool LOW>
struct int8_words {
    using L = byte_lanes;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    static constexpr int MOST = 128, AT_ONCE = 1;
#else
    // 16 bits hold the sum of four products: 4 * 31 * 254 < 2^15
    static constexpr int MOST = 31, AT_ONCE = 2;
#endif
    static constexpr int PER = 4, N = L::N, ROWS = L::ROWS, VECTORS = L::VECTORS, P = N * VECTORS;
    static constexpr int BLOCK = 32 / PER, SCALES = sizeof(token_block) / 4 - BLOCK;
    static constexpr bool TILES = false, LEVELS = true;
    struct scope {};
    static int n_words(int d) { return d / 32 * (BLOCK + SCALES); }

    static void row(const float * x, int n, uint32_t * words) {
        for (int i = 0; i < n; i += 32, words += BLOCK + SCALES) {
            const token_block block(x + i);
            memcpy(words, &block, sizeof(block));
        }
    }

    using reg = bytes;
    struct operand {
        bytes of[AT_ONCE];
    };
    static reg zero() { return set_bytes(0); }
    static operand load(const uint32_t * p) {
        operand x;
        for (int i = 0; i < AT_ONCE; ++i) x.of[i] = load_bytes(p + i * P);
        return x;
    }
    static operand set(const uint32_t * p) {
        operand x;
        for (int i = 0; i < AT_ONCE; ++i) x.of[i] = set_bytes(p[i]);
        return x;
    }
    static reg fma(const operand & weights, const operand & tokens, reg c) {
        // written out: gcc 12 would do products of a whole block first and write sums to the stack
#if defined(__AVX512VNNI__)
        __asm__("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(tokens.of[0]), "v"(weights.of[0]));
#elif defined(__AVXVNNI__)
        __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(c) : "x"(tokens.of[0]), "x"(weights.of[0]));
#else
        bytes x, y;
        __asm__("vpmaddubsw %4, %3, %1\n\tvpmaddubsw %6, %5, %2\n\tvpaddw %2, %1, %1\n\t"
                "vpmaddwd %7, %1, %1\n\tvpaddd %1, %0, %0"
            : "+x"(c), "=&x"(x), "=&x"(y)
            : "x"(tokens.of[0]), "x"(weights.of[0]), "x"(tokens.of[1]), "x"(weights.of[1]),
            "xm"(_mm256_set1_epi16(1)));
#endif
        return c;
    }
    // c and a block's sum; a: of a token, b: of the weights, [SCALES][P]
    static L::reg add(reg sum, const uint32_t * a, const uint32_t * b, L::reg c) {
        const auto *x = (const float *) a, *w = (const float *) b;
        c = L::fma(L::set(x[1]), L::load(w + P), c);
        if constexpr (LOW) c = L::fma(L::set(x[2]), L::load(w + 2 * P), c);
        return L::fma(sums_to_f32(sum), L::mul(L::set(x[0]), L::load(w)), c);
    }
};

} // namespace edgekv
#endif
