#pragma once
// The block of results that a matrix kernel holds in registers, of words (edgekv-words.h):
//     s[i*s_row + p] = (the same, if ADD) + sum over n words j of a[i*to_row + j*to_step] b[j][p]
// for i below ROWS and p below P, which is VECTORS registers of lanes. Rows of LEVELS lie block by
// block, [n / a block][ROWS][a block], so that one stream is read.

#include "edgekv-words.h"

#include <algorithm>

namespace edgekv {

template <class W>
auto set(const uint32_t * a, [[maybe_unused]] size_t to_row) {
    if constexpr (W::LEVELS) return W::set(a, to_row);
    else return W::set(a);
}

// words of one block, the scales before them included
template <class W, int ROWS, int VECTORS, bool ADD>
void multiply_block(const uint32_t * a, size_t to_row, size_t to_step, const uint32_t * b, int n,
    float * s, size_t s_row = W::N * VECTORS) {
    using L = typename W::L;
    constexpr int P = W::N * VECTORS;
    constexpr int H = W::HEIGHT;
    static_assert(ROWS % H == 0, "registers of results are whole");
    if constexpr (W::LEVELS) to_row = W::SCALES + W::BLOCK; // known to the compiler
    typename W::reg acc[ROWS / H][VECTORS];
    for (auto & row : acc)
        for (auto & x : row) x = W::zero();
    const uint32_t *a_j = a + W::SCALES * to_step, *b_j = b + W::SCALES * P;
    for (int j = W::SCALES; j < n; j += W::AT_ONCE) {
        typename W::operand x[VECTORS];
        for (int v = 0; v < VECTORS; ++v) x[v] = W::load(b_j + v * W::N);
        for (int i = 0; i < ROWS / H; ++i) {
            const auto y = set<W>(a_j + i * H * to_row, to_row);
            for (int v = 0; v < VECTORS; ++v) acc[i][v] = W::fma(x[v], y, acc[i][v]);
        }
        a_j += W::AT_ONCE * to_step;
        b_j += W::AT_ONCE * P;
    }
    [[maybe_unused]] typename W::weights w[VECTORS];
    for (int v = 0; v < VECTORS; ++v) w[v] = typename W::weights(b + v * W::N);
// gcc 12 would write all results to the stack first
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i, a += to_row, s += s_row)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) {
            float * to = s + v * W::N;
            if constexpr (W::LEVELS) {
                const auto before = ADD ? L::load(to) : L::set(0.0f);
                L::store(to, W::add(W::to_f32(acc[i / H][v], i % H), a, w[v], before));
            } else {
                const auto x = W::result(acc[i][v], a, w[v]);
                L::store(to, ADD ? L::add(L::load(to), x) : x);
            }
        }
}

template <class W, int ROWS, int VECTORS, bool ADD>
void multiply(const uint32_t * a, size_t to_row, size_t to_step, const uint32_t * b, int n,
    float * s, size_t s_row = W::N * VECTORS) {
    const int step = W::SCALES ? W::BLOCK + W::SCALES : n;
    multiply_block<W, ROWS, VECTORS, ADD>(a, to_row, to_step, b, std::min(n, step), s, s_row);
    const size_t to_next = W::LEVELS ? ROWS : to_step;
    for (int j = step; j < n; j += step)
        multiply_block<W, ROWS, VECTORS, true>(a + j * to_next, to_row, to_step,
            b + (size_t) j * W::N * VECTORS, std::min(n - j, step), s, s_row);
}

} // namespace edgekv
