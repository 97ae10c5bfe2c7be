#pragma once
// score: column statistics of the attention of some queries, without ever holding the attention
// matrix.
//     a[t][h][r] = softmax_r(scale * q[t][h].k[r]) over the rows that token t sees
// edgekv-prompt.h has left each query's maximum and sum. Work is cut by rows, so threads never
// share one.

#include "edgekv-panel.h"

namespace edgekv {

template <class L, class W = f32_words<L>>
struct column_scores : panels<L, W> {
    using base = panels<L, W>;
    using panel = typename base::panel;
    using workspace = typename base::workspace;
    using base::G;
    using base::P;
    using base::qs;
    using base::rows;
    using base::T;
    const float * norm;
    const edgekv_columns & cols;

    column_scores(const edgekv_rows & rows, const edgekv_queries & qs, const float * norm,
        const edgekv_columns & cols)
        : base { rows, qs, 0 }, norm(norm), cols(cols) {}

    void set_norm(const panel & p, int k) const {
        std::fill_n(p.m, P, 0.0f); // a lane without a query gets 2^0, times nothing
        for (int i = 0; i < p.n; ++i) {
            const int t = (p.first + i) / G, h = k * G + (p.first + i) % G;
            const float * x = norm + 2 * ((size_t) t * rows.n_head + h);
            p.m[i] = x[0];
            p.sum[i] = x[1];
        }
    }

    // of one tile, by row, still by lane
    struct tile_sums {
        float sum[T * L::N], max[T * L::N], entropy[T * L::N];
    };

    // logits become weights; rows behind the first n have none
    void weigh(const panel & p, int n, float * s, tile_sums & out) const {
        typename L::reg m[L::VECTORS], c[L::VECTORS], log_c[L::VECTORS];
        float logs[P];
        for (int i = 0; i < P; ++i) logs[i] = cols.entropy && p.sum[i] > 0 ? log2f(p.sum[i]) : 0.0f;
        for (int v = 0; v < L::VECTORS; ++v) {
            m[v] = L::load(p.m + v * L::N);
            c[v] = L::load(p.sum + v * L::N);
            log_c[v] = L::load(logs + v * L::N);
        }
        for (int r = 0; r < n; ++r) {
            auto sum = L::load(out.sum + r * L::N), max = L::load(out.max + r * L::N),
                 entropy = L::load(out.entropy + r * L::N);
            for (int v = 0; v < L::VECTORS; ++v) {
                float * at = s + (size_t) r * P + v * L::N;
                const auto x = L::sub(L::load(at), m[v]), a = L::mul(exp2<L>(x), c[v]);
                L::store(at, a);
                sum = L::add(sum, a);
                max = L::max(max, a);
                // the logarithm of a weight that is not 0
                if (cols.entropy)
                    entropy = L::sub(entropy, L::mul(a, L::max(L::add(x, log_c[v]), L::set(-200))));
            }
            L::store(out.sum + r * L::N, sum);
            L::store(out.max + r * L::N, max);
            L::store(out.entropy + r * L::N, entropy);
        }
    }

    static float add_up(const float * lanes) {
        float x = 0;
        for (int i = 0; i < L::N; ++i) x += lanes[i];
        return x;
    }

    // mean and squared deviations of each query head's weights: exact within a panel, Chan's
    // formula between panels
    void spread(const panel & p, const float * s, int n_rows, int64_t row0) const {
        for (int g = 0; g < G; ++g) {
            float of_head[P];
            for (int i = 0; i < P; ++i) of_head[i] = i < p.n && (p.first + i) % G == g;
            const float na = (float) (cols.n_seen + (p.first + G - 1 - g) / G),
                        nb = std::accumulate(of_head, of_head + P, 0.0f);
            if (nb == 0) continue;
            float *mean = cols.mean + g * cols.n_rows + row0,
                  *m2 = cols.m2 + g * cols.n_rows + row0;
            for (int r = 0; r < n_rows; ++r) {
                auto total = L::set(0), squares = L::set(0);
                for (int i = 0; i < P; i += L::N)
                    total = L::fma(L::load(s + (size_t) r * P + i), L::load(of_head + i), total);
                const float mu = sum_of<L>(total) / nb, delta = mu - mean[r];
                for (int i = 0; i < P; i += L::N) {
                    const auto d = L::mul(
                        L::sub(L::load(s + (size_t) r * P + i), L::set(mu)), L::load(of_head + i));
                    squares = L::fma(d, d, squares);
                }
                mean[r] += delta * nb / (na + nb);
                m2[r] += sum_of<L>(squares) + delta * delta * na * nb / (na + nb);
            }
        }
    }

    // n_rows rows of KV head k from row `at` on, for the panels of a block
    void tile(workspace & w, int k, int at, int n_rows) const {
        tile_sums x = {};
        const int64_t row0 = rows.first[k] + at;
        this->load_k(k, at, n_rows, w);
        for (const panel & p : w.panels) {
            const int n = std::min(n_rows, this->logits(p, w.k, at, n_rows, w.s));
            weigh(p, n, w.s, x);
            if (!cols.m2) continue;
            std::fill_n(w.s + (size_t) n * P, (size_t) (n_rows - n) * P, 0.0f);
            spread(p, w.s, n_rows, row0);
        }
        for (int r = 0; r < n_rows; ++r) {
            if (cols.sum) cols.sum[row0 + r] += add_up(x.sum + r * L::N) / G;
            if (cols.max)
                cols.max[row0 + r] = std::max(cols.max[row0 + r],
                    *std::max_element(x.max + r * L::N, x.max + (r + 1) * L::N));
            if (cols.entropy) cols.entropy[row0 + r] += add_up(x.entropy + r * L::N) / LOG2E;
        }
    }

    // a part is a range of whole tiles, the same fraction of every head
    void run(workspace & w, int part, int n_parts) const {
        [[maybe_unused]] const typename W::scope scope;
        const int n = qs.n_tokens * G, step = this->panels_of_block(1) * P;
        for (int k = 0; k < rows.n_head_kv; ++k) {
            const int64_t n_tiles = (rows.len[k] + T - 1) / T;
            const int begin = (int) (n_tiles * part / n_parts * T),
                      end = std::min((int) (n_tiles * (part + 1) / n_parts * T), rows.len[k]);
            for (int first = 0; first < n && begin < end; first += step) {
                this->make_block(w, k, first, std::min(step, n - first));
                for (const panel & p : w.panels) set_norm(p, k);
                for (int at = begin; at < end; at += T) tile(w, k, at, std::min(T, end - at));
            }
        }
    }
};

} // namespace edgekv
