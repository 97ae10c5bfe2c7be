#pragma once
// Panels: many queries of a KV head at once. What edgekv-prompt.h works on.
//
// Queries lie in the lanes. A panel is as many of them as VECTORS registers have lanes, transposed once; rows of K and V are converted to
// f32 in tiles and stay as they are: each of their values is a factor for a whole panel. So a maximum, an exp and a sum over rows go down
// the lanes, and a row that a query does not see is a comparison of two numbers in the tiles at the edge.
//     s[row][query] = sum over j of k[row][j] q[j][query]
// Tiles begin at fixed rows and lanes never mix, so a query's result does not depend on who its neighbours are.

#include "edgekv-cpu.h"
#include "edgekv-lanes.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace edgekv {

constexpr float LOG2E = 1.44269504f;

template <class L>
struct panels {
    static constexpr int P = L::N*L::VECTORS;  // queries of a panel
    static constexpr int T = 64;               // rows of a tile
    static constexpr float NOTHING = -1e30f;   // the maximum before a row was seen
    static constexpr float SLACK = 8;          // what was summed is scaled anew when the maximum has grown by a factor of 2^8
    static_assert(T % L::ROWS == 0 && L::ROWS % 2 == 0, "tiles are whole blocks");

    const edgekv_rows & rows;
    const edgekv_queries & qs;
    int d_o; // values that a panel gathers

    struct panel {
        float * q;                     // [d_k][P], scaled so that a logit is a power of two
        float * o;                     // [d_o][P]
        float * m, * sum, * lo, * hi;  // [P]; visible rows [lo, hi)
        int lo_min, lo_max, hi_min, hi_max, first, n; // n queries from number `first` on
    };
    size_t floats() const { return (size_t) (rows.d_k + d_o + 4)*P; } // of a panel

    // query number i of the panel is that of token t(i), head h(i); lanes behind n are 0 and see nothing
    template <typename F>
    panel make(int first, int n, float * memory, F && query) const {
        panel p;
        p.first = first; p.n = n;
        p.q = memory; p.o = p.q + (size_t) rows.d_k*P; p.m = p.o + (size_t) d_o*P; p.sum = p.m + P; p.lo = p.sum + P; p.hi = p.lo + P;
        memset(memory, 0, floats()*sizeof(float));
        p.lo_min = p.hi_min = INT32_MAX;
        p.lo_max = p.hi_max = 0;
        const int G = rows.n_head/rows.n_head_kv;
        const float scale = rows.softcap == 0.0f ? rows.scale*LOG2E : rows.scale/rows.softcap;
        for (int i = 0; i < P; ++i) {
            p.m[i] = NOTHING;
            if (i >= n) continue;
            const auto [t, h] = query(first + i);
            const float * q = qs.q + t*qs.stride_t + h*qs.stride_h;
            for (int j = 0; j < rows.d_k; ++j) p.q[(size_t) j*P + i] = scale*q[j];
            int lo, hi; visible(rows, qs, t, h/G, lo, hi);
            p.lo[i] = (float) lo; p.hi[i] = (float) hi;
            p.lo_min = std::min(p.lo_min, lo); p.lo_max = std::max(p.lo_max, lo);
            p.hi_min = std::min(p.hi_min, hi); p.hi_max = std::max(p.hi_max, hi);
        }
        return p;
    }

    // n rows from row `at` of KV head k on; those behind are 0, because a row that nobody sees is multiplied all the same
    void load_k(int k, int at, int n, float * tile) const { load(rows.type_k, rows.k, rows.nb_k, rows.first[k] + at, n, rows.d_k, tile); }
    void load_v(int k, int at, int n, float * tile) const { load(rows.type_v, rows.v, rows.nb_v, rows.first[k] + at, n, rows.d_v, tile); }
    static void load(enum ggml_type type, const char * base, size_t nb, int64_t at, int n, int d, float * tile) {
        edgekv_cpu_rows_to_f32(type, base, nb, at, n, d, tile);
        memset(tile + (size_t) n*d, 0, (size_t) (T - n)*d*sizeof(float));
    }

    // ---- matrix kernels: a block of ROWS results of a whole panel in registers

    // s[i][P] = sum over j of a[i*stride + j] b[j][P]
    template <int ROWS>
    static void multiply(const float * a, size_t stride, const float * b, int n, float * s) {
        typename L::reg acc[ROWS][L::VECTORS];
        for (int i = 0; i < ROWS; ++i) for (int v = 0; v < L::VECTORS; ++v) acc[i][v] = L::set(0);
        for (int j = 0; j < n; ++j) {
            typename L::reg x[L::VECTORS];
            for (int v = 0; v < L::VECTORS; ++v) x[v] = L::load(b + (size_t) j*P + v*L::N);
            for (int i = 0; i < ROWS; ++i) {
                const auto y = L::set(a[i*stride + j]);
                for (int v = 0; v < L::VECTORS; ++v) acc[i][v] = L::fma(x[v], y, acc[i][v]);
            }
        }
        for (int i = 0; i < ROWS; ++i) for (int v = 0; v < L::VECTORS; ++v) L::store(s + (size_t) i*P + v*L::N, acc[i][v]);
    }

    // o[i][P] += sum over r of a[r*stride + i] b[r][P]
    template <int ROWS>
    static void multiply_add(const float * a, size_t stride, const float * b, int n, float * o) {
        typename L::reg acc[ROWS][L::VECTORS];
        for (int i = 0; i < ROWS; ++i) for (int v = 0; v < L::VECTORS; ++v) acc[i][v] = L::load(o + (size_t) i*P + v*L::N);
        for (int r = 0; r < n; ++r) {
            typename L::reg x[L::VECTORS];
            for (int v = 0; v < L::VECTORS; ++v) x[v] = L::load(b + (size_t) r*P + v*L::N);
            for (int i = 0; i < ROWS; ++i) {
                const auto y = L::set(a[r*stride + i]);
                for (int v = 0; v < L::VECTORS; ++v) acc[i][v] = L::fma(x[v], y, acc[i][v]);
            }
        }
        for (int i = 0; i < ROWS; ++i) for (int v = 0; v < L::VECTORS; ++v) L::store(o + (size_t) i*P + v*L::N, acc[i][v]);
    }

    // ---- a panel and a tile

    // row r of the tile is row at + r of the head; others than those that a query sees become -inf
    void hide(const panel & p, int at, int n, float * s) const {
        const auto never = L::set(-INFINITY);
        for (int v = 0; v < L::VECTORS; ++v) {
            const auto lo = L::load(p.lo + v*L::N), hi = L::load(p.hi + v*L::N);
            for (int r = 0; r < n; ++r) {
                const auto row = L::set((float) (at + r));
                float * x = s + (size_t) r*P + v*L::N;
                L::store(x, L::if_less(row, lo, never, L::if_less(row, hi, L::load(x), never)));
            }
        }
    }

    // s is q.k*scale/softcap; the logit is softcap*tanh(s), here as a power of two
    void cap(int n, float * s) const {
        const auto one = L::set(1), most = L::set(10), least = L::set(-10);
        for (size_t i = 0; i < (size_t) n*P; i += L::N) {
            auto x = L::load(s + i);
            x = L::if_less(x, least, least, L::if_less(most, x, most, x));
            const auto e = exp2<L>(L::mul(x, L::set(2*LOG2E))); // tanh x = (e^2x - 1)/(e^2x + 1)
            L::store(s + i, L::mul(L::set(rows.softcap*LOG2E), L::div(L::sub(e, one), L::add(e, one))));
        }
    }

    // logits of the first of the n rows from row `at` on, as powers of two; returns how many rows they are: 0 if the panel sees none
    int logits(const panel & p, const float * tile, int at, int n, float * s) const {
        n = std::min(n, p.hi_max - at);
        if (n <= 0 || at + n <= p.lo_min) return 0;
        n = (n + L::ROWS - 1)/L::ROWS*L::ROWS;
        for (int r = 0; r < n; r += L::ROWS) multiply<L::ROWS>(tile + (size_t) r*rows.d_k, rows.d_k, p.q, rows.d_k, s + (size_t) r*P);
        if (rows.softcap != 0.0f) cap(n, s);
        if (at < p.lo_max || at + n > p.hi_min) hide(p, at, n, s);
        return n;
    }

    void scale_anew(const panel & p, int v, typename L::reg m, typename L::reg m_new) const {
        const auto c = exp2<L>(L::sub(m, m_new));
        L::store(p.m + v*L::N, m_new);
        L::store(p.sum + v*L::N, L::mul(L::load(p.sum + v*L::N), c));
        for (int j = 0; j < d_o; ++j) L::store(p.o + (size_t) j*P + v*L::N, L::mul(L::load(p.o + (size_t) j*P + v*L::N), c));
    }

    // s becomes 2^(s - m), added to the sum
    void soften(const panel & p, int n, float * s) const {
        for (int v = 0; v < L::VECTORS; ++v) {
            float * x = s + v*L::N;
            auto a = L::load(x), b = a;
            for (int r = 0; r < n; r += 2) { a = L::max(a, L::load(x + (size_t) r*P)); b = L::max(b, L::load(x + (size_t) (r + 1)*P)); }
            a = L::max(a, b);
            auto m = L::load(p.m + v*L::N);
            const auto limit = L::add(m, L::set(SLACK));
            if (L::any_less(limit, a)) {
                const auto m_new = L::if_less(limit, a, a, m);
                scale_anew(p, v, m, m_new);
                m = m_new;
            }
            auto sum = L::load(p.sum + v*L::N);
            for (int r = 0; r < n; ++r) {
                const auto e = exp2<L>(L::sub(L::load(x + (size_t) r*P), m));
                L::store(x + (size_t) r*P, e);
                sum = L::add(sum, e);
            }
            L::store(p.sum + v*L::N, sum);
        }
    }
};

} // namespace edgekv
