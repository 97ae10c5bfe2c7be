#pragma once
// Words of four integers of 8 bits, for weights that are such integers: w = scale*u + low, |u| up
// to MOST (edgekv-levels.h). Tokens are rounded, block by block, as llama.cpp rounds them for such
// weights, but to x = step*q + base, 255 values from the least of a block to its largest: a
// block is seldom as far below 0 as above. x86 multiplies them without a sign, ARM with one.
//     sum of w x = scale*step * sum of u q + base * scale * sum of u + low * sum of x
// Weights without a `low` need no third term: what is done for a block beside its products counts,
// since 8 instructions add 32 values of a register of results up.

#include "edgekv-bytes.h"
#include "edgekv-levels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#if EDGEKV_INT8
namespace edgekv {

struct token_block {
    using E = simd_lanes<8, 4, 2>;
    static constexpr float LEAST = byte_products::LEAST;
    float step, base, sum; // sum: of its values, as they were rounded
    byte_products::token q[32];

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
        least += 0.0f * total; // what is not a number stays so
        step = (0.5f * most - 0.5f * least) / 127;
        const float factor = step > 0 ? 1 / step : 0;
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
        sum = step * (float) all + 32 * base;
    }
};
static_assert(sizeof(token_block) == sizeof(weight_block), "their words meet");

// LOW: whether weights have a `low`
template <bool LOW>
struct int8_words : byte_products {
    static constexpr int PER = 4, N = L::N, ROWS = L::ROWS, VECTORS = L::VECTORS, P = N * VECTORS;
    static constexpr int BLOCK = 32 / PER, SCALES = sizeof(token_block) / 4 - BLOCK;
    static constexpr bool TILES = false, LEVELS = true;
    struct scope {};
    static int n_words(int d) { return d / 32 * (BLOCK + SCALES); }

    // block by block, `step` words apart
    static void row(const float * x, int n, uint32_t * words, size_t step) {
        for (int i = 0; i < n; i += 32, words += step) {
            // in place: a copy would wait until what it reads is written
            new (words) token_block(x + i);
        }
    }
    static operand load(const uint32_t * p) { return byte_products::load(p, P); }
    // what stands before a block of them, [SCALES][P]: in registers, since gcc 12 would load it
    // for every row of results
    struct weights {
        L::reg scale, sum, low;
        weights() = default;
        explicit weights(const uint32_t * b) {
            const auto * w = (const float *) b;
            scale = held(L::load(w));
            sum = held(L::load(w + P));
            if constexpr (LOW) low = held(L::load(w + 2 * P));
        }
    };
    // c and a block's sum; a: of a token
    static L::reg add(L::reg sum, const uint32_t * a, const weights & w, L::reg c) {
        const auto * x = (const float *) a;
        c = L::fma(L::set(x[1]), w.sum, c);
        if constexpr (LOW) c = L::fma(L::set(x[2]), w.low, c);
        return L::fma(sum, L::mul(L::set(x[0]), w.scale), c);
    }
};

} // namespace edgekv
#endif
