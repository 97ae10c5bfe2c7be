#pragma once
// Words of four integers of 8 bits, for weights that are such integers: w = scale*u + low, |u| up
// to MOST (edgekv-levels.h). Tokens are rounded, block by block, as llama.cpp rounds them for such
// weights, but to x = step*q + base, 255 values from the least of a block to its largest: a
// block is seldom as far below 0 as above. x86 multiplies them without a sign, ARM with one.
//     sum of w x = scale*step * sum of u q + base * scale * sum of u + low * sum of x
// Weights without a `low` need no third term: what is done for a block beside its products counts,
// since 8 instructions add 32 values of a register of results up.
// Tokens for types with 256 values (Q4_K, Q5_K, Q6_K) have one step and base in these, as in
// llama.cpp: a span of 8 blocks, whose step and base come in once. A low is an integer there, as is
// the sum of a block's q: pairs of int16 are multiplied, two blocks in an instruction.
//     sum of w x = step * (sum of scale * u q, and of low * q) + base * sum of w

#include "edgekv-bytes.h"
#include "edgekv-levels.h"

#include <algorithm>
#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#if EDGEKV_INT8
namespace edgekv {

struct token_block {
    using E = simd_lanes<8, 4, 2>;
    static constexpr float LEAST = byte_products::LEAST;
    float step, base;
    union {
        float sum;        // of its values, as they were rounded
        int32_t in_steps; // of q, where they are in a span
        uint32_t pair;    // ... and that of another block
    };
    byte_products::token q[32];

    // f over the values of a register: halves with each other, else each would wait for the last
    template <class F>
    static float fold(const E::reg & x, F && f) {
        simd<E::N / 2>::reg half[2];
        memcpy(half, &x, sizeof(half));
        const auto four = f(half[0], half[1]);
        static_assert(sizeof(four) == 4 * sizeof(float), "a quarter of a register is a value");
        return f(f(four[0], four[1]), f(four[2], four[3]));
    }

    // of n values
    struct range {
        float least, step;
        range(const float * x, int n) {
            // written in vectors: gcc's own code goes from value to value
            auto low = E::load(x), high = low, sums = low;
            for (int i = E::N; i < n; i += E::N) {
                const auto v = E::load(x + i);
                low = E::if_less(v, low, v, low);
                high = E::max(v, high);
                sums = E::add(sums, v);
            }
            const auto smaller = [](auto a, auto b) { return a < b ? a : b; };
            const auto larger = [](auto a, auto b) { return a > b ? a : b; };
            const auto sum = [](auto a, auto b) { return a + b; };
            least = fold(low, smaller);
            const float most = fold(high, larger), total = fold(sums, sum);
            least += 0.0f * total; // what is not a number stays so
            step = (0.5f * most - 0.5f * least) / 127;
            if (!(step > FLT_MIN)) step = 1; // less has no inverse
        }
    };

    token_block(const float * x, const range & of, bool of_span) : step(of.step) {
        const float least = of.least, factor = 1 / step;
        int all = 0;
        for (int i = 0; i < 32; ++i) {
            // the low bits of 1.5 * 2^23 and a number are the number
            const float rounded = (x[i] - least) * factor + (12582912.0f + LEAST);
            int32_t bits;
            memcpy(&bits, &rounded, sizeof(bits));
            q[i] = (byte_products::token) bits;
            all += q[i];
        }
        base = least - LEAST * step;
        if (of_span) in_steps = all;
        else sum = step * (float) all + 32 * base;
    }
};
static_assert(sizeof(token_block) == sizeof(weight_block), "their words meet");

// LOW: whether weights have a `low`
template <bool LOW, int N_SPAN = 1, int N_PARTS = 1>
struct int8_words : byte_products {
    static_assert(!LOW || N_PARTS == 1, "a block has one or the other");
    static constexpr int SPAN = N_SPAN, PARTS = N_PARTS;
    static constexpr int PER = 4, N = L::N, ROWS = L::ROWS, VECTORS = L::VECTORS, P = N * VECTORS;
    static constexpr int BLOCK = 32 / PER, SCALES = sizeof(token_block) / 4 - BLOCK;
    static constexpr bool TILES = false, LEVELS = true, HAS_LOW = LOW;
    static constexpr int LOW_AT = 2; // of the words before a block
    struct scope {};
    static int n_words(int d) { return d / 32 * (BLOCK + SCALES); }

    // block by block, `step` words apart
    static void row(const float * x, int n, uint32_t * words, size_t step) {
        for (int i = 0; i < n; i += 32 * SPAN) {
            const token_block::range range(x + i, 32 * SPAN);
            // in place: a copy would wait until what it reads is written
            for (int j = 0; j < SPAN; ++j)
                new (words + j * step) token_block(x + i + 32 * j, range, SPAN > 1);
            for (int j = 0; j < SPAN / 2; ++j) {
                const auto sum = [&](int i) {
                    return ((token_block *) (words + i * step))->in_steps;
                };
                ((token_block *) (words + j * step))->pair =
                    (uint16_t) sum(2 * j) | (uint32_t) sum(2 * j + 1) << 16;
            }
            words += SPAN * step;
        }
    }
    static operand load(const uint32_t * p) { return byte_products::load(p, P); }
    // what stands before a block of them, [SCALES][P]
    struct weights {
        L::reg scale, sum, low;
        weights() = default;
        weights(const uint32_t * b, int part) {
            const auto * w = (const float *) b;
            scale = L::load(part == 0 ? w : w + 2 * P);
            if constexpr (SPAN == 1) sum = L::load(w + P);
            if constexpr (LOW && SPAN == 1) low = L::load(w + LOW_AT * P);
        }
    };
    // c and a block's sum, or that of one of its parts; a: of a token
    static L::reg add(L::reg sum, const uint32_t * a, const weights & w, int part, L::reg c) {
        const auto * x = (const float *) a;
        if (SPAN == 1 && part == 0) c = L::fma(L::set(x[1]), w.sum, c);
        if constexpr (LOW && SPAN == 1) c = L::fma(L::set(x[LOW_AT]), w.low, c);
        if constexpr (SPAN == 1) return L::fma(sum, L::mul(L::set(x[0]), w.scale), c);
        else return L::fma(sum, w.scale, c);
    }
    // of a block
    static L::reg sum_of_weights(const uint32_t * b) { return L::load((const float *) b + P); }
    // c and what `add` made of a span's blocks
    static L::reg add_span(L::reg sums, const uint32_t * a, L::reg of_weights, L::reg c) {
        const auto * x = (const float *) a;
        return L::fma(L::set(x[0]), sums, L::fma(L::set(x[1]), of_weights, c));
    }
};

} // namespace edgekv
#endif
