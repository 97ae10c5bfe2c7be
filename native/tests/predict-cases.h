#pragma once
// What the linear map of the score kvzap is tested on, and edgekv/methods/kvzap.py once more, in
// double precision.

#include "kernel-cases.h"

namespace {

struct predict_case {
    ggml_type type_k, type_v;
    int d_k, d_v, n;
    bool turned, neighbours, gaps;

    std::string name() const {
        return std::string(ggml_type_name(type_k)) + " " + ggml_type_name(type_v) + " d " +
            std::to_string(d_k) + " " + std::to_string(d_v) + " n " + std::to_string(n) +
            (turned ? " turned" : "") + (neighbours ? " neighbours" : "");
    }
};

struct predict_inputs {
    matrix keys, values;
    std::vector<float> weights;
    edgekv_map map;
    int d_k, d_v;

    predict_inputs(const predict_case & c, random_source & rnd) : d_k(c.d_k), d_v(c.d_v) {
        keys.fill(rnd, c.type_k, c.d_k, c.n, std::vector<bool>(c.n, true), c.gaps);
        values.fill(rnd, c.type_v, c.d_v, c.n, std::vector<bool>(c.n, true), !c.gaps);
        type_k = c.type_k;
        type_v = c.type_v;
        weights.resize(c.d_v + c.d_k / 2 + 4);
        for (float & x : weights) x = rnd.normal();
        map = { weights.data(), c.neighbours, c.turned ? c.d_k & -c.d_k : 0,
            c.turned ? c.d_v & -c.d_v : 0 };
    }
    predict_inputs(const predict_inputs &) = delete;

    edgekv_numbered keys_at(const char * base) const {
        return { const_cast<char *>(base), keys.nb, type_k, d_k };
    }
    edgekv_numbered values_at(const char * base) const {
        return { const_cast<char *>(base), values.nb, type_v, d_v };
    }

private:
    ggml_type type_k, type_v;
};

void turned(std::vector<double> & x, int size) {
    const auto from = x;
    for (size_t i = 0; size && i < x.size(); ++i) {
        x[i] = 0;
        for (int j = 0; j < size; ++j)
            x[i] += (__builtin_popcount((int) i % size & j) % 2 ? -1 : 1) * from[i - i % size + j] /
                std::sqrt((double) size);
    }
}

double length(const std::vector<double> & x) {
    double square = 0;
    for (double a : x) square += a * a;
    return std::sqrt(square);
}

// [n] what is predicted, and KeyDiff's score
std::pair<std::vector<double>, std::vector<double>> predict_reference(
    const predict_case & c, const predict_inputs & in) {
    const int d_k = c.d_k, d_v = c.d_v;
    std::vector<double> mean(d_k, 0.0), out(c.n), unlike(c.n);
    auto row = [](const matrix & m, int i, int d) {
        return std::vector<double>(
            m.f32.begin() + (size_t) i * d, m.f32.begin() + (size_t) (i + 1) * d);
    };
    for (int i = 0; i < c.n; ++i) {
        const auto k = row(in.keys, i, d_k);
        for (int j = 0; j < d_k; ++j) mean[j] += k[j] / std::max(length(k), 1e-12);
    }
    for (int i = 0; i < c.n; ++i) {
        auto k = row(in.keys, i, d_k), v = row(in.values, i, d_v);
        const double l_k = length(k), l_v = length(v);
        for (int j = 0; j < d_k; ++j)
            unlike[i] -= k[j] * mean[j] / std::max(l_k * length(mean), 1e-12);
        turned(k, in.map.turn_k);
        turned(v, in.map.turn_v);
        const float * w = in.map.weights;
        for (double x : v) out[i] += *w++ * x / std::max(l_v, 1e-6);
        for (int j = 0; j < d_k / 2; ++j)
            out[i] += *w++ *
                std::log(1e-3 +
                    (in.map.neighbours ? std::hypot(k[2 * j], k[2 * j + 1])
                                       : std::hypot(k[j], k[j + d_k / 2])));
        out[i] +=
            w[0] * std::log(l_k + 1e-3) + w[1] * std::log(l_v + 1e-3) + w[2] * unlike[i] + w[3];
    }
    return { out, unlike };
}

template <typename T, typename S>
std::vector<predict_case> predict_cases(const T & types, const S & sizes) {
    std::vector<predict_case> all;
    for (ggml_type type : types)
        for (int d : sizes)
            for (bool turned : { false, true })
                for (int n : { 1, 63, 64, 65, 200 }) {
                    const int d_v = turned ? 64 : d;
                    if (fits(type, d) && fits(type, d_v))
                        all.push_back({ type, type, d, d_v, n, turned, n % 2 == 1, n == 65 });
                }
    for (int n : { 255, 256, 257, 1000 })
        all.push_back({ GGML_TYPE_Q8_0, GGML_TYPE_F16, 96, 128, n, n == 256, n != 257, false });
    return all;
}

// out, unlike: [n + 1], NaN behind the last row
void judge_predict(const predict_case & c, const predict_inputs & in,
    const std::vector<float> & out, const std::vector<float> & unlike, double limit) {
    const auto [expected, expected_unlike] = predict_reference(c, in);
    double worst = 0;
    for (int i = 0; i < c.n; ++i) {
        worst = std::max(worst, std::fabs(out[i] - expected[i]) / (1 + std::fabs(expected[i])));
        worst = std::max(worst, std::fabs(unlike[i] - expected_unlike[i]));
        if (!std::isfinite(out[i]) || !std::isfinite(unlike[i])) worst = INFINITY;
    }
    check(worst < limit && std::isnan(out[c.n]) && std::isnan(unlike[c.n]),
        "predict: %s: off by %g", c.name().c_str(), worst);
}

} // namespace
