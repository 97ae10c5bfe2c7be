#pragma once
// The block of results of levels (edgekv-int8.h) with tokens, in registers from the first block of
// 32 values to the last: what is added up in 32 bits is added, block by block, to sums in f32.
// Tokens lie block by block, [n / a block][ROWS][a block], so that one stream is read.

#include "edgekv-words.h"

namespace edgekv {

// part PART of a block of weights; a call would send all sums through memory
template <class W, int ROWS, int VECTORS, int PART>
[[gnu::always_inline]] inline void add_block(
    const uint32_t * a, const uint32_t * b, typename W::L::reg (&sums)[ROWS][VECTORS]) {
    constexpr int P = W::N * VECTORS, WORDS = W::SCALES + W::BLOCK, H = W::HEIGHT;
    constexpr int N_PART = W::BLOCK / W::PARTS, BEGIN = W::SCALES + PART * N_PART;
    static_assert(ROWS % H == 0, "registers of results are whole");
    typename W::reg acc[ROWS / H][VECTORS];
    for (auto & row : acc)
        for (auto & x : row) x = W::zero();
// gcc 12 would peel a loop of a few steps, and write sums to the stack in it
#pragma GCC unroll 1
    for (int j = BEGIN; j < BEGIN + N_PART; j += W::AT_ONCE) {
        typename W::operand x[VECTORS];
        for (int v = 0; v < VECTORS; ++v) x[v] = W::load(b + j * P + v * W::N);
        for (int i = 0; i < ROWS / H; ++i) {
            const auto y = W::set(a + i * H * WORDS + j, WORDS);
            for (int v = 0; v < VECTORS; ++v) acc[i][v] = W::fma(x[v], y, acc[i][v]);
        }
    }
    typename W::weights w[VECTORS];
    for (int v = 0; v < VECTORS; ++v) w[v] = typename W::weights(b + v * W::N, PART);
// gcc 12 would write all results to the stack first
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v)
            sums[i][v] =
                W::add(W::to_f32(acc[i / H][v], i % H), a + i * WORDS, w[v], PART, sums[i][v]);
}

// a span's lows: pairs of integers, that of blocks 2 j and 2 j + 1 in block j, and their step
template <class W, int ROWS, int VECTORS>
[[gnu::always_inline]] inline void add_lows(
    const uint32_t * a, const uint32_t * b, typename W::L::reg (&sums)[ROWS][VECTORS]) {
    using L = typename W::L;
    constexpr int P = W::N * VECTORS, WORDS = W::SCALES + W::BLOCK, AT = W::LOW_AT;
    typename W::pairs acc[ROWS][VECTORS];
    for (auto & row : acc)
        for (auto & x : row) x = typename W::pairs {};
#pragma GCC unroll 1
    for (int j = 0; j < W::SPAN / 2; ++j)
        for (int v = 0; v < VECTORS; ++v) {
            const auto x = W::load_pairs(b + (j * WORDS + AT) * P + v * W::N);
            for (int i = 0; i < ROWS; ++i) {
                const auto y = W::set_pairs(a[(j * ROWS + i) * WORDS + AT]);
                acc[i][v] = W::add_pairs(x, y, acc[i][v]);
            }
        }
    for (int v = 0; v < VECTORS; ++v) {
        const auto step = L::load((const float *) b + (W::SPAN / 2 * WORDS + AT) * P + v * W::N);
        for (int i = 0; i < ROWS; ++i) sums[i][v] = L::fma(W::to_f32(acc[i][v]), step, sums[i][v]);
    }
}

// s[i*s_row + p] = (the same, if `add`) + the sum of n words
template <class W, int ROWS, int VECTORS>
void multiply_levels(
    const uint32_t * a, const uint32_t * b, int n, float * s, size_t s_row, bool add) {
    using L = typename W::L;
    constexpr int P = W::N * VECTORS, WORDS = W::SCALES + W::BLOCK;
    // sums of a span are in steps of its tokens, and come to the others at its end
    constexpr bool SPANS = W::SPAN > 1;
    const int span = SPANS ? W::SPAN * WORDS : n;
    // here spans are added up: rows of results may meet in a set of the nearest cache
    float totals[ROWS][P];
    for (int k = 0; k < n; k += span, a += ROWS * span, b += P * span) {
        typename L::reg sums[ROWS][VECTORS], of_weights[VECTORS];
        for (int v = 0; v < VECTORS; ++v) of_weights[v] = L::set(0.0f);
        for (int i = 0; i < ROWS; ++i)
            for (int v = 0; v < VECTORS; ++v)
                sums[i][v] = add && !SPANS ? L::load(s + i * s_row + v * W::N) : L::set(0.0f);
        for (int j = 0; j < span; j += WORDS) {
            const uint32_t *a_j = a + j * ROWS, *b_j = b + j * P;
            add_block<W, ROWS, VECTORS, 0>(a_j, b_j, sums);
            if constexpr (W::PARTS > 1) add_block<W, ROWS, VECTORS, 1>(a_j, b_j, sums);
            for (int v = 0; SPANS && v < VECTORS; ++v)
                of_weights[v] = L::add(of_weights[v], W::sum_of_weights(b_j + v * W::N));
        }
        if constexpr (SPANS && W::HAS_LOW) add_lows<W, ROWS, VECTORS>(a, b, sums);
        const bool last = k + span >= n;
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) {
                float *to = s + i * s_row + v * W::N, *so_far = totals[i] + v * W::N;
                if constexpr (SPANS) {
                    const auto c = k ? L::load(so_far) : add ? L::load(to) : L::set(0.0f);
                    sums[i][v] = W::add_span(sums[i][v], a + i * WORDS, of_weights[v], c);
                }
                L::store(last ? to : so_far, sums[i][v]);
            }
    }
}

} // namespace edgekv
