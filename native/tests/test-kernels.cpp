// The CPU kernels against plain loops in double precision over the same dequantised rows.
//     test-kernels [--test] [seed] [number of random cases] [few: one of nine fixed cases]
//     test-kernels --perf [threads] [repetitions]
//     test-kernels --support
#include "cases.h"
#include "predict-cases.h"
#include "modes.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <thread>

namespace {

// f32 sums over at most 1000 rows and 256 values, and ggml's expf: measured worst 4e-12 (attend),
// 2e-11 (score: m2 of flat columns); wide logits 3e-10 (score: entropy), for which judge allows
// more
constexpr double MAX_NMSE_ATTEND = 1e-10, MAX_NMSE_SCORE = 1e-10;

// ---- attend

void test_attend_parts(const inputs & in, const std::vector<double> & expected) {
    for (int n_parts : { 1, 2, 5, 16 }) {
        std::vector<float> parts(
            (size_t) n_parts * in.c.n_tokens * in.n_head * (2 + in.c.d_v), NAN),
            out(expected.size()), other(expected.size());
        for (int p = n_parts - 1; p >= 0; --p)
            edgekv_cpu_attend_part(&in.rows, &in.qs, parts.data(), p, n_parts);
        for (int nth : { 1, 3, 16 }) {
            auto & x = nth == 1 ? out : other;
            std::fill(x.begin(), x.end(), NAN);
            for (int ith = 0; ith < nth; ++ith)
                edgekv_cpu_attend_combine(
                    &in.rows, in.c.n_tokens, parts.data(), n_parts, x.data(), ith, nth);
            if (nth > 1)
                check(!memcmp(out.data(), other.data(), out.size() * sizeof(float)),
                    "attend_combine: %s: %d threads differ from one", in.c.name().c_str(), nth);
        }
        judge("attend_part", in, compare(out, expected), MAX_NMSE_ATTEND);
    }
}

// the last rows of each head lie elsewhere, in halves; where they lay is no number
std::vector<ggml_fp16_t> take_recent(inputs & in, matrix & m, int d, int n, int cap) {
    std::vector<ggml_fp16_t> recent((size_t) in.n_head_kv * cap * d, 0x7e00);
    for (int k = 0; k < in.n_head_kv; ++k)
        for (int r = 0; r < n; ++r) {
            const int64_t at = in.first[k] + in.len[k] - n + r;
            std::fill_n(m.bytes.begin() + at * m.nb, m.nb, '\xff');
            for (int i = 0; i < d; ++i) {
                float & x = m.f32[at * d + i];
                const auto half = ggml_fp32_to_fp16(x);
                recent[((size_t) k * cap + r) * d + i] = half;
                x = ggml_fp16_to_fp32(half);
            }
        }
    return recent;
}

void test_attend_recent(inputs in, random_source & rnd) {
    const auto & c = in.c;
    const int n = rnd.below(*std::min_element(in.len.begin(), in.len.end()) + 1),
              cap = n + rnd.below(4);
    if (n == 0 || c.alibi || c.v_in_k) return; // whose rows are rounded at once
    const auto k = take_recent(in, in.k, c.d_k, n, cap), v = take_recent(in, in.v, c.d_v, n, cap);
    in.rows.k = in.k.bytes.data();
    in.rows.v = in.v.bytes.data();
    in.rows.recent_k = (const char *) k.data();
    in.rows.recent_v = (const char *) v.data();
    in.rows.n_recent = n;
    in.rows.cap_recent = cap;
    test_attend_parts(in, values_reference(in, attend_reference(in)));
}

void test_attend_prompt(const inputs & in, const std::vector<double> & expected) {
    std::vector<float> out(expected.size()), other(expected.size()),
        norm((size_t) in.n_head * in.c.n_tokens * 2, NAN), norm_alone(norm);
    for (int nth : { 1, 2, 7 }) {
        auto & x = nth == 1 ? out : other;
        std::fill(x.begin(), x.end(), NAN);
        std::atomic<int32_t> next { 0 };
        std::vector<std::thread> threads;
        for (int ith = 0; ith < nth; ++ith)
            threads.emplace_back([&] {
                edgekv_cpu_attend_prompt(&in.rows, &in.qs, x.data(), norm.data(), &next, nth);
            });
        for (auto & t : threads) t.join();
        if (nth > 1)
            check(!memcmp(out.data(), other.data(), out.size() * sizeof(float)),
                "attend_prompt: %s: %d threads differ from one", in.c.name().c_str(), nth);
    }
    judge("attend_prompt", in, compare(out, expected), MAX_NMSE_ATTEND);
    edgekv_rows keys = in.rows;
    keys.v = nullptr;
    std::atomic<int32_t> next { 0 };
    edgekv_cpu_attend_prompt(&keys, &in.qs, nullptr, norm_alone.data(), &next, 1);
    check(!memcmp(norm.data(), norm_alone.data(), norm.size() * sizeof(float)),
        "attend_prompt: %s: the norm without values differs", in.c.name().c_str());
}

// ---- score

// all tokens in n_calls calls, as chunks of a prompt come
columns run_score(const inputs & in, int n_calls, int n_parts) {
    columns cols(in);
    for (int call = 0; call < n_calls; ++call) {
        const int t0 = in.c.n_tokens * call / n_calls, t1 = in.c.n_tokens * (call + 1) / n_calls,
                  n = t1 - t0;
        if (n == 0) continue;
        std::vector<int32_t> len, n_after;
        // the rows of later calls are there already: n_after says who does not see them
        const bool later = call % 2 == 0;
        for (int32_t x : in.len) len.push_back(later ? x : std::max(0, x - (in.c.n_tokens - t1)));
        for (int t = t0; t < t1; ++t) n_after.push_back(in.c.n_tokens - 1 - t);
        edgekv_rows rows = in.rows;
        rows.v = nullptr;
        rows.len = len.data();
        edgekv_queries qs = in.qs;
        qs.q += t0 * qs.stride_t;
        qs.n_tokens = n;
        qs.n_after = later ? n_after.data() : nullptr;
        if (qs.start) qs.start += t0;
        std::vector<float> norm((size_t) in.n_head * n * 2, NAN);
        std::atomic<int32_t> next { 0 };
        edgekv_cpu_attend_prompt(&rows, &qs, nullptr, norm.data(), &next, 3);
        cols.c.n_seen = t0;
        for (int p = 0; p < n_parts; ++p)
            edgekv_cpu_score_columns(&rows, &qs, norm.data(), &cols.c, p, n_parts);
    }
    return cols;
}

void test_score(const inputs & in, const std::vector<attention> & a) {
    const columns_reference expected(in, a);
    compare_columns("score, one call", in, run_score(in, 1, 16), expected, MAX_NMSE_SCORE);
    if (in.c.n_tokens > 1)
        compare_columns("score, calls", in, run_score(in, 3, 3), expected, MAX_NMSE_SCORE);
}

// ---- rows as f32

// the types of a cache, and those that most weights have
void test_rows_to_f32(random_source & rnd) {
    std::vector<ggml_type> types(std::begin(TYPES), std::end(TYPES));
    types.insert(types.end(), { GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K });
    std::vector<int> sizes(std::begin(HEAD_SIZES), std::end(HEAD_SIZES));
    sizes.push_back(768);
    for (ggml_type type : types)
        for (int d : sizes)
            for (bool gaps : { false, true }) {
                if (!fits(type, d)) continue;
                const int n = 37;
                matrix m;
                m.fill(rnd, type, d, n, std::vector<bool>(n, true), gaps);
                for (auto [r0, n_rows] :
                    { std::pair<int, int>(0, n), { 5, 32 }, { 36, 1 }, { 3, 0 } }) {
                    std::vector<float> out((size_t) n_rows * d + 1, NAN);
                    edgekv_cpu_rows_to_f32(type, m.bytes.data(), m.nb, r0, n_rows, d, out.data());
                    const float * want = m.f32.data() + (size_t) r0 * d;
                    // product and sum in one instruction
                    const bool has_least = type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_1 ||
                        type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K;
                    bool same = std::isnan(out.back());
                    for (int i = 0; i < n_rows * d; ++i)
                        same = same && std::fabs(out[i] - want[i]) <= (has_least ? 1e-6f : 0);
                    check(same, "rows_to_f32: %s d %d rows %d+%d%s", ggml_type_name(type), d, r0,
                        n_rows, gaps ? " gaps" : "");
                }
            }
}

// what was taken from each key before it was stored: as long as the rows are
std::vector<float> some_centre(int d, random_source & rnd) {
    std::vector<float> centre(d);
    for (float & x : centre) x = rnd.normal();
    return centre;
}

// ---- merge

constexpr double MAX_COSINE_ERROR = 2e-6;

void test_nearest(const merge_case & c, const merge_inputs & in) {
    std::vector<float> cosine, first;
    std::vector<int32_t> nearest, first_nearest;
    for (int n_parts : { 1, 2, 7 }) {
        cosine.assign(c.n_gone + 1, NAN);
        nearest.assign(c.n_gone + 1, -7);
        for (int p = n_parts - 1; p >= 0; --p) {
            edgekv_cpu_merge_nearest(&in.view, in.gone.data(), c.n_gone, in.kept.data(), c.n_kept,
                cosine.data(), nearest.data(), p, n_parts);
        }
        check(std::isnan(cosine.back()) && nearest.back() == -7,
            "nearest: %s: written behind the end", c.name().c_str());
        cosine.pop_back();
        nearest.pop_back();
        if (first.empty()) {
            first = cosine;
            first_nearest = nearest;
        }
        check(cosine == first && nearest == first_nearest, "nearest: %s: %d parts differ",
            c.name().c_str(), n_parts);
    }
    judge_nearest(c, in, cosine, nearest, MAX_COSINE_ERROR);
}

void test_fold(const merge_case & c, const merge_inputs & in, random_source & rnd) {
    const merge_shares s(c, in, rnd);
    auto bytes = in.m.bytes;
    const edgekv_numbered to { bytes.data(), in.m.nb, c.type, c.d, in.view.basis };
    edgekv_cpu_merge_fold(&to, &s.view);
    judge_fold(c, in, s, bytes);
}

void test_merge(random_source & rnd, int n_random) {
    for (const auto & c : merge_cases(rnd, n_random, ON_CPU)) {
        merge_inputs in(c, rnd);
        test_nearest(c, in);
        test_fold(c, in, rnd);
        const auto centre = some_centre(c.d, rnd);
        in.m.centre(centre);
        in.view.basis.centre = centre.data();
        test_nearest(c, in);
        test_fold(c, in, rnd);
    }
}

// ---- predict

void test_predict(const predict_case & c, random_source & rnd, bool centred) {
    predict_inputs in(c, rnd);
    const auto centre = some_centre(c.d_k, rnd);
    edgekv_numbered k = in.keys_at(in.keys.bytes.data());
    const edgekv_numbered v = in.values_at(in.values.bytes.data());
    if (centred) {
        in.keys.centre(centre);
        k.basis.centre = centre.data();
    }
    std::vector<float> sum(c.d_k + 1, NAN), rest(c.d_k, NAN), out(c.n + 1, NAN),
        unlike(c.n + 1, NAN);
    edgekv_cpu_key_sum(&k, 0, c.n / 2, sum.data());
    edgekv_cpu_key_sum(&k, c.n / 2, c.n - c.n / 2, rest.data());
    for (int j = 0; j < c.d_k; ++j) sum[j] += rest[j];
    edgekv_cpu_predict(
        &k, &v, sum.data(), &in.map, c.n / 3, c.n - c.n / 3, out.data(), unlike.data());
    edgekv_cpu_predict(&k, &v, sum.data(), &in.map, 0, c.n / 3, out.data(), unlike.data());
    check(std::isnan(sum[c.d_k]), "predict: %s: sums behind the last", c.name().c_str());
    judge_predict(c, in, out, unlike, 1e-4);
}

void test_predict(random_source & rnd) {
    for (const auto & c : predict_cases(TYPES, HEAD_SIZES))
        for (bool centred : { false, true }) test_predict(c, rnd, centred);
}

// ---- whole keys

// x [d] times the Walsh-Hadamard matrix, block by block
std::vector<float> turned(const std::vector<float> & x, int size) {
    std::vector<float> y(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
        double sum = 0;
        for (int j = 0; j < size; ++j) {
            const float value = x[i / size * size + j];
            sum += __builtin_parity((int) (i % size) & j) ? -value : value;
        }
        y[i] = (float) (sum / std::sqrt((double) size));
    }
    return y;
}

void test_whole_keys(random_source & rnd) {
    for (const int d : { 64, 80, 128, 192, 512 })
        for (const int turn : { 0, 16, 64 })
            for (const int with : { 0, 1, 2, 3 }) {
                if (turn && d % turn) continue;
                const int n = 3;
                std::vector<float> centre(d), scale(d), keys, want;
                for (int i = 0; i < d; ++i) {
                    centre[i] = rnd.normal();
                    scale[i] = std::exp(rnd.normal());
                }
                for (int r = 0; r < n; ++r) {
                    std::vector<float> key(d);
                    for (float & x : key) x = rnd.normal();
                    auto stored = turn ? turned(key, turn) : key;
                    want.insert(want.end(), stored.begin(), stored.end());
                    if (with & 1) {
                        for (int i = 0; i < d; ++i) key[i] *= scale[i];
                        stored = turn ? turned(key, turn) : key;
                    }
                    for (int i = 0; i < d && with & 2; ++i) stored[i] -= centre[i];
                    keys.insert(keys.end(), stored.begin(), stored.end());
                }
                const edgekv_key_basis basis { with & 2 ? centre.data() : nullptr,
                    with & 1 ? scale.data() : nullptr, turn };
                edgekv_cpu_whole_keys(&basis, n, d, keys.data());
                double worst = 0;
                for (size_t i = 0; i < want.size(); ++i)
                    worst = std::max(worst, (double) std::fabs(keys[i] - want[i]));
                check(worst < 3e-5, "whole keys: d %d turn %d with %d: %g", d, turn, with, worst);
            }
}

// ---- fwht

void test_fwht(random_source & rnd) {
    for (const int n : { 2, 8, 16, 64, 128, 512, 1024 }) {
        // rows of x lie apart, those of y do not
        const int n1 = 3, n2 = 2, step = n + 5;
        std::vector<float> x((size_t) n1 * n2 * step), y((size_t) n1 * n2 * n, NAN), want(y);
        for (float & v : x) v = rnd.normal();
        ggml_tensor in = {}, out = {};
        in.type = out.type = GGML_TYPE_F32;
        in.data = x.data();
        out.data = y.data();
        out.src[1] = &in;
        const int64_t ne[] = { n, n1, n2, 1 };
        for (int i = 0; i < GGML_MAX_DIMS; ++i) {
            in.ne[i] = out.ne[i] = ne[i];
            in.nb[i] =
                i ? (i == 1 ? step * sizeof(float) : in.nb[i - 1] * ne[i - 1]) : sizeof(float);
            out.nb[i] = i ? out.nb[i - 1] * ne[i - 1] : sizeof(float);
        }
        bool taken = true;
        for (int ith = 0; ith < 4; ++ith) taken &= edgekv_cpu_fwht(&out, ith, 4);
        const bool fits = n >= 16 && n <= 512;
        check(taken || !fits || !ggml_cpu_has_avx(), "fwht: %d values are left to ggml", n);
        if (!taken) continue; // ggml's own then
        for (int r = 0; r < n1 * n2; ++r)
            hadamard_loop(&x[(size_t) r * step], &want[(size_t) r * n], n);
        check(!memcmp(y.data(), want.data(), y.size() * sizeof(float)),
            "fwht: %d values have other bits than those of a loop", n);
    }
}

// ---- moments

void test_moments(random_source & rnd) {
    for (const auto & [n, d] : { std::pair { 1, 1 }, std::pair { 3, 20 }, std::pair { 300, 64 },
             std::pair { 129, 100 }, std::pair { 128, 33 } }) {
        const int step = d + 7;
        std::vector<float> x((size_t) n * step), mean(d), lower(d * (d + 1) / 2 + 1, 0.5f);
        for (auto * v : { &x, &mean })
            for (float & one : *v) one = rnd.normal();
        lower.back() = NAN;
        edgekv_cpu_moments(x.data(), step, n, d, mean.data(), lower.data());
        nmse e;
        for (int i = 0, at = 0; i < d; ++i)
            for (int j = 0; j <= i; ++j) {
                double want = 0.5;
                for (int t = 0; t < n; ++t)
                    want +=
                        ((double) x[t * step + i] - mean[i]) * ((double) x[t * step + j] - mean[j]);
                e.add(lower[at++], want);
            }
        check(e.value() < 1e-10, "moments: %d rows of %d values: NMSE %g", n, d, e.value());
        check(std::isnan(lower.back()), "moments: behind the last");
    }
}

// ---- centroids: tests/test_centroid_merge.py has the reference; here, sizes that fill nothing

void test_centroids(random_source & rnd) {
    for (const auto & [n, n_kept, n_queries, d_k, d_v, n_groups] :
        { std::array { 1, 0, 1, 4, 4, 1 }, std::array { 65, 7, 19, 20, 36, 3 },
            std::array { 200, 64, 50, 64, 48, 64 }, std::array { 5, 1, 100, 130, 8, 5 } }) {
        std::vector<float> keys((size_t) n * d_k), values((size_t) n * d_v),
            kept((size_t) n_kept * d_k), kept_values((size_t) n_kept * d_v),
            queries((size_t) n_queries * d_k), found_keys((size_t) n_groups * d_k),
            found_values((size_t) n_groups * d_v);
        for (auto * x : { &keys, &values, &kept, &kept_values, &queries })
            for (float & v : *x) v = 0.3f * rnd.normal();
        std::vector<int32_t> label(n, -1);
        const edgekv_lost lost = { keys.data(), values.data(), kept.data(), kept_values.data(),
            queries.data(), n, n_kept, n_queries, d_k, d_v, 1.5f, 2.0f };
        const edgekv_centroid_params params = { n_groups, 3, 1e-3f, 0.1f, 1e9f, 1e9f, 0.1f, 3 };
        const int n_found = edgekv_cpu_centroids(
            &lost, &params, found_keys.data(), found_values.data(), label.data());
        check(n_found >= 1 && n_found <= n_groups, "centroids: %d of %d groups", n_found, n_groups);
        std::vector<bool> has(n_groups);
        for (const int32_t g : label) {
            check(g >= 0 && g < n_groups, "centroids: a row is in group %d", g);
            if (g >= 0 && g < n_groups) has[g] = true;
        }
        check(std::count(has.begin(), has.end(), true) == n_found, "centroids: a group is missing");
        bool finite = true;
        for (int i = 0; i < n_found * d_k; ++i) finite &= std::isfinite(found_keys[i]);
        for (int i = 0; i < n_found * d_v; ++i) finite &= std::isfinite(found_values[i]);
        check(finite, "centroids: a row is not finite");
    }
}

// ---- codes

struct coded {
    edgekv_codebook book = {};
    std::vector<char> basis;
    std::vector<ggml_fp16_t> centres;
    std::vector<float> mean;
    std::vector<int32_t> ends;
    std::vector<uint8_t> codes;
    int n_padded = 0;

    // keys [n][d]
    coded(const std::vector<float> & keys, int d, int n_parts, int n_dims, ggml_type type)
        : basis(n_dims * ggml_row_size(type, d)), centres(n_dims * EDGEKV_CENTRES), mean(d),
          ends(n_parts) {
        const int n = (int) keys.size() / d;
        book = { d, n_parts, n_dims, type, basis.data(), centres.data(), mean.data(), ends.data() };
        n_padded = (n + EDGEKV_BLOCK - 1) / EDGEKV_BLOCK * EDGEKV_BLOCK;
        codes.resize((size_t) n_padded / 2 * n_parts);
        if (n == 0) return;
        edgekv_cpu_codes_learn(
            &book, keys.data(), n, basis.data(), centres.data(), mean.data(), ends.data());
        for (int first = 0; first < n; first += 13) // in pieces
            edgekv_cpu_codes_put(
                &book, &keys[(size_t) first * d], std::min(13, n - first), first, codes.data());
    }

    int code(int key, int part) const {
        const int byte = codes[(key / 32 * book.n_parts + part) * 16 + key % 16];
        return key % 32 < 16 ? byte & 15 : byte >> 4;
    }

    std::vector<float> basis_rows() const {
        std::vector<float> x((size_t) book.n_dims * book.d);
        edgekv_cpu_rows_to_f32(book.type, book.basis, ggml_row_size(book.type, book.d), 0,
            book.n_dims, book.d, x.data());
        return x;
    }

    // less the mean, as the codes say it
    std::vector<double> key(int r) const {
        std::vector<double> x(book.d);
        const auto rows = basis_rows();
        for (int p = 0, i = 0; p < book.n_parts; ++p)
            for (; i < ends[p]; ++i)
                for (int j = 0; j < book.d; ++j)
                    x[j] += rows[(size_t) i * book.d + j] *
                        ggml_fp16_to_fp32(centres[i * EDGEKV_CENTRES + code(r, p)]);
        return x;
    }
};

// Keys that differ in few directions are said well by few bits, and scores are what the codes say
void test_codes_of(random_source & rnd, int d, int n, int n_parts) {
    const int n_true = std::min(d, 6), n_dims = std::min(d, 3 * n_parts), n_query = 3;
    std::vector<float> directions((size_t) n_true * d), keys((size_t) n * d);
    for (float & x : directions) x = rnd.normal();
    for (int r = 0; r < n; ++r) {
        for (int i = 0; i < d; ++i) keys[r * d + i] = 5 + 0.05f * rnd.normal();
        for (int t = 0; t < n_true; ++t) {
            const float x = rnd.normal();
            for (int i = 0; i < d; ++i) keys[r * d + i] += x * directions[t * d + i];
        }
    }
    const coded c(keys, d, n_parts, n_dims, d % 32 ? GGML_TYPE_F16 : GGML_TYPE_Q8_0);
    check(c.ends.back() == n_dims && c.ends[0] > 0 &&
            std::adjacent_find(c.ends.begin(), c.ends.end(), std::greater_equal<int>()) ==
                c.ends.end(),
        "codes: d %d: parts of no or too many dims", d);
    double error = 0, size = 0;
    for (int r = 0; r < n; ++r) {
        const auto key = c.key(r);
        for (int i = 0; i < d; ++i) {
            error += std::pow(keys[r * d + i] - c.mean[i] - key[i], 2);
            size += std::pow(keys[r * d + i] - c.mean[i], 2);
        }
    }
    const double most = n_parts >= n_true ? 0.05 : 0.6;
    check(
        n < 100 || error < most * size, "codes: d %d, %d parts lose %g", d, n_parts, error / size);

    std::vector<float> q((size_t) n_query * d), step(n_query);
    for (float & x : q) x = rnd.normal();
    std::vector<uint16_t> got((size_t) n_query * c.n_padded);
    edgekv_cpu_codes_score(
        &c.book, c.codes.data(), c.n_padded, q.data(), d, n_query, got.data(), step.data());
    for (int h = 0; h < n_query; ++h) {
        std::vector<double> logit(n);
        for (int r = 0; r < n; ++r) {
            const auto key = c.key(r);
            for (int i = 0; i < d; ++i) logit[r] += key[i] * q[h * d + i];
        }
        double farthest = 0; // logits but for a constant
        for (int r = 0; r < n; ++r)
            farthest = std::max(farthest,
                std::fabs(logit[r] - logit[0] -
                    (double) step[h] *
                        (got[(size_t) h * c.n_padded + r] - got[(size_t) h * c.n_padded])));
        check(farthest <= step[h] * (n_parts + 0.5), "codes: d %d: a score is %g steps off", d,
            farthest / step[h]);
    }
}

void test_codes(random_source & rnd) {
    for (int d : { 4, 64, 80, 128 })
        for (int n : { 1, 5, 32, 300 })
            for (int n_parts : { 1, 6, 32 })
                if (n_parts <= d) test_codes_of(rnd, d, n, n_parts);
}

// ---- recall

// Logits and values by plain loops over the rows that are probable enough by the index
void test_recall_of(random_source & rnd, int d_k, int d_v, int n, int n_query, float softcap) {
    const int n_most = rnd.below(n + 2), dp = 2 + d_v, n_groups = rnd.below(4);
    std::vector<uint8_t> label(n);
    std::vector<uint32_t> resident(n / 32 + 1);
    std::vector<int32_t> members(n_groups);
    std::vector<float> q((size_t) n_query * d_k), keys((size_t) n * d_k);
    std::vector<ggml_fp16_t> k((size_t) n * d_k), v((size_t) n * d_v), group_k(n_groups * d_k),
        group_v(n_groups * d_v);
    for (auto * all : { &group_k, &group_v })
        for (auto & x : *all) x = ggml_fp32_to_fp16(0.1f * rnd.normal());
    const auto is_resident = [&](int r) { return resident[r / 32] >> r % 32 & 1; };
    for (int r = 0; r < n; ++r) {
        if (rnd.below(4) == 0) resident[r / 32] |= 1u << r % 32;
        label[r] = (uint8_t) rnd.below(std::max(n_groups, 1));
        if (!is_resident(r) && n_groups) ++members[label[r]];
    }
    for (auto & x : q) x = 3 * rnd.normal();
    for (auto & x : keys) x = rnd.normal();
    for (size_t i = 0; i < k.size(); ++i) k[i] = ggml_fp32_to_fp16(keys[i]);
    for (auto & x : v) x = ggml_fp32_to_fp16(rnd.normal());
    const int n_parts = std::max(1, d_k / 4);
    const coded index(keys, d_k, n_parts, std::min(d_k, 3 * n_parts), GGML_TYPE_F16);
    const edgekv_recalled a = { n, n_most, d_k, d_v, 0.01f, index.book, index.codes.data(),
        resident.data(), label.data(), (const char *) k.data(), (const char *) v.data(),
        d_k * sizeof(ggml_fp16_t), d_v * sizeof(ggml_fp16_t), GGML_TYPE_F16, GGML_TYPE_F16,
        n_groups, group_k.data(), group_v.data(), members.data(), 0.125f, softcap };
    std::vector<float> out((size_t) n_query * dp, NAN);
    edgekv_cpu_recall(&a, q.data(), d_k, n_query, out.data());

    std::vector<uint16_t> steps((size_t) n_query * index.n_padded);
    std::vector<float> step(n_query);
    edgekv_cpu_codes_score(
        &a.book, a.codes, index.n_padded, q.data(), d_k, n_query, steps.data(), step.data());
    std::vector<double> best(n, 0);
    for (int h = 0; h < n_query; ++h) {
        const auto * s = steps.data() + (size_t) h * index.n_padded;
        const int most = n ? *std::max_element(s, s + n) : 0;
        double sum = 0;
        for (int r = 0; r < n; ++r) sum += std::exp(0.125 * step[h] * (s[r] - most));
        for (int r = 0; r < n; ++r)
            best[r] = std::max(best[r], std::exp(0.125 * step[h] * (s[r] - most)) / sum);
    }
    std::vector<int> rows;
    for (int r = 0; r < n; ++r) {
        if (std::fabs(best[r] - a.least) < 1e-6) return; // either way
        if (!is_resident(r) && best[r] > a.least) rows.push_back(r);
    }
    std::stable_sort(rows.begin(), rows.end(), [&](int x, int y) { return best[x] > best[y]; });
    if ((int) rows.size() > n_most && n_most > 0 &&
        best[rows[n_most - 1]] - best[rows[n_most]] < 1e-6)
        return;
    rows.resize(std::min<size_t>(rows.size(), n_most));

    // what it attends to: a key, a value, how many rows they are, and of which group
    struct seen {
        const ggml_fp16_t *key, *value;
        int n, group;
    };
    std::vector<seen> all;
    for (int r : rows) {
        all.push_back({ &k[r * d_k], &v[r * d_v], 1, -1 });
        if (n_groups) --members[label[r]];
    }
    for (int g = 0; g < n_groups; ++g)
        if (members[g] > 0) all.push_back({ &group_k[g * d_k], &group_v[g * d_v], members[g], g });
    // how much more the rows of a group weigh than as many of their mean
    const auto differ = [&](int h, int group) {
        const auto * s = steps.data() + (size_t) h * index.n_padded;
        double weights = 0, logits = 0;
        int n_rows = 0;
        for (int r = 0; r < n; r += std::max(1, n / 1024)) { // some of many
            if (is_resident(r) || best[r] > a.least || label[r] != group) continue;
            const double x = 0.125 * step[h] * (s[r] - s[0]);
            weights += std::exp(x);
            logits += x;
            ++n_rows;
        }
        return n_rows ? std::log(weights / n_rows) - logits / n_rows : 0;
    };

    nmse error;
    for (int h = 0; h < n_query; ++h) {
        std::vector<double> s, o(d_v, 0);
        double most = -INFINITY, sum = 0;
        for (const auto & one : all) {
            double x = 0;
            for (int i = 0; i < d_k; ++i)
                x += (double) q[h * d_k + i] * ggml_fp16_to_fp32(one.key[i]);
            x *= 0.125;
            s.push_back((softcap ? softcap * std::tanh(x / softcap) : x) + std::log(one.n));
            if (one.group >= 0 && !softcap) s.back() += differ(h, one.group);
            most = std::max(most, s.back());
        }
        for (size_t i = 0; i < all.size(); ++i) {
            const double p = std::exp(s[i] - most);
            sum += p;
            for (int j = 0; j < d_v; ++j) o[j] += p * ggml_fp16_to_fp32(all[i].value[j]);
        }
        const float * got = out.data() + (size_t) h * dp;
        if (all.empty()) {
            check(got[0] == -INFINITY && got[1] == 0, "recall: nothing is something");
            continue;
        }
        error.add(got[0], most);
        error.add(got[1], sum);
        for (int j = 0; j < d_v; ++j) error.add(got[2 + j], o[j]);
    }
    check(error.value() < 1e-8, "recall: d %d/%d, %d of %d rows, %d queries: %g", d_k, d_v, n_most,
        n, n_query, error.value());
}

// Each group has the means of its rows; they lie nearer to these than to the mean of all
void test_recall_groups(random_source & rnd) {
    constexpr int D_K = 32, D_V = 16, N = 600, FOUND = 500, BEFORE = 550, MOST = 8;
    std::vector<ggml_fp16_t> k(N * D_K), v(N * D_V), keys(MOST * D_K), values(MOST * D_V);
    std::vector<float> centres(5 * D_K);
    for (float & x : centres) x = 10 * rnd.normal();
    std::vector<uint8_t> label(N, MOST);
    std::vector<uint32_t> resident(N / 32 + 1);
    std::vector<int32_t> members(MOST);
    for (int r = 0; r < N; ++r) {
        const float * centre = &centres[rnd.below(5) * D_K];
        for (int i = 0; i < D_K; ++i) k[r * D_K + i] = ggml_fp32_to_fp16(centre[i] + rnd.normal());
        for (int i = 0; i < D_V; ++i) v[r * D_V + i] = ggml_fp32_to_fp16(rnd.normal());
        if (r % 7 == 0) resident[r / 32] |= 1u << r % 32;
    }
    edgekv_recalled a = {};
    a.n = N;
    a.d_k = D_K;
    a.d_v = D_V;
    a.k = (const char *) k.data();
    a.v = (const char *) v.data();
    a.nb_k = D_K * sizeof(ggml_fp16_t);
    a.nb_v = D_V * sizeof(ggml_fp16_t);
    a.type_k = a.type_v = GGML_TYPE_F16;
    a.resident = resident.data();
    const int n = edgekv_cpu_recall_groups(
        &a, FOUND, 0, MOST, label.data(), keys.data(), values.data(), members.data());
    check(n == MOST, "recall: %d groups of %d", n, MOST);
    // the last rows once more, with other residents
    const auto before = label;
    std::fill(label.begin() + BEFORE, label.end(), MOST);
    for (int r = 0; r < N; r += 5) resident[r / 32] ^= 1u << r % 32;
    edgekv_cpu_recall_groups(
        &a, FOUND, BEFORE, MOST, label.data(), keys.data(), values.data(), members.data());
    check(label == before, "recall: groups depend on who is resident or had labels before");

    std::vector<int> size(MOST);
    std::vector<double> mean_k(MOST * D_K), mean_v(MOST * D_V), mean(D_K);
    int n_rows = 0;
    for (int r = 0; r < N; ++r) {
        const int g = label[r];
        if (!check(g < MOST, "recall: row %d is in no group", r)) return;
        if (resident[r / 32] >> r % 32 & 1) continue;
        ++size[g];
        ++n_rows;
        for (int i = 0; i < D_K; ++i) mean_k[g * D_K + i] += ggml_fp16_to_fp32(k[r * D_K + i]);
        for (int i = 0; i < D_K; ++i) mean[i] += ggml_fp16_to_fp32(k[r * D_K + i]);
        for (int i = 0; i < D_V; ++i) mean_v[g * D_V + i] += ggml_fp16_to_fp32(v[r * D_V + i]);
    }
    nmse error;
    for (int g = 0; g < MOST; ++g) {
        check(size[g] == members[g], "recall: group %d has %d rows", g, size[g]);
        for (int i = 0; i < D_K && size[g]; ++i)
            error.add(ggml_fp16_to_fp32(keys[g * D_K + i]), mean_k[g * D_K + i] / size[g]);
        for (int i = 0; i < D_V && size[g]; ++i)
            error.add(ggml_fp16_to_fp32(values[g * D_V + i]), mean_v[g * D_V + i] / size[g]);
    }
    check(error.value() < 1e-6, "recall: means of groups: %g", error.value());
    double within = 0, all = 0;
    for (int r = 0; r < N; ++r)
        for (int i = 0; i < D_K && label[r] < MOST; ++i) {
            const double x = ggml_fp16_to_fp32(k[r * D_K + i]);
            within += std::pow(x - ggml_fp16_to_fp32(keys[label[r] * D_K + i]), 2);
            all += std::pow(x - mean[i] / n_rows, 2);
        }
    check(within < 0.7 * all, "recall: groups say no more than one would: %g of %g", within, all);
    std::fill(resident.begin(), resident.end(), ~0u);
    check(edgekv_cpu_recall_groups(
              &a, 0, 0, MOST, label.data(), keys.data(), values.data(), members.data()) == 0,
        "recall: groups of nothing");
}

void test_recall(random_source & rnd) {
    test_codes(rnd);
    test_recall_groups(rnd);
    for (int d_k : { 4, 64, 96, 128 })
        for (int n : { 0, 1, 17, 300, 2100 })
            for (int n_query : { 1, 7 })
                test_recall_of(
                    rnd, d_k, d_k == 96 ? 64 : d_k, n, n_query, n_query == 7 ? 30.0f : 0);
}

void run(const test_case & c, random_source & rnd) {
    const inputs in(c, rnd);
    const auto a = attend_reference(in);
    const auto expected = values_reference(in, a);
    test_attend_parts(in, expected);
    test_attend_recent(in, rnd);
    test_attend_prompt(in, expected);
    test_score(in, a);
}

// every kernel over a few rows: nothing refuses a size, so what counts is what comes out
bool takes(ggml_type type, int d) {
    if (!fits(type, d)) return false;
    test_case c;
    c.type_k = c.type_v = type;
    c.d_k = c.d_v = d;
    c.group = c.n_tokens = 2;
    c.len = { 9 };
    const merge_case folded { type, d, 5, 4, 1, false, false };
    random_source rnd((uint32_t) d);
    const int failed = g_failed;
    run(c, rnd);
    const merge_inputs in(folded, rnd);
    test_nearest(folded, in);
    test_fold(folded, in, rnd);
    return g_failed == failed;
}

} // namespace

int main(int argc, char ** argv) {
    ggml_cpu_init(); // its table of f16 values
    if (print_support(argc, argv, TYPES, takes)) return g_failed > 0;
    if (asked(argc, argv, "--perf")) return perf(argc, argv);
    asked(argc, argv, "--test");
    const uint32_t seed = argc > 1 ? (uint32_t) strtoul(argv[1], nullptr, 10) : 1;
    const int n_random = argc > 2 ? atoi(argv[2]) : 60;
    printf("seed %u\n", seed);
    random_source rnd(seed);
    test_rows_to_f32(rnd);
    test_predict(rnd);
    test_whole_keys(rnd);
    test_fwht(rnd);
    test_moments(rnd);
    test_centroids(rnd);
    test_recall(rnd);
    test_merge(rnd, n_random);
    each_case(
        rnd, n_random, asks_few(argc, argv), ON_CPU, [&](const test_case & c) { run(c, rnd); });
    print_table();
    return finish();
}
