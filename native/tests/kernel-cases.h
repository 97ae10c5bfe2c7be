#pragma once
// What is compared: one layer's rows with random lengths, queries, and attention over them in plain
// loops in double precision.

#include "check.h"
#include "cpu/edgekv-cpu.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

inline bool fits(ggml_type type, int d) { return d % ggml_blck_size(type) == 0; }

struct test_case {
    ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
    int d_k = 64, d_v = 64, group = 4, n_tokens = 1;
    std::vector<int> len = { 33, 0, 257 }; // per KV head, the rows of the new tokens included
    bool window = false, sinks = false, gaps = false, alibi = false; // gaps: bytes between rows
    bool v_in_k = false;           // V is the first d_v values of K: latent attention
    float softcap = 0, spread = 1; // spread: of the logits

    std::string name() const {
        std::string s = std::string(ggml_type_name(type_k)) + "/" + ggml_type_name(type_v) + " d " +
            std::to_string(d_k) + "/" + std::to_string(d_v) + " group " + std::to_string(group) +
            " tokens " + std::to_string(n_tokens) + " len";
        for (int n : len) s += " " + std::to_string(n);
        return s + (window ? " window" : "") + (sinks ? " sinks" : "") +
            (softcap > 0 ? " softcap" : "") + (spread > 1 ? " spread" : "") +
            (gaps ? " gaps" : "") + (alibi ? " alibi" : "") + (v_in_k ? " v in k" : "");
    }
};

// flat rows of one tensor; rows that nobody owns are NaN
struct matrix {
    std::vector<char> bytes;
    std::vector<float> f32; // [n_rows, d] what the stored rows mean
    size_t nb = 0;

    void fill(random_source & rnd, ggml_type type, int d, int n_rows,
        const std::vector<bool> & used, bool gaps) {
        nb = ggml_row_size(type, d) + (gaps ? 64 : 0);
        bytes.assign(n_rows * nb, '\xff');
        f32.assign((size_t) n_rows * d, NAN);
        std::vector<float> x(d);
        for (int r = 0; r < n_rows; ++r) {
            if (!used[r]) continue;
            for (float & y : x) y = rnd.normal();
            const auto * traits = ggml_get_type_traits(type);
            if (type == GGML_TYPE_F32) memcpy(&bytes[r * nb], x.data(), d * sizeof(float));
            else traits->from_float_ref(x.data(), &bytes[r * nb], d);
            if (type == GGML_TYPE_F32) std::copy(x.begin(), x.end(), &f32[(size_t) r * d]);
            else traits->to_float(&bytes[r * nb], &f32[(size_t) r * d], d);
        }
    }

    // rows mean what is stored and a centre; rows that nobody owns stay NaN
    void centre(const std::vector<float> & c) {
        for (size_t i = 0; i < f32.size(); ++i) f32[i] += c[i % c.size()];
    }
};

struct inputs {
    const test_case & c;
    int n_head_kv, n_head, n_rows = 0;
    std::vector<int32_t> first, len, start;
    std::vector<bool> used;
    matrix k, v;
    std::vector<float> q, sinks, pos, recalled;
    edgekv_rows rows;
    edgekv_queries qs;

    inputs(const test_case & c, random_source & rnd)
        : c(c), n_head_kv((int) c.len.size()), n_head(n_head_kv * c.group) {
        for (int n : c.len) {
            n_rows += rnd.below(5);
            first.push_back(n_rows);
            len.push_back(n);
            n_rows += n + rnd.below(40);
            used.resize(n_rows, false);
            std::fill(used.begin() + first.back(), used.begin() + first.back() + n, true);
        }
        k.fill(rnd, c.type_k, c.d_k, n_rows, used, c.gaps);
        if (c.v_in_k) take_v_of_k();
        else v.fill(rnd, c.type_v, c.d_v, n_rows, used, c.gaps);
        const int stride_h = c.d_k + 3, stride_t = n_head * stride_h + 5;
        q.assign((size_t) c.n_tokens * stride_t, NAN);
        for (int t = 0; t < c.n_tokens; ++t)
            for (int h = 0; h < n_head; ++h)
                for (int i = 0; i < c.d_k; ++i)
                    q[(size_t) t * stride_t + h * stride_h + i] = 2 * c.spread * rnd.normal();
        if (c.sinks)
            for (int h = 0; h < n_head; ++h) sinks.push_back(2 * rnd.normal());
        const int longest = *std::max_element(len.begin(), len.end());
        if (c.window)
            for (int t = 0; t < c.n_tokens; ++t) start.push_back(rnd.below(longest + 2));
        if (c.alibi) place(rnd);
        rows = { k.bytes.data(), c.v_in_k ? k.bytes.data() : v.bytes.data(), k.nb, v.nb, c.type_k,
            c.type_v, c.d_k, c.d_v, n_head, n_head_kv, first.data(), len.data(),
            1.0f / std::sqrt((float) c.d_k), c.softcap, c.sinks ? sinks.data() : nullptr,
            c.alibi ? pos.data() : nullptr, c.alibi ? MAX_BIAS : 0.0f };
        qs = { q.data(), stride_t, stride_h, c.n_tokens, nullptr,
            c.window ? start.data() : nullptr };
    }

    // what attention on a device gets besides the rows; some have recalled nothing
    void recall(random_source & rnd) {
        for (int i = 0; i < c.n_tokens * n_head; ++i) {
            const bool has = rnd.below(6) > 0;
            const float sum = has ? 1.0f + (float) rnd.below(40) : 0.0f;
            recalled.push_back(has ? 3 * c.spread * rnd.normal() : -INFINITY);
            recalled.push_back(sum);
            for (int j = 0; j < c.d_v; ++j) recalled.push_back(sum * rnd.normal());
        }
        qs.recalled = recalled.data();
    }

    void take_v_of_k() {
        v.nb = k.nb;
        for (int r = 0; r < n_rows; ++r) {
            const auto row = k.f32.begin() + (int64_t) r * c.d_k;
            v.f32.insert(v.f32.end(), row, row + c.d_v);
        }
    }

    // tokens of the rows: kept ones in any order, then the new ones; rows that nobody owns are NaN
    void place(random_source & rnd) {
        pos.assign(n_rows, NAN);
        const int n_past = 2 * *std::max_element(len.begin(), len.end());
        for (int k = 0; k < n_head_kv; ++k)
            for (int r = 0; r < len[k]; ++r) {
                const int from_end = len[k] - r;
                pos[first[k] + r] = (float) (from_end <= c.n_tokens ? n_past + c.n_tokens - from_end
                                                                    : rnd.below(n_past));
            }
    }
    static constexpr float MAX_BIAS = 8; // of nearly all models

    // ggml's slopes (ggml_compute_forward_soft_max_f32), in double precision
    double slope(int h) const {
        const double n = std::exp2(std::floor(std::log2((double) n_head)));
        return h < n ? std::pow(std::exp2(-MAX_BIAS / n), h + 1)
                     : std::pow(std::exp2(-MAX_BIAS / 2 / n), 2 * (h - n) + 1);
    }
};

// a[r - lo] for the rows [lo, hi) that token t sees in KV head k
struct attention {
    int lo = 0, hi = 0;
    std::vector<double> a;
    double log_sum = -INFINITY; // of the softmax
};

inline attention attend_reference(const inputs & in, int t, int h) {
    const auto & c = in.c;
    const int k = h / c.group;
    attention x;
    x.lo = c.window ? in.start[t] : 0;
    x.hi = std::max(x.lo, in.len[k] - (c.n_tokens - 1 - t));
    const float * q = in.q.data() + t * in.qs.stride_t + h * in.qs.stride_h;
    double top = c.sinks ? in.sinks[h] : -INFINITY, sum = 0;
    for (int r = x.lo; r < x.hi; ++r) {
        const float * row = &in.k.f32[(size_t) (in.first[k] + r) * c.d_k];
        double s = 0;
        for (int i = 0; i < c.d_k; ++i) s += (double) q[i] * row[i];
        s *= in.rows.scale;
        if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
        if (c.alibi)
            s += in.slope(h) * ((double) in.pos[in.first[k] + r] - in.pos[in.first[k] + x.hi - 1]);
        x.a.push_back(s);
        top = std::max(top, s);
    }
    for (double & s : x.a) sum += s = std::exp(s - top);
    if (c.sinks) sum += std::exp(in.sinks[h] - top);
    for (double & s : x.a) s /= sum;
    if (sum > 0) x.log_sum = top + std::log(sum);
    return x;
}

// [n_tokens][n_head]
std::vector<attention> attend_reference(const inputs & in) {
    std::vector<attention> all;
    for (int t = 0; t < in.c.n_tokens; ++t)
        for (int h = 0; h < in.n_head; ++h) all.push_back(attend_reference(in, t, h));
    return all;
}

// (kernel, types) -> cases, worst NMSE
inline std::map<std::pair<std::string, std::string>, std::pair<int, double>> g_table;

inline void judge(const char * kernel, const inputs & in, double error, double limit) {
    const std::string types = std::string(ggml_type_name(in.c.type_k)) +
        (in.c.type_k == in.c.type_v ? "" : std::string("/") + ggml_type_name(in.c.type_v));
    auto & cell = g_table[{ kernel, types }];
    cell.first += 1;
    cell.second = std::max(cell.second, error);
    // an f32 logit of 200 is exact to 1e-5, and that is the weight's relative error
    if (in.c.spread > 1 || in.c.alibi) limit *= 100;
    check(error < limit, "%s: %s: NMSE %g", kernel, in.c.name().c_str(), error);
}

// ---- attend

std::vector<double> values_reference(const inputs & in, const std::vector<attention> & a) {
    const int d = in.c.d_v;
    std::vector<double> out((size_t) in.c.n_tokens * in.n_head * d, 0.0);
    for (size_t i = 0; i < a.size(); ++i) {
        const int k = (int) (i % in.n_head) / in.c.group;
        for (size_t j = 0; j < a[i].a.size(); ++j) {
            const float * row = &in.v.f32[(size_t) (in.first[k] + a[i].lo + j) * d];
            for (int x = 0; x < d; ++x) out[i * d + x] += a[i].a[j] * row[x];
        }
    }
    return out;
}

// the same with what was recalled
inline std::vector<double> recalled_reference(const inputs & in, const std::vector<attention> & a) {
    const int d = in.c.d_v;
    auto out = values_reference(in, a);
    for (size_t i = 0; i < a.size(); ++i) {
        const float * part = &in.recalled[i * (2 + d)];
        if (part[1] == 0) continue;
        const double top = std::max(a[i].log_sum, (double) part[0]),
                     own = std::exp(a[i].log_sum - top), more = std::exp(part[0] - top),
                     sum = own + more * part[1];
        for (int x = 0; x < d; ++x)
            out[i * d + x] = (own * out[i * d + x] + more * part[2 + x]) / sum;
    }
    return out;
}

inline double compare(const std::vector<float> & got, const std::vector<double> & expected) {
    nmse e;
    for (size_t i = 0; i < got.size(); ++i) e.add(got[i], expected[i]);
    return e.value();
}

// ---- score

struct columns {
    std::vector<float> sum, max, entropy, mean, m2;
    edgekv_columns c;

    // rows that nobody owns are NaN and must stay so
    explicit columns(const inputs & in) : c() {
        auto make = [&](std::vector<float> & x, int n) {
            for (int g = 0; g < n; ++g)
                for (int r = 0; r < in.n_rows; ++r) x.push_back(in.used[r] ? 0.0f : NAN);
            return x.data();
        };
        c.sum = make(sum, 1);
        c.max = make(max, 1);
        c.entropy = make(entropy, 1);
        c.mean = make(mean, in.c.group);
        c.m2 = make(m2, in.c.group);
        c.n_rows = in.n_rows;
    }
};

struct columns_reference {
    std::vector<double> sum, max, entropy, mean, m2;
    // what a relative error of the weights does to the entropy: the derivative of -a log a, times a
    std::vector<double> entropy_size;

    columns_reference(const inputs & in, const std::vector<attention> & a) {
        const int G = in.c.group, n = in.n_rows;
        for (auto * x : { &sum, &max, &entropy, &entropy_size }) x->assign(n, 0.0);
        for (auto * x : { &mean, &m2 }) x->assign((size_t) G * n, 0.0);
        auto each = [&](auto && f) { // every weight of the attention matrix
            for (size_t i = 0; i < a.size(); ++i)
                for (size_t j = 0; j < a[i].a.size(); ++j) {
                    const int h = (int) (i % in.n_head);
                    f(in.first[h / G] + a[i].lo + (int) j, h % G, a[i].a[j]);
                }
        };
        each([&](int r, int g, double p) {
            sum[r] += p / G;
            max[r] = std::max(max[r], p);
            if (p > 0) {
                entropy[r] -= p * std::log(p);
                entropy_size[r] += p * (1 + std::fabs(std::log(p)));
            }
            mean[(size_t) g * n + r] += p / in.c.n_tokens;
        });
        std::vector<int> seen((size_t) G * n, 0);
        each([&](int r, int g, double p) {
            const size_t i = (size_t) g * n + r;
            m2[i] += (p - mean[i]) * (p - mean[i]);
            ++seen[i];
        });
        // queries that do not see the row
        for (size_t i = 0; i < m2.size(); ++i)
            m2[i] += (in.c.n_tokens - seen[i]) * mean[i] * mean[i];
    }
};

inline void compare_columns(const char * kernel, const inputs & in, const columns & got,
    const columns_reference & expected, double limit) {
    auto each = [&](const char * stat, const std::vector<float> & x, const std::vector<double> & y,
                    const std::vector<double> & size) {
        nmse e;
        bool untouched = true;
        for (size_t i = 0; i < x.size(); ++i) {
            if (in.used[i % in.n_rows]) e.add(x[i], y[i], size[i]);
            else untouched = untouched && std::isnan(x[i]);
        }
        check(
            untouched, "%s %s: %s: a row of nobody was written", kernel, stat, in.c.name().c_str());
        judge((std::string(kernel) + " " + stat).c_str(), in, e.value(), limit);
    };
    each("sum", got.sum, expected.sum, expected.sum);
    each("max", got.max, expected.max, expected.max);
    // itself near zero where one row has nearly all of every query
    each("entropy", got.entropy, expected.entropy, expected.entropy_size);
    each("mean", got.mean, expected.mean, expected.mean);
    each("m2", got.m2, expected.m2, expected.m2);
}

// ---- what came out

inline void print_table() {
    printf("%-24s %-14s %6s %10s\n", "kernel", "types", "runs", "worst NMSE");
    std::map<std::string, std::pair<int, double>> mixed;
    for (const auto & [key, cell] : g_table) {
        if (key.second.find('/') == std::string::npos) {
            printf("%-24s %-14s %6d %10.1e\n", key.first.c_str(), key.second.c_str(), cell.first,
                cell.second);
            continue;
        }
        mixed[key.first].first += cell.first;
        mixed[key.first].second = std::max(mixed[key.first].second, cell.second);
    }
    for (const auto & [kernel, cell] : mixed)
        printf("%-24s %-14s %6d %10.1e\n", kernel.c_str(), "mixed", cell.first, cell.second);
}
