// recall: a token finds the rows of the archive that it needs besides those in the store. The index
// says roughly how probable each row is for each query head; the largest of a group's heads counts,
// and they share the rows. Groups stand for the rest: each for as many rows as it has left, and for
// how much these differ, which adds two logarithms to its logit
#include "edgekv-lanes.h"
#include "edgekv-tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

using namespace edgekv;

namespace {

struct workspace {
    std::vector<uint16_t> steps;     // [n_query][n in whole blocks]
    std::vector<float> step;         // [n_query]
    std::vector<uint8_t> wanted;     // [n]
    std::vector<int32_t> rows, left; // left: of each group
    std::vector<float> best;         // [n_query]: powers of 2 in a step, and steps of probability 1
    std::vector<float> tile, logits; // logits: [n_query][rows, then groups]
    std::vector<float *> at;         // of each query, where a tile's logits or its values are
    std::vector<const float *> from;
    std::vector<int32_t> weighed, end; // some of the rows that are left, by groups; a group's end
    std::vector<uint16_t> some;        // their steps
    std::vector<float> differ;         // [n_query][n_groups] a logarithm
    std::vector<float> weights; // of each that is weighed: a logarithm to base 2, then of what
};

constexpr int WEIGHED = 1024; // rows that say how much those of groups differ
constexpr size_t AHEAD = 16, LINE = 64;

bool is_resident(const edgekv_recalled & a, int r) { return a.resident[r / 32] >> r % 32 & 1; }

// sum of 2^(by*(steps - most))
float sum_of_powers(const uint16_t * steps, int n, float by, int most) {
    using L = best_lanes;
    constexpr int SOME = 256; // a loop of its own makes them floats: compilers know how
    float x[SOME];
    auto sum = L::set(0.0f);
    for (int r = 0; r < n; r += SOME) {
        const int some = std::min(SOME, n - r);
        for (int i = 0; i < some; ++i) x[i] = by * (float) (steps[r + i] - most);
        std::fill(x + some, x + SOME, -INFINITY);
        for (int i = 0; i < SOME; i += L::N) sum = L::add(sum, exp2<L>(L::load(x + i)));
    }
    return sum_of<L>(sum);
}

float sum_of_some(const float * x, int n) {
    using L = best_lanes;
    auto lanes = L::set(0.0f);
    int i = 0;
    for (; i + L::N <= n; i += L::N) lanes = L::add(lanes, L::load(x + i));
    float sum = sum_of<L>(lanes);
    for (; i < n; ++i) sum += x[i];
    return sum;
}

// Rows to which a head gives more than the least probability: for each head that is a number of
// steps. The most probable n_most of them, the first of equal ones
void choose(
    const edgekv_recalled & a, const float * q, int64_t stride, int n_query, workspace & w) {
    const int n = a.n, n_padded = (n + EDGEKV_BLOCK - 1) / EDGEKV_BLOCK * EDGEKV_BLOCK;
    w.steps.resize((size_t) n_query * n_padded);
    w.step.resize(n_query);
    edgekv_cpu_codes_score(
        &a.book, a.codes, n_padded, q, stride, n_query, w.steps.data(), w.step.data());
    w.wanted.assign(n_padded, 0);
    w.best.resize(2 * n_query);
    uint8_t * wanted = w.wanted.data();
    float * best = w.best.data();
    for (int h = 0; h < n_query; ++h) {
        const uint16_t * steps = w.steps.data() + (size_t) h * n_padded;
        const float by = a.scale * w.step[h] * LOG2E;
        uint16_t most = 0;
        for (int r = 0; r < n; ++r) most = std::max(most, steps[r]);
        const float all = log2f(sum_of_powers(steps, n, by, most));
        const float least = log2f(a.least) + all; // of a logarithm, less the largest
        best[2 * h] = by;
        best[2 * h + 1] = (float) most + (by > 0 ? all / by : 0.0f);
        if (least >= 0) continue;
        const float below = by > 0 ? std::floor((float) most + least / by) : -1.0f;
        const auto from = (uint16_t) std::max(0.0f, below + 1);
        for (int r = 0; r < n; ++r) wanted[r] |= (uint8_t) (steps[r] >= from);
    }
    w.rows.clear();
    for (int r = 0; r < n; r += 8) {
        uint64_t any;
        memcpy(&any, wanted + r, 8);
        for (int i = r; any && i < std::min(n, r + 8); ++i)
            if (wanted[i] && !is_resident(a, i)) w.rows.push_back(i);
    }
    if ((int) w.rows.size() <= a.n_most) return;
    const auto probability = [&](int r) {
        float x = -INFINITY; // its logarithm
        for (int h = 0; h < n_query; ++h)
            x = std::max(
                x, best[2 * h] * ((float) w.steps[(size_t) h * n_padded + r] - best[2 * h + 1]));
        return x;
    };
    std::vector<std::pair<float, int32_t>> order;
    for (int r : w.rows) order.emplace_back(-probability(r), r);
    std::nth_element(order.begin(), order.begin() + a.n_most, order.end());
    w.rows.clear();
    for (int i = 0; i < a.n_most; ++i) w.rows.push_back(order[i].second);
    std::sort(w.rows.begin(), w.rows.end());
}

// Rows that are left, one of a few where they are many, by groups
void find_weighed(const edgekv_recalled & a, workspace & w) {
    const int step = std::max(1, a.n / WEIGHED);
    const auto each = [&](auto && f) {
        for (int r = 0; r < a.n; r += step)
            if (!w.wanted[r] && !is_resident(a, r)) f(r);
    };
    w.end.assign(a.n_groups + 1, 0);
    each([&](int r) { ++w.end[a.label[r] + 1]; });
    for (int g = 0; g < a.n_groups; ++g) w.end[g + 1] += w.end[g];
    w.weighed.resize(w.end[a.n_groups]);
    each([&](int r) { w.weighed[w.end[a.label[r]]++] = r; });
    w.end.pop_back();
}

// The rows that a group stands for weigh as much as their powers do on average, not as the power of
// their mean: log(mean(exp)) - mean of their logits, by what the index says of some of them
void weigh(const edgekv_recalled & a, int n_query, workspace & w) {
    using L = best_lanes;
    w.differ.assign((size_t) n_query * a.n_groups, 0.0f);
    if (a.n_groups == 0 || a.softcap) return;
    find_weighed(a, w);
    if (w.weighed.empty()) return;
    const size_t n = w.weighed.size(), n_padded = w.wanted.size();
    w.some.resize(n);
    w.weights.resize(n + L::N);
    for (int h = 0; h < n_query; ++h) {
        const uint16_t * steps = w.steps.data() + h * n_padded;
        const float by = w.best[2 * h];
        for (size_t i = 0; i < n; ++i) w.some[i] = steps[w.weighed[i]];
        uint16_t most = 0;
        for (uint16_t x : w.some) most = std::max(most, x);
        for (size_t i = 0; i < n; ++i) w.weights[i] = by * (float) (w.some[i] - most);
        std::fill(w.weights.begin() + n, w.weights.end(), 0.0f);
        for (size_t i = 0; i < n; i += L::N)
            L::store(&w.weights[i], exp2<L>(L::load(&w.weights[i])));
        for (int g = 0, begin = 0; g < a.n_groups; begin = w.end[g++]) {
            const int n_rows = w.end[g] - begin;
            const float weight = sum_of_some(&w.weights[begin], n_rows);
            if (weight <= 0) continue;      // none, or they are nothing beside other groups
            int32_t power = -n_rows * most; // in steps
            for (int i = begin; i < w.end[g]; ++i) power += w.some[i];
            const float each = 1.0f / (float) n_rows;
            w.differ[(size_t) h * a.n_groups + g] =
                (log2f(weight * each) - by * (float) power * each) / LOG2E;
        }
    }
}

// keys or values of n rows from `first` on, of those that were chosen and then the groups, as f32.
// Rows lie anywhere in the file: they are asked for before they are needed
void load(const edgekv_recalled & a, bool keys, size_t first, int n, workspace & w) {
    const int d = keys ? a.d_k : a.d_v;
    const ggml_type type = keys ? a.type_k : a.type_v;
    const char * rows = keys ? a.k : a.v;
    const size_t nb = keys ? a.nb_k : a.nb_v;
    const ggml_fp16_t * groups = keys ? a.group_k : a.group_v;
    for (size_t i = first; i < first + n; ++i) {
        float * to = w.tile.data() + (i - first) * d;
        if (i + AHEAD < w.rows.size())
            for (size_t at = 0; at < nb; at += LINE)
                __builtin_prefetch(rows + w.rows[i + AHEAD] * nb + at);
        if (i < w.rows.size()) edgekv_cpu_rows_to_f32(type, rows, nb, w.rows[i], 1, d, to);
        else ggml_cpu_fp16_to_fp32(groups + (i - w.rows.size()) * d, to, d);
    }
}

} // namespace

int edgekv_cpu_recall(
    const edgekv_recalled * recalled, const float * q, int64_t stride, int n_query, float * out) {
    static thread_local std::unique_ptr<workspace> own; // a pointer is read once, a place asked for
    if (!own) own = std::make_unique<workspace>();      // at each use
    workspace & w = *own;
    const auto & a = *recalled;
    const int dp = 2 + a.d_v;
    w.rows.clear();
    if (a.n > 0) choose(a, q, stride, n_query, w);
    weigh(a, n_query, w);
    w.left.assign(a.members, a.members + a.n_groups);
    for (int r : w.rows)
        if (a.n_groups) --w.left[a.label[r]];
    const int n_rows = (int) w.rows.size(), n = n_rows + a.n_groups;
    w.logits.resize((size_t) n_query * n);
    w.tile.resize((size_t) EDGEKV_TILE * std::max(a.d_k, a.d_v));
    w.at.resize(n_query);
    w.from.resize(n_query);
    for (int i = 0, some; i < n; i += some) {
        some = std::min(EDGEKV_TILE, n - i);
        load(a, true, i, some, w);
        for (int h = 0; h < n_query; ++h) {
            w.from[h] = q + h * stride;
            w.at[h] = &w.logits[(size_t) h * n + i];
        }
        tile_dot(w.tile.data(), w.from.data(), n_query, some, a.d_k, w.at.data());
    }
    for (int h = 0; h < n_query; ++h) {
        float *s = w.logits.data() + (size_t) h * n, *o = out + (size_t) h * dp;
        memset(o + 1, 0, (1 + a.d_v) * sizeof(float));
        ggml_vec_scale_f32(n, s, a.softcap ? a.scale / a.softcap : a.scale);
        for (int i = 0; i < n && a.softcap; ++i) s[i] = a.softcap * tanhf(s[i]);
        for (int g = 0; g < a.n_groups; ++g) // -inf: none is left
            s[n_rows + g] += logf((float) w.left[g]) + w.differ[(size_t) h * a.n_groups + g];
        o[0] = tile_max(s, n, -INFINITY);
        if (o[0] > -INFINITY) o[1] = (float) ggml_vec_soft_max_f32(n, s, s, o[0]);
        else std::fill(s, s + n, 0.0f);
    }
    for (int i = 0, some; i < n; i += some) {
        some = std::min(EDGEKV_TILE, n - i);
        load(a, false, i, some, w);
        for (int h = 0; h < n_query; ++h) {
            w.from[h] = &w.logits[(size_t) h * n + i];
            w.at[h] = out + (size_t) h * dp + 2;
        }
        tile_mad(w.tile.data(), w.from.data(), n_query, some, a.d_v, w.at.data());
    }
    return n_rows;
}

// ---- groups

namespace {

constexpr int ROUNDS = 3, LOOKED_AT = 2048; // rows that centres are made of

struct k_means {
    const edgekv_recalled & a;
    int n_groups;
    std::vector<float> centres, half; // half: of a centre's squared length
    std::vector<float> tile, near;    // some keys; of each centre how near they are
    std::vector<int32_t> nearest;     // of the tile's keys
    std::vector<const float *> at;    // the centres
    std::vector<float *> to;

    k_means(const edgekv_recalled & a, int n_groups)
        : a(a), n_groups(n_groups), tile((size_t) EDGEKV_TILE * a.d_k),
          near((size_t) n_groups * EDGEKV_TILE), nearest(EDGEKV_TILE), at(n_groups), to(n_groups) {
        for (int g = 0; g < n_groups; ++g) to[g] = &near[(size_t) g * EDGEKV_TILE];
    }

    const float * key(int i) const { return &tile[(size_t) i * a.d_k]; }

    // the tile has the keys of rows[i*step], i in [first, first + n)
    void load(const std::vector<int32_t> & rows, size_t step, size_t first, int n) {
        for (int i = 0; i < n; ++i)
            edgekv_cpu_rows_to_f32(a.type_k, a.k, a.nb_k, rows[(first + i) * step], 1, a.d_k,
                &tile[(size_t) i * a.d_k]);
    }

    // calls f(row, key, centre) for each step-th row
    template <typename F>
    void each(const std::vector<int32_t> & rows, size_t step, F && f) {
        const size_t n_all = (rows.size() + step - 1) / step;
        measure();
        for (size_t first = 0; first < n_all; first += EDGEKV_TILE) {
            const int n = (int) std::min<size_t>(EDGEKV_TILE, n_all - first);
            load(rows, step, first, n);
            tile_dot(tile.data(), at.data(), n_groups, n, a.d_k, to.data());
            find_nearest();
            for (int i = 0; i < n; ++i) f(rows[(first + i) * step], key(i), nearest[i]);
        }
    }

    void find_nearest() {
        float most[EDGEKV_TILE];
        int32_t which[EDGEKV_TILE];
        std::fill(most, most + EDGEKV_TILE, -INFINITY);
        std::fill(which, which + EDGEKV_TILE, 0);
        for (int g = 0; g < n_groups; ++g) {
            const float *x = to[g], less = half[g];
            for (int i = 0; i < EDGEKV_TILE; ++i) {
                which[i] = most[i] < x[i] - less ? g : which[i];
                most[i] = most[i] < x[i] - less ? x[i] - less : most[i];
            }
        }
        std::copy(which, which + EDGEKV_TILE, nearest.begin());
    }

    void measure() {
        half.resize(n_groups);
        for (int g = 0; g < n_groups; ++g) {
            const float * c = at[g] = &centres[(size_t) g * a.d_k];
            ggml_vec_dot_f32(a.d_k, &half[g], 0, c, 0, c, 0, 1);
            half[g] /= 2;
        }
    }

    // from some of the rows; a centre without rows stays where it is
    void find(const std::vector<int32_t> & rows) {
        const size_t d = a.d_k, step = std::max<size_t>(1, rows.size() / LOOKED_AT);
        for (int g = 0; g < n_groups; ++g) {
            load(rows, 1, (size_t) g * rows.size() / n_groups, 1);
            centres.insert(centres.end(), key(0), key(0) + d);
        }
        for (int round = 0; round < ROUNDS; ++round) {
            std::vector<float> sums(n_groups * d), sizes(n_groups);
            each(rows, step, [&](int, const float * x, int g) {
                sizes[g] += 1;
                ggml_vec_acc_f32((int) d, &sums[g * d], x);
            });
            for (int g = 0; g < n_groups; ++g)
                for (size_t i = 0; i < d && sizes[g] > 0; ++i)
                    centres[g * d + i] = sums[g * d + i] / sizes[g];
        }
    }
};

// of their rows that are not resident; without any it is 0
void means_of_groups(const edgekv_recalled & a, int n_groups, const uint8_t * label,
    ggml_fp16_t * keys, ggml_fp16_t * values, int32_t * members) {
    std::fill(members, members + n_groups, 0);
    for (int r = 0; r < a.n; ++r)
        if (!is_resident(a, r)) ++members[label[r]];
    const auto mean = [&](ggml_type type, const char * from, size_t nb, int d, ggml_fp16_t * to) {
        std::vector<float> sums((size_t) n_groups * d), x(d);
        for (int r = 0; r < a.n; ++r) {
            if (is_resident(a, r)) continue;
            edgekv_cpu_rows_to_f32(type, from, nb, r, 1, d, x.data());
            ggml_vec_acc_f32(d, &sums[(size_t) label[r] * d], x.data());
        }
        for (int g = 0; g < n_groups; ++g)
            ggml_vec_scale_f32(d, &sums[(size_t) g * d], 1.0f / (float) std::max(members[g], 1));
        ggml_cpu_fp32_to_fp16(sums.data(), to, (int64_t) sums.size());
    };
    mean(a.type_k, a.k, a.nb_k, a.d_k, keys);
    mean(a.type_v, a.v, a.nb_v, a.d_v, values);
}

} // namespace

int edgekv_cpu_recall_groups(const edgekv_recalled * recalled, int n_found, int n_before,
    int n_groups, uint8_t * label, ggml_fp16_t * keys, ggml_fp16_t * values, int32_t * members) {
    const auto & a = *recalled;
    n_groups = std::min({ n_groups, EDGEKV_GROUPS, n_found });
    if (n_groups <= 0) return 0;
    const auto range = [](int begin, int end) {
        std::vector<int32_t> rows(end - begin);
        std::iota(rows.begin(), rows.end(), begin);
        return rows;
    };
    k_means found(a, n_groups);
    found.find(range(0, n_found));
    found.each(
        range(n_before, a.n), 1, [&](int r, const float *, int g) { label[r] = (uint8_t) g; });
    means_of_groups(a, n_groups, label, keys, values, members);
    return n_groups;
}
