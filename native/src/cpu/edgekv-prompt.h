#pragma once
// attend, for a prompt. What edgekv-prompt.cpp makes of it for the CPU backend, the tests make of
// it for every width of register.
//     p = 2^(s - m);   o[j][query] += sum over rows of v[row][j] p[row][query]
// Without V it leaves the maximum and the sum of each query's softmax, for scoring.

#include "edgekv-panel.h"

namespace edgekv {

template <class L, class W = f32_words<L>>
struct prompt_attention : panels<L, W> {
    using base = panels<L, W>;
    using panel = typename base::panel;
    using workspace = typename base::workspace;
    using base::d_o;
    using base::G;
    using base::P;
    using base::qs;
    using base::rows;
    using base::T;
    float *dst, *norm;

    prompt_attention(const edgekv_rows & rows, const edgekv_queries & qs, float * dst, float * norm)
        : base { rows, qs, rows.v ? rows.d_v : 0 }, dst(dst), norm(norm) {}

    // n rows from row `at` on
    void fold(const panel & p, workspace & w, int at, int n) const {
        n = this->logits(p, w.k, at, n, w.s);
        if (n == 0) return;
        this->soften(p, n, w.s);
        this->multiply_v(w.v, (const uint32_t *) w.s, this->v_words(n), p.o);
    }

    void finish(const panel & p, int k) const {
        for (int i = 0; i < p.n; ++i) {
            const int t = (p.first + i) / G, h = k * G + (p.first + i) % G;
            const size_t to = (size_t) t * rows.n_head + h;
            float m = p.m[i], sum = p.sum[i], c = 1;
            if (rows.sinks) {
                const float sink = rows.sinks[h] * LOG2E;
                m = std::max(m, sink);
                c = exp2f(p.m[i] - m);
                sum = sum * c + exp2f(sink - m);
            }
            const float part = sum > 0 ? 1 / sum : 0.0f;
            if (norm) {
                norm[2 * to] = m;
                norm[2 * to + 1] = part;
            }
            for (int j = 0; j < d_o; ++j) dst[to * d_o + j] = c * part * p.o[(size_t) j * P + i];
        }
    }

    // queries [first, first + n) of KV head k
    void block(workspace & w, int k, int first, int n) const {
        this->make_block(w, k, first, n);
        for (int at = w.lo / T * T; at < w.hi; at += T) {
            const int n_rows = std::min(T, w.hi - at);
            this->load_k(k, at, n_rows, w);
            // a tile's scales are of all its rows: they may not depend on who asks
            if (d_o > 0) this->load_v(k, at, std::min(T, rows.len[k] - at), w);
            for (const panel & p : w.panels) fold(p, w, at, n_rows);
        }
        for (const panel & p : w.panels) finish(p, k);
    }

    // blocks are taken one after the other by whoever is free, the last tokens first: they see the
    // most rows
    void run(workspace & w, int nth, std::atomic<int32_t> & next) const {
        [[maybe_unused]] const typename W::scope scope;
        const int n = qs.n_tokens * G, step = this->panels_of_block(nth) * P,
                  n_blocks = (n + step - 1) / step;
        for (int i = next++; i < n_blocks * rows.n_head_kv; i = next++) {
            const int first = (n_blocks - 1 - i / rows.n_head_kv) * step;
            block(w, i % rows.n_head_kv, first, std::min(step, n - first));
        }
    }
};

} // namespace edgekv
