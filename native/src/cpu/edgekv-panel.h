#pragma once
// Panels: many queries of a KV head at once. What edgekv-prompt.h (attend) and edgekv-columns.h
// (score) have in common.
//
// Queries lie in the lanes. A panel is as many of them as VECTORS registers have lanes, transposed
// once; rows of K and V are converted to f32 in tiles and stay as they are: each of their values is
// a factor for a whole panel. So a maximum, an exp and a sum over rows go down the lanes, and a row
// that a query does not see is a comparison of two numbers in the tiles at the edge.
//     s[row][query] = sum over j of k[row][j] q[j][query]
// What is multiplied are words (edgekv-words.h). Where a word is a pair, products with K have pairs
// of a row's values, those with V pairs of rows. Sums and the softmax are f32.
// Tiles begin at fixed rows and lanes never mix, so a query's result does not depend on who its
// neighbours are.

#include "edgekv-aligned.h"
#include "edgekv-cpu.h"
#include "edgekv-multiply.h"
#include "edgekv-tiles.h"
#include "edgekv-words.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace edgekv {

template <class L, class W = f32_words<L>>
struct panels {
    static constexpr int P = L::N * L::VECTORS; // queries of a panel
    static constexpr int T = 64;                // rows of a tile
    // sums are made in blocks of so many rows of K, or values of V
    static constexpr int BLOCK = W::TILES ? L::ROWS : 1;
    static constexpr float NOTHING = -1e30f; // the maximum before a row was seen
    // what was summed is scaled anew when the maximum has grown by a factor of 2^8
    static constexpr float SLACK = 8;
    static_assert(T % L::ROWS == 0 && L::ROWS % 2 == 0, "tiles are whole blocks");
    static_assert(W::N == L::N && L::ROWS % W::PER == 0, "blocks are whole words");
    static_assert(!W::TILES || P == L::ROWS, "tiles come in squares");

    const edgekv_rows & rows;
    const edgekv_queries & qs;
    int d_o; // values that a panel gathers
    int G = rows.n_head / rows.n_head_kv;
    int n_k = W::n_words(rows.d_k);              // words of a row of K
    int n_o = (d_o + BLOCK - 1) / BLOCK * BLOCK; // rows of o

    // query number i of KV head k is that of token i/G, head k*G + i % G; lanes behind n are 0 and
    // see nothing
    struct panel {
        uint32_t * q;             // [n_k][P], scaled so that a logit is a power of two
        float * o;                // [n_o][P]
        float *m, *sum, *lo, *hi; // [P]; visible rows [lo, hi)
        // [P]; ALiBi: of the head, as a power of two; token of the last row that is seen
        float *slope, *at;
        const float * pos;                            // of the head's rows, or null
        int lo_min, lo_max, hi_min, hi_max, first, n; // n queries from number `first` on
    };
    // words of n rows of V, of one value
    static constexpr int v_words(int n) { return W::SCALES + n / W::PER; }
    size_t floats() const { return (size_t) (n_k + n_o + 6) * P; } // of a panel

    // all memory of a thread: a tile of K and of V, its weights for a panel, a block of panels,
    // rows that become words
    struct workspace {
        aligned_floats k_room, v_room, s_room, panel_room, row_room, pair_room;
        uint32_t *k, *v; // [T][n_k], [v_words(T)][d_o], of tiles [n_o][T / W::PER]
        float * s;       // [T][P]
        float * rows;    // [T][d_k or d_o]
        std::vector<panel> panels;
        int lo, hi; // rows that any of them sees
    };

    // panels that share a converted tile: they stay in the second-level cache; but every thread
    // shall have some blocks of them, and all threads as many
    int panels_of_block(int nth) const {
        const int most = std::max<int>(2, (int) ((256u << 10) / (floats() * sizeof(float))));
        const int n = (int) (((int64_t) qs.n_tokens * G + P - 1) / P), H = rows.n_head_kv;
        int n_blocks = std::max((n + most - 1) / most, (4 * nth + H - 1) / H); // of a head
        while (n_blocks * H % nth != 0 && 2 * n_blocks < n) ++n_blocks;
        return std::max(2, (n + n_blocks - 1) / n_blocks);
    }

    // queries [first, first + n) of KV head k
    void make_block(workspace & w, int k, int first, int n) const {
        w.k = (uint32_t *) w.k_room.get((size_t) T * n_k);
        w.v = (uint32_t *) w.v_room.get((size_t) v_words(T) * n_o);
        w.s = w.s_room.get((size_t) T * P);
        w.rows = w.row_room.get((size_t) T * std::max(rows.d_k, d_o));
        float * memory = w.panel_room.get(floats() * ((n + P - 1) / P));
        w.panels.clear();
        w.lo = INT32_MAX;
        w.hi = 0;
        for (int i = 0; i < n; i += P, memory += floats()) {
            w.panels.push_back(make(w, k, first + i, std::min(P, n - i), memory));
            w.lo = std::min(w.lo, w.panels.back().lo_min);
            w.hi = std::max(w.hi, w.panels.back().hi_max);
        }
    }

    panel make(workspace & w, int k, int first, int n, float * memory) const {
        panel p;
        p.first = first;
        p.n = n;
        p.q = (uint32_t *) memory;
        p.o = memory + (size_t) n_k * P;
        p.m = p.o + (size_t) n_o * P;
        p.sum = p.m + P;
        p.lo = p.sum + P;
        p.hi = p.lo + P;
        p.slope = p.hi + P;
        p.at = p.slope + P;
        p.pos = rows.max_bias == 0.0f ? nullptr : rows.pos + rows.first[k];
        memset(memory, 0, floats() * sizeof(float));
        std::fill_n(p.m, P, NOTHING);
        p.lo_min = p.hi_min = INT32_MAX;
        p.lo_max = p.hi_max = 0;
        const float scale = rows.softcap == 0.0f ? rows.scale * LOG2E : rows.scale / rows.softcap;
        for (int i = 0; i < n; ++i) {
            const int t = (first + i) / G, h = k * G + (first + i) % G;
            const float * q = qs.q + t * qs.stride_t + h * qs.stride_h;
            for (int j = 0; j < rows.d_k; ++j) w.rows[j] = scale * q[j];
            W::row(w.rows, rows.d_k, w.k); // no tile is there yet
            for (int j = 0; j < n_k; ++j) p.q[(size_t) j * P + i] = w.k[j];
            int lo, hi;
            visible(rows, qs, t, k, lo, hi);
            p.lo[i] = (float) lo;
            p.hi[i] = (float) hi;
            if (p.pos && lo < hi) {
                p.slope[i] = LOG2E * edgekv_alibi_slope(rows.max_bias, rows.n_head, h);
                p.at[i] = p.pos[hi - 1];
            }
            p.lo_min = std::min(p.lo_min, lo);
            p.lo_max = std::max(p.lo_max, lo);
            p.hi_min = std::min(p.hi_min, hi);
            p.hi_max = std::max(p.hi_max, hi);
        }
        return p;
    }

    // n rows from row `at` of KV head k on; those behind are 0, because a row that nobody sees is
    // multiplied all the same
    void load_k(int k, int at, int n, workspace & w) const {
        float * tile = W::PER == 1 ? (float *) w.k : w.rows;
        load(rows.type_k, rows.k, rows.nb_k, rows.first[k] + at, n, rows.d_k, tile);
        if constexpr (W::PER > 1)
            for (int r = 0; r < T; ++r)
                W::row(tile + (size_t) r * rows.d_k, rows.d_k, w.k + (size_t) r * n_k);
    }
    void load_v(int k, int at, int n, workspace & w) const {
        float * tile = W::PER == 1 ? (float *) w.v : w.rows;
        load(rows.type_v, rows.v, rows.nb_v, rows.first[k] + at, n, rows.d_v, tile);
        if constexpr (W::SCALES) W::template columns<T>(tile, d_o, w.v);
        else if constexpr (W::PER > 1) {
            auto * pairs = W::TILES ? (uint32_t *) w.pair_room.get((size_t) T / W::PER * n_o) : w.v;
            for (int r = 0; r < T; r += W::PER)
                join_rows(tile + (size_t) r * d_o, pairs + (size_t) r / W::PER * n_o);
            if constexpr (W::TILES) turn_pairs(pairs, w.v);
        }
    }
    // [T / W::PER][n_o] to [n_o][T / W::PER]; what is behind d_o becomes 0
    void turn_pairs(uint32_t * from, uint32_t * to) const {
        constexpr int N = T / W::PER;
        for (int i = 0; i < N; ++i)
            memset(from + (size_t) i * n_o + d_o, 0, (n_o - d_o) * sizeof(*from));
        for (int i = 0; i < N; i += 16)
            for (int j = 0; j < n_o; j += 16)
                turn_16(from + (size_t) i * n_o + j, n_o, to + (size_t) j * N + i, N);
    }
    // words of W::PER rows of V
    void join_rows(const float * x, uint32_t * words) const {
        typename L::reg values[W::PER];
        for (int j = 0; j < d_o; j += L::N) {
            const int n = std::min(L::N, d_o - j);
            float rest[L::N] = {};
            for (int i = 0; i < W::PER; ++i) {
                const float * from = x + (size_t) i * d_o + j;
                if (n < L::N) from = (const float *) memcpy(rest, from, n * sizeof(*from));
                values[i] = L::load(from);
            }
            uint32_t joined[L::N];
            W::store(n < L::N ? joined : words + j, W::join(values));
            if (n < L::N) memcpy(words + j, joined, n * sizeof(*joined));
        }
    }
    static void load(
        enum ggml_type type, const char * base, size_t nb, int64_t at, int n, int d, float * tile) {
        edgekv_cpu_rows_to_f32(type, base, nb, at, n, d, tile);
        memset(tile + (size_t) n * d, 0, (size_t) (T - n) * d * sizeof(float));
    }

    // rows [0, n) of K with a panel: s[n][P]
    void multiply_k(const uint32_t * k, const uint32_t * q, int n, float * s) const {
        for (int r = 0; r < n; r += L::ROWS, k += (size_t) L::ROWS * n_k, s += (size_t) L::ROWS * P)
#if EDGEKV_TILES
            if constexpr (W::TILES) multiply_tiles(k, n_k, 16, q, P, n_k, s, P);
            else
#endif
                multiply<W, L::ROWS, L::VECTORS, false>(k, n_k, 1, q, n_k, s);
    }

    // n words of V with a panel's weights, added to o [n_o][P]
    void multiply_v(const uint32_t * v, const uint32_t * weights, int n, float * o) const {
#if EDGEKV_TILES
        if constexpr (W::TILES) {
            constexpr int N = T / W::PER;
            for (int j = 0; j < n_o; j += BLOCK)
                multiply_tiles<true>(
                    v + (size_t) j * N, N, 16, weights, P, n, o + (size_t) j * P, P);
        } else
#endif
        {
            int j = 0;
            for (; j + L::ROWS <= d_o; j += L::ROWS)
                multiply<W, L::ROWS, L::VECTORS, true>(
                    v + j, 1, d_o, weights, n, o + (size_t) j * P);
            for (; j < d_o; ++j)
                multiply<W, 1, L::VECTORS, true>(v + j, 1, d_o, weights, n, o + (size_t) j * P);
        }
    }

    // ---- a panel and a tile

    // row r of the tile is row at + r of the head; others than those that a query sees become -inf
    void hide(const panel & p, int at, int n, float * s) const {
        const auto never = L::set(-INFINITY);
        for (int v = 0; v < L::VECTORS; ++v) {
            const auto lo = L::load(p.lo + v * L::N), hi = L::load(p.hi + v * L::N);
            for (int r = 0; r < n; ++r) {
                const auto row = L::set((float) (at + r));
                float * x = s + (size_t) r * P + v * L::N;
                L::store(x, L::if_less(row, lo, never, L::if_less(row, hi, L::load(x), never)));
            }
        }
    }

    // ALiBi: lanes that see nothing have slope 0, rows behind the last that anybody sees are hidden
    // afterwards
    void lower(const panel & p, int at, int n, float * s) const {
        for (int r = 0; r < n; ++r) {
            const auto row = L::set(p.pos[std::min(at + r, p.hi_max - 1)]);
            for (int v = 0; v < L::VECTORS; ++v) {
                float * x = s + (size_t) r * P + v * L::N;
                L::store(x,
                    L::fma(L::load(p.slope + v * L::N), L::sub(row, L::load(p.at + v * L::N)),
                        L::load(x)));
            }
        }
    }

    // s is q.k*scale/softcap; the logit is softcap*tanh(s), here as a power of two
    void cap(int n, float * s) const {
        const auto one = L::set(1), most = L::set(10), least = L::set(-10);
        for (size_t i = 0; i < (size_t) n * P; i += L::N) {
            auto x = L::load(s + i);
            x = L::if_less(x, least, least, L::if_less(most, x, most, x));
            const auto e = exp2<L>(L::mul(x, L::set(2 * LOG2E))); // tanh x = (e^2x - 1)/(e^2x + 1)
            L::store(s + i,
                L::mul(L::set(rows.softcap * LOG2E), L::div(L::sub(e, one), L::add(e, one))));
        }
    }

    // logits of the first of the n rows from row `at` on, as powers of two; returns how many rows
    // they are: 0 if the panel sees none
    int logits(const panel & p, const uint32_t * tile, int at, int n, float * s) const {
        n = std::min(n, p.hi_max - at);
        if (n <= 0 || at + n <= p.lo_min) return 0;
        n = (n + L::ROWS - 1) / L::ROWS * L::ROWS;
        multiply_k(tile, p.q, n, s);
        if (rows.softcap != 0.0f) cap(n, s);
        if (p.pos) lower(p, at, n, s);
        if (at < p.lo_max || at + n > p.hi_min) hide(p, at, n, s);
        return n;
    }

    void scale_anew(const panel & p, int v, typename L::reg m, typename L::reg m_new) const {
        const auto c = exp2<L>(L::sub(m, m_new));
        L::store(p.m + v * L::N, m_new);
        L::store(p.sum + v * L::N, L::mul(L::load(p.sum + v * L::N), c));
        for (int j = 0; j < d_o; ++j)
            L::store(p.o + (size_t) j * P + v * L::N,
                L::mul(L::load(p.o + (size_t) j * P + v * L::N), c));
    }

    // s becomes words of 2^(s - m), [v_words(n)][P]; as they were rounded they are added to the sum
    void soften(const panel & p, int n, float * s) const {
        for (int v = 0; v < L::VECTORS; ++v) {
            float * x = s + v * L::N;
            auto a = L::load(x), b = a;
            for (int r = 0; r < n; r += 2) {
                a = L::max(a, L::load(x + (size_t) r * P));
                b = L::max(b, L::load(x + (size_t) (r + 1) * P));
            }
            a = L::max(a, b);
            auto m = L::load(p.m + v * L::N);
            const auto limit = L::add(m, L::set(SLACK));
            if (L::any_less(limit, a)) {
                const auto m_new = L::if_less(limit, a, a, m);
                scale_anew(p, v, m, m_new);
                m = m_new;
            }
            // what has a scale begins at the tile's own maximum
            const auto from =
                W::SCALES ? L::sub(L::max(a, L::set(NOTHING)), L::set(W::LOG2_MOST)) : m;
            // of the tile: thousands of rows added one by one would lose two digits
            typename W::reg sum = W::zero();
            auto * words = (uint32_t *) x;
            for (int r = 0; r < n; r += W::PER) {
                typename L::reg e[W::PER];
                for (int i = 0; i < W::PER; ++i)
                    e[i] = W::power(L::sub(L::load(x + (size_t) (r + i) * P), from));
                const auto word = W::join(e);
                W::store(words + (size_t) v_words(r) * P, word);
                sum = W::add_up(word, sum);
            }
            if (W::SCALES) L::store(x, exp2<L>(L::sub(from, m)));
            const float one = 1;
            L::store(p.sum + v * L::N,
                L::add(L::load(p.sum + v * L::N), W::result(sum, (const uint32_t *) &one, words)));
        }
    }
};

} // namespace edgekv
