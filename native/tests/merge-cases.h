#pragma once
// What merging is held against: rows of one head in random places, the nearest of them by plain
// loops, sums in double precision.

#include "kernel-cases.h"

struct merge_case {
    ggml_type type;
    int d, n_gone, n_kept, n_zero; // n_zero: kept keys, and evicted ones, of length 0
    bool twins, gaps;              // twins: the second half of the kept keys equals the first

    std::string name() const {
        return std::string(ggml_type_name(type)) + " d " + std::to_string(d) + ", " +
            std::to_string(n_gone) + " into " + std::to_string(n_kept) + ", " +
            std::to_string(n_zero) + " zero" + (twins ? ", twins" : "") + (gaps ? ", gaps" : "");
    }
};

// rows of one head in random places; what is neither evicted nor kept is NaN
struct merge_inputs {
    matrix m;
    std::vector<int32_t> gone, kept;
    edgekv_numbered view;

    merge_inputs(const merge_case & c, random_source & rnd) {
        const int n = c.n_gone + c.n_kept + 9;
        std::vector<int32_t> places(n);
        for (int i = 0; i < n; ++i) places[i] = i;
        std::shuffle(places.begin(), places.end(), rnd.g);
        gone.assign(places.begin(), places.begin() + c.n_gone);
        kept.assign(places.begin() + c.n_gone, places.begin() + c.n_gone + c.n_kept);
        std::vector<bool> used(n, false);
        for (int32_t r : gone) used[r] = true;
        for (int32_t r : kept) used[r] = true;
        m.fill(rnd, c.type, c.d, n, used, c.gaps);
        auto copy = [&](int32_t from, int32_t to) {
            memcpy(&m.bytes[to * m.nb], &m.bytes[from * m.nb], m.nb);
            std::copy_n(&m.f32[(size_t) from * c.d], c.d, &m.f32[(size_t) to * c.d]);
        };
        for (auto * list : { &gone, &kept })
            for (int i = 0; i < c.n_zero && !list->empty(); ++i) zero(rnd.one_of(*list), c);
        for (int i = 0; c.twins && i < c.n_kept / 2; ++i) copy(kept[i], kept[i + c.n_kept / 2]);
        view = { m.bytes.data(), m.nb, c.type, c.d };
    }

    void zero(int32_t r, const merge_case & c) {
        const std::vector<float> nothing(c.d, 0.0f);
        ggml_quantize_chunk(c.type, nothing.data(), &m.bytes[r * m.nb], 0, 1, c.d, nullptr);
        std::fill_n(&m.f32[(size_t) r * c.d], c.d, 0.0f);
    }

    double cosine(int32_t a, int32_t b, int d) const {
        const float *x = &m.f32[(size_t) a * d], *y = &m.f32[(size_t) b * d];
        double xy = 0, xx = 0, yy = 0;
        for (int i = 0; i < d; ++i) {
            xy += (double) x[i] * y[i];
            xx += (double) x[i] * x[i];
            yy += (double) y[i] * y[i];
        }
        return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 0.0;
    }
};

inline void to_f32(const merge_case & c, const char * row, std::vector<float> & out) {
    if (c.type == GGML_TYPE_F32) memcpy(out.data(), row, out.size() * sizeof(float));
    else ggml_get_type_traits(c.type)->to_float(row, out.data(), c.d);
}

// [n_gone] as a kernel found them; error: of a cosine
inline void judge_nearest(const merge_case & c, const merge_inputs & in,
    const std::vector<float> & cosine, const std::vector<int32_t> & nearest, double error) {
    for (int i = 0; i < c.n_gone; ++i) {
        double best = -2;
        int at = 0;
        for (int j = 0; j < c.n_kept; ++j) {
            const double u = in.cosine(in.gone[i], in.kept[j], c.d);
            if (u > best) {
                best = u;
                at = j;
            }
        }
        const int j = nearest[i];
        if (!check(
                j >= 0 && j < c.n_kept, "nearest: %s: row %d goes to %d", c.name().c_str(), i, j))
            return;
        check(std::fabs(cosine[i] - best) < error, "nearest: %s: row %d has cosine %g, not %g",
            c.name().c_str(), i, cosine[i], best);
        check(j == at || best - in.cosine(in.gone[i], in.kept[j], c.d) < error,
            "nearest: %s: row %d goes to %d, not %d", c.name().c_str(), i, j, at);
        check(!c.twins || j < c.n_kept / 2 || j == 2 * (c.n_kept / 2),
            "nearest: %s: row %d goes to the second of equal keys", c.name().c_str(), i);
    }
}

// the first half of the kept rows receives the evicted ones, unevenly and some of them nothing
struct merge_shares {
    std::vector<int32_t> rows, counts, begin;
    std::vector<float> own, weights;
    edgekv_shares view;

    merge_shares(const merge_case & c, const merge_inputs & in, random_source & rnd)
        : rows(in.kept.begin(), in.kept.begin() + (c.n_kept + 1) / 2), counts(rows.size(), 0) {
        const int n = (int) rows.size();
        for (int i = 0; i < c.n_gone; ++i) ++counts[rnd.below(n) * rnd.below(n) / n];
        for (int i = 0, at = 0; i < n; at += counts[i++]) begin.push_back(at);
        for (int i = 0; i < n; ++i) own.push_back(rnd.normal());
        for (int i = 0; i < c.n_gone; ++i) weights.push_back(rnd.normal());
        view = { n, rows.data(), own.data(), counts.data(), in.gone.data(), weights.data() };
    }
};

constexpr double MAX_FOLD_ERROR = 1e-5; // relative to the longest row that takes part

// bytes: of all rows after a kernel folded them
inline void judge_fold(const merge_case & c, const merge_inputs & in, const merge_shares & s,
    const std::vector<char> & bytes) {
    auto expected = in.m.bytes;
    for (int i = 0, at = 0; i < s.view.n; ++i) {
        std::vector<double> sum(c.d);
        std::vector<float> f32(c.d);
        double largest = 0;
        auto add = [&](int32_t r, float w) {
            double length = 0;
            for (int x = 0; x < c.d; ++x) {
                sum[x] += (double) w * in.m.f32[(size_t) r * c.d + x];
                length += std::pow(w * in.m.f32[(size_t) r * c.d + x], 2);
            }
            largest = std::max(largest, std::sqrt(length));
        };
        add(s.rows[i], s.own[i]);
        for (int j = 0; j < s.counts[i]; ++j, ++at) add(in.gone[at], s.weights[at]);
        for (int x = 0; x < c.d && in.view.basis.centre; ++x) sum[x] -= in.view.basis.centre[x];
        for (int x = 0; x < c.d; ++x) f32[x] = (float) sum[x];
        // as near to the sum as its rounding to the type: not the same bytes, because f32 and
        // double sums may round apart
        char * row = &expected[s.rows[i] * in.m.nb];
        ggml_quantize_chunk(c.type, f32.data(), row, 0, 1, c.d, nullptr);
        std::vector<float> got(c.d), ideal(c.d);
        to_f32(c, &bytes[s.rows[i] * in.m.nb], got);
        to_f32(c, row, ideal);
        double error = 0, rounding = 0;
        for (int x = 0; x < c.d; ++x) {
            error += std::pow(got[x] - sum[x], 2);
            rounding += std::pow(ideal[x] - sum[x], 2);
        }
        const double over = std::sqrt(error) - 1.05 * std::sqrt(rounding);
        check(over <= MAX_FOLD_ERROR * largest,
            "fold: %s: row %d is off by %g, rounding to the type by %g", c.name().c_str(), i,
            std::sqrt(error), std::sqrt(rounding));
        memcpy(row, &bytes[s.rows[i] * in.m.nb], ggml_row_size(c.type, c.d));
    }
    check(expected == bytes, "fold: %s: a row that receives nothing was written", c.name().c_str());
}

// numbers of evicted and kept rows around the sizes of blocks and tiles
inline const std::pair<int, int> MERGE_SIZES[] = { { 1, 1 }, { 600, 1 }, { 1, 600 }, { 256, 32 },
    { 257, 33 }, { 255, 31 }, { 0, 5 }, { 15, 64 }, { 513, 1000 } };
