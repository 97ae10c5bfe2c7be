#pragma once
// The block of results that a matrix kernel holds in registers, of words (edgekv-words.h):
//     s[i*s_row + p] = (the same, if ADD) + sum over n words j of a[i*to_row + j*to_step] b[j][p]
// for i below ROWS and p below P, which is VECTORS registers of lanes. Of levels:
// edgekv-multiply-levels.h.

#include "edgekv-words.h"

#include <algorithm>

namespace edgekv {

// words of one block, the scales before them included
template <class W, int ROWS, int VECTORS, bool ADD>
void multiply_block(const uint32_t * a, size_t to_row, size_t to_step, const uint32_t * b, int n,
    float * s, size_t s_row = W::N * VECTORS) {
    using L = typename W::L;
    constexpr int P = W::N * VECTORS;
    typename W::reg acc[ROWS][VECTORS];
    for (auto & row : acc)
        for (auto & x : row) x = W::zero();
    const uint32_t *a_j = a + W::SCALES * to_step, *b_j = b + W::SCALES * P;
    for (int j = W::SCALES; j < n; ++j) {
        typename W::operand x[VECTORS];
        for (int v = 0; v < VECTORS; ++v) x[v] = W::load(b_j + v * W::N);
        for (int i = 0; i < ROWS; ++i) {
            const auto y = W::set(a_j + i * to_row);
            for (int v = 0; v < VECTORS; ++v) acc[i][v] = W::fma(x[v], y, acc[i][v]);
        }
        a_j += to_step;
        b_j += P;
    }
// gcc 12 would write all results to the stack first
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i, a += to_row, s += s_row)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) {
            float * to = s + v * W::N;
            const auto x = W::result(acc[i][v], a, b + v * W::N);
            L::store(to, ADD ? L::add(L::load(to), x) : x);
        }
}

template <class W, int ROWS, int VECTORS, bool ADD>
void multiply(const uint32_t * a, size_t to_row, size_t to_step, const uint32_t * b, int n,
    float * s, size_t s_row = W::N * VECTORS) {
    const int step = W::SCALES ? W::BLOCK + W::SCALES : n;
    multiply_block<W, ROWS, VECTORS, ADD>(a, to_row, to_step, b, std::min(n, step), s, s_row);
    for (int j = step; j < n; j += step)
        multiply_block<W, ROWS, VECTORS, true>(a + j * to_step, to_row, to_step,
            b + (size_t) j * W::N * VECTORS, std::min(n - j, step), s, s_row);
}

} // namespace edgekv
