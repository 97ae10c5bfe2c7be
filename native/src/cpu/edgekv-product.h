#pragma once
// Products of a weight with many tokens: dst[t][r] = sum over i of w[r][i] x[t][i].
// llama.cpp unpacks each block of a quantised weight for a few tokens, in 8 bits. Here P rows of
// the weight are unpacked once, into words that lie as the kernel reads them, and meet all tokens
// while they are in the nearest cache. Which thread has which rows changes no result.

#include "edgekv-aligned.h"
#include "edgekv-unpack.h"
#include "edgekv-words.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace edgekv {

// W: edgekv-words.h; R: the weight's rows
template <class W, class R = weight_rows>
struct product {
    static constexpr int P = W::N * W::VECTORS; // rows of the weight at once
    static constexpr int STEP = 512;            // words of a row that stay in the nearest cache
    static constexpr int GAP = 16;              // words between tokens: else they meet in a cache

    R w;
    int n_in, n_rows, n_tokens;
    const float * x; // [n_tokens][n_in]
    float * dst;     // [n_tokens][n_rows]
    uint32_t * words;

    struct workspace {
        aligned_floats rows, words, panel;
    };

    static int n_words(int n_in) { return (n_in + W::PER - 1) / W::PER; }
    static size_t stride(int n_in) { return n_words(n_in) + GAP; }
    // tokens are filled up to whole blocks of W::ROWS
    static size_t n_all_words(int n_in, int n_tokens) {
        return (size_t) (n_tokens + W::ROWS - 1) / W::ROWS * W::ROWS * stride(n_in);
    }

    // part ith of nth of the tokens as words
    void make_words(int ith, int nth) const {
        const int n_all = (n_tokens + W::ROWS - 1) / W::ROWS * W::ROWS;
        const size_t step = stride(n_in);
        for (int t = ith; t < n_all; t += nth) {
            uint32_t * to = words + t * step;
            if (t < n_tokens) W::row(x + (size_t) t * n_in, n_in, to);
            else memset(to, 0, n_words(n_in) * sizeof(*to));
        }
    }

    // rows [r0, r0 + P) as [n_words][P], those beyond the last as 0
    const uint32_t * make_panel(workspace & s, int r0) const {
        const int n = n_words(n_in), n_here = std::min(P, n_rows - r0);
        auto * words = (uint32_t *) s.words.get((size_t) P * n);
        auto * panel = (uint32_t *) s.panel.get((size_t) P * n);
        float * rows = s.rows.get((size_t) R::AT_ONCE * n_in);
        for (int r = 0; r < n_here; r += R::AT_ONCE) {
            const int n_got = std::min<int>(R::AT_ONCE, n_here - r);
            w.unpack(r0 + r, n_got, n_in, rows);
            for (int i = 0; i < n_got; ++i)
                W::row(rows + (size_t) i * n_in, n_in, words + (size_t) (r + i) * n);
        }
        memset(words + (size_t) n_here * n, 0, (size_t) (P - n_here) * n * sizeof(*words));
        turn(words, n, panel);
        return panel;
    }

    // [P][n] to [n][P], square by square
    static void turn(const uint32_t * from, int n, uint32_t * to) {
        constexpr int B = 16;
        for (int k = 0; k < n; k += B) {
            const int m = std::min(B, n - k);
            for (int r = 0; r < P; r += W::N) {
#if defined(__AVX512F__)
                if constexpr (W::N == 16) {
                    if (m == B) {
                        turn_16(from + (size_t) r * n + k, n, to + (size_t) k * P + r);
                        continue;
                    }
                }
#endif
                for (int i = 0; i < m; ++i)
                    for (int j = 0; j < W::N; ++j)
                        to[(size_t) (k + i) * P + r + j] = from[(size_t) (r + j) * n + k + i];
            }
        }
    }

#if defined(__AVX512F__)
    static void turn_16(const uint32_t * from, size_t step, uint32_t * to) {
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
        // a[4 g + j] has, of columns j, j + 4, j + 8, j + 12, the four values of rows 4 g to 4 g +
        // 3
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
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (size_t) i * P, b[i]);
    }
#endif

    // words [k, k + n) of a block of tokens with a panel; begins the sums, or adds to them
    void block(const uint32_t * panel, int r0, int t0, int k, int n) const {
        typename W::reg acc[W::ROWS][W::VECTORS];
        for (auto & row : acc)
            for (auto & a : row) a = W::zero();
        const size_t step = stride(n_in);
        const uint32_t *b = panel + (size_t) k * P, *a = words + t0 * step + k;
        for (int i = 0; i < n; ++i, b += P, ++a) {
            typename W::operand column[W::VECTORS];
            for (int j = 0; j < W::VECTORS; ++j) column[j] = W::load(b + j * W::N);
            for (int t = 0; t < W::ROWS; ++t) {
                const auto value = W::set(a + t * step);
                for (int j = 0; j < W::VECTORS; ++j)
                    acc[t][j] = W::fma(value, column[j], acc[t][j]);
            }
        }
        const int n_t = std::min<int>(W::ROWS, n_tokens - t0), n_r = std::min(P, n_rows - r0);
        float sums[W::ROWS][P];
        for (int t = 0; t < W::ROWS; ++t)
            for (int j = 0; j < W::VECTORS; ++j) W::store(&sums[t][j * W::N], acc[t][j]);
        for (int t = 0; t < n_t; ++t) {
            float * to = dst + (size_t) (t0 + t) * n_rows + r0;
            if (k == 0) memcpy(to, sums[t], n_r * sizeof(float));
            else
                for (int r = 0; r < n_r; ++r) to[r] += sums[t][r];
        }
    }

    // panels are taken one after the other by whoever is free
    void run(workspace & s, std::atomic<int32_t> & next) const {
        const int n = n_words(n_in), n_panels = (n_rows + P - 1) / P;
        for (int i = next++; i < n_panels; i = next++) {
            const uint32_t * panel = make_panel(s, i * P);
            for (int k = 0; k < n; k += STEP)
                for (int t = 0; t < n_tokens; t += W::ROWS)
                    block(panel, i * P, t, k, std::min(STEP, n - k));
        }
    }
};

} // namespace edgekv
