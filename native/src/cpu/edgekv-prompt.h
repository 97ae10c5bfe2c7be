#pragma once
// attend, for a prompt. What edgekv-prompt.cpp makes of it for the CPU backend, the tests make of it for every width of register.
//     p = 2^(s - m);   o[j][query] += sum over rows of v[row][j] p[row][query]

#include "edgekv-panel.h"

namespace edgekv {

template <class L>
struct prompt_attention : panels<L> {
    using base = panels<L>;
    using panel = typename base::panel;
    using base::P; using base::T; using base::rows; using base::qs;
    int G, d_v;

    prompt_attention(const edgekv_rows & rows, const edgekv_queries & qs) : base { rows, qs, rows.d_v }, G(rows.n_head/rows.n_head_kv), d_v(rows.d_v) {}

    // all memory of a thread
    struct workspace { std::vector<float> k, v, s, memory; std::vector<panel> panels; };

    // panels that share a converted tile: they stay in the second-level cache; but every thread shall have some
    int panels_of_block(int nth) const {
        const int most = std::max<int>(2, (int) ((256u << 10)/(this->floats()*sizeof(float))));
        const int64_t n_panels = ((int64_t) qs.n_tokens*G + P - 1)/P*rows.n_head_kv;
        return (int) std::min<int64_t>(most, std::max<int64_t>(2, n_panels/(4*nth)));
    }

    // n rows from row `at` on
    void fold(const panel & p, workspace & w, int at, int n) const {
        float * s = w.s.data();
        n = this->logits(p, w.k.data(), at, n, s);
        if (n == 0) return;
        this->soften(p, n, s);
        int j = 0;
        for (; j + L::ROWS <= d_v; j += L::ROWS) base::template multiply_add<L::ROWS>(w.v.data() + j, d_v, s, n, p.o + (size_t) j*P);
        for (; j < d_v; ++j)                     base::template multiply_add<1>(w.v.data() + j, d_v, s, n, p.o + (size_t) j*P);
    }

    void finish(const panel & p, int k, float * dst) const {
        for (int i = 0; i < p.n; ++i) {
            const int t = (p.first + i)/G, h = k*G + (p.first + i) % G;
            float sum = p.sum[i], c = 1;
            if (rows.sinks) {
                const float sink = rows.sinks[h]*LOG2E, m = std::max(p.m[i], sink);
                c = exp2f(p.m[i] - m);
                sum = sum*c + exp2f(sink - m);
            }
            c = sum > 0 ? c/sum : 0.0f;
            float * o = dst + ((size_t) t*rows.n_head + h)*d_v;
            for (int j = 0; j < d_v; ++j) o[j] = c*p.o[(size_t) j*P + i];
        }
    }

    // queries [first, first + n) of KV head k, token by token
    void block(workspace & w, int k, int first, int n, float * dst) const {
        w.k.resize((size_t) T*rows.d_k); w.v.resize((size_t) T*d_v); w.s.resize((size_t) T*P);
        w.memory.resize(this->floats()*((n + P - 1)/P));
        w.panels.clear();
        int lo = INT32_MAX, hi = 0;
        for (int i = 0; i < n; i += P) {
            w.panels.push_back(this->make(first + i, std::min(P, n - i), w.memory.data() + this->floats()*w.panels.size(),
                                          [&](int j) { return std::pair<int, int>(j/G, k*G + j % G); }));
            lo = std::min(lo, w.panels.back().lo_min); hi = std::max(hi, w.panels.back().hi_max);
        }
        for (int at = lo/T*T; at < hi; at += T) {
            const int n_rows = std::min(T, hi - at);
            this->load_k(k, at, n_rows, w.k.data());
            this->load_v(k, at, n_rows, w.v.data());
            for (const panel & p : w.panels) fold(p, w, at, n_rows);
        }
        for (const panel & p : w.panels) finish(p, k, dst);
    }

    // blocks are taken one after the other by whoever is free, the last tokens first: they see the most rows
    void run(workspace & w, float * dst, int nth, std::atomic<int32_t> & next) const {
        const int n = qs.n_tokens*G, step = panels_of_block(nth)*P, n_blocks = (n + step - 1)/step;
        for (int i = next++; i < n_blocks*rows.n_head_kv; i = next++) {
            const int first = (n_blocks - 1 - i/rows.n_head_kv)*step;
            block(w, i % rows.n_head_kv, first, std::min(step, n - first), dst);
        }
    }
};

} // namespace edgekv
