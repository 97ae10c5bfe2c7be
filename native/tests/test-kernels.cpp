// The CPU kernels against plain loops in double precision over the same dequantised rows.
//     test-kernels [seed] [number of random cases]
#include "cpu-cases.h"

#include "ggml-cpu.h"

#include <cstdlib>
#include <thread>

namespace {

// f32 sums over at most 1000 rows and 256 values, and ggml's expf: measured worst 4e-12 (attend), 2e-11 (score: m2 of flat columns)
constexpr double MAX_NMSE_ATTEND = 1e-10, MAX_NMSE_SCORE = 1e-10;

// ---- attend

void test_attend_parts(const inputs & in, const std::vector<double> & expected) {
    for (int n_parts : { 1, 2, 5, 16 }) {
        std::vector<float> parts((size_t) n_parts*in.c.n_tokens*in.n_head*(2 + in.c.d_v), NAN), out(expected.size()), other(expected.size());
        for (int p = n_parts - 1; p >= 0; --p) edgekv_cpu_attend_part(&in.rows, &in.qs, parts.data(), p, n_parts);
        for (int nth : { 1, 3, 16 }) {
            auto & x = nth == 1 ? out : other;
            std::fill(x.begin(), x.end(), NAN);
            for (int ith = 0; ith < nth; ++ith) edgekv_cpu_attend_combine(&in.rows, in.c.n_tokens, parts.data(), n_parts, x.data(), ith, nth);
            if (nth > 1) check(!memcmp(out.data(), other.data(), out.size()*sizeof(float)), "attend_combine: %s: %d threads differ from one", in.c.name().c_str(), nth);
        }
        judge("attend_part", in, compare(out, expected), MAX_NMSE_ATTEND);
    }
}

void test_attend_prompt(const inputs & in, const std::vector<double> & expected) {
    std::vector<float> out(expected.size()), other(expected.size());
    for (int nth : { 1, 2, 7 }) {
        auto & x = nth == 1 ? out : other;
        std::fill(x.begin(), x.end(), NAN);
        std::atomic<int32_t> next { 0 };
        std::vector<std::thread> threads;
        for (int ith = 0; ith < nth; ++ith) threads.emplace_back([&] { edgekv_cpu_attend_prompt(&in.rows, &in.qs, x.data(), &next, nth); });
        for (auto & t : threads) t.join();
        if (nth > 1) check(!memcmp(out.data(), other.data(), out.size()*sizeof(float)), "attend_prompt: %s: %d threads differ from one", in.c.name().c_str(), nth);
    }
    judge("attend_prompt", in, compare(out, expected), MAX_NMSE_ATTEND);
}

// ---- score

// all tokens in n_calls calls, as chunks of a prompt come
columns run_score(const inputs & in, int n_calls, int n_parts_norm, int n_parts) {
    columns cols(in);
    for (int call = 0; call < n_calls; ++call) {
        const int t0 = in.c.n_tokens*call/n_calls, t1 = in.c.n_tokens*(call + 1)/n_calls, n = t1 - t0;
        if (n == 0) continue;
        std::vector<int32_t> len, n_after;
        const bool later = call % 2 == 0; // the rows of later calls are there already: n_after says who does not see them
        for (int32_t x : in.len) len.push_back(later ? x : std::max(0, x - (in.c.n_tokens - t1)));
        for (int t = t0; t < t1; ++t) n_after.push_back(in.c.n_tokens - 1 - t);
        edgekv_rows rows = in.rows;
        rows.v = nullptr;
        rows.len = len.data();
        edgekv_queries qs = in.qs;
        qs.q += t0*qs.stride_t;
        qs.n_tokens = n;
        qs.n_after = later ? n_after.data() : nullptr;
        if (qs.start) qs.start += t0;
        std::vector<float> norm((size_t) n_parts_norm*in.n_head*n*2, NAN);
        for (int p = n_parts_norm - 1; p >= 0; --p) edgekv_cpu_score_norm(&rows, &qs, norm.data(), p, n_parts_norm);
        std::vector<float> folded((size_t) in.n_head*n*2, NAN);
        for (int i = 2; i >= 0; --i) edgekv_cpu_score_fold(&rows, &qs, norm.data(), n_parts_norm, folded.data(), i, 3);
        cols.c.n_seen = t0;
        for (int p = 0; p < n_parts; ++p) edgekv_cpu_score_columns(&rows, &qs, folded.data(), &cols.c, p, n_parts);
    }
    return cols;
}

void test_score(const inputs & in, const std::vector<attention> & a) {
    const columns_reference expected(in, a);
    compare_columns("score, one call", in, run_score(in, 1, 16, 16), expected, MAX_NMSE_SCORE);
    if (in.c.n_tokens > 1) compare_columns("score, calls", in, run_score(in, 3, 5, 3), expected, MAX_NMSE_SCORE);
}

// ---- rows as f32

void test_rows_to_f32(random_source & rnd) {
    for (ggml_type type : TYPES) for (int d : HEAD_SIZES) for (bool gaps : { false, true }) {
        if (!fits(type, d)) continue;
        const int n = 37;
        matrix m;
        m.fill(rnd, type, d, n, std::vector<bool>(n, true), gaps);
        for (auto [r0, n_rows] : { std::pair<int, int>(0, n), { 5, 32 }, { 36, 1 }, { 3, 0 } }) {
            std::vector<float> out((size_t) n_rows*d + 1, NAN);
            edgekv_cpu_rows_to_f32(type, m.bytes.data(), m.nb, r0, n_rows, d, out.data());
            check(!memcmp(out.data(), m.f32.data() + (size_t) r0*d, (size_t) n_rows*d*sizeof(float)) && std::isnan(out.back()),
                  "rows_to_f32: %s d %d rows %d+%d%s", ggml_type_name(type), d, r0, n_rows, gaps ? " gaps" : "");
        }
    }
}

// ---- merge

constexpr double MAX_COSINE_ERROR = 2e-6, MAX_FOLD_ERROR = 1e-5; // absolute; relative to the longest row that takes part

struct merge_case {
    ggml_type type;
    int  d, n_gone, n_kept, n_zero; // n_zero: kept keys, and evicted ones, of length 0
    bool twins, gaps;               // twins: the second half of the kept keys equals the first

    std::string name() const {
        return std::string(ggml_type_name(type)) + " d " + std::to_string(d) + ", " + std::to_string(n_gone) + " into " + std::to_string(n_kept) + ", " +
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
            memcpy(&m.bytes[to*m.nb], &m.bytes[from*m.nb], m.nb);
            std::copy_n(&m.f32[(size_t) from*c.d], c.d, &m.f32[(size_t) to*c.d]);
        };
        for (auto * list : { &gone, &kept }) for (int i = 0; i < c.n_zero && !list->empty(); ++i) zero(rnd.one_of(*list), c);
        for (int i = 0; c.twins && i < c.n_kept/2; ++i) copy(kept[i], kept[i + c.n_kept/2]);
        view = { m.bytes.data(), m.nb, c.type, c.d };
    }

    void zero(int32_t r, const merge_case & c) {
        const std::vector<float> nothing(c.d, 0.0f);
        ggml_quantize_chunk(c.type, nothing.data(), &m.bytes[r*m.nb], 0, 1, c.d, nullptr);
        std::fill_n(&m.f32[(size_t) r*c.d], c.d, 0.0f);
    }

    double cosine(int32_t a, int32_t b, int d) const {
        const float * x = &m.f32[(size_t) a*d], * y = &m.f32[(size_t) b*d];
        double xy = 0, xx = 0, yy = 0;
        for (int i = 0; i < d; ++i) { xy += (double) x[i]*y[i]; xx += (double) x[i]*x[i]; yy += (double) y[i]*y[i]; }
        return xx > 0 && yy > 0 ? xy/std::sqrt(xx*yy) : 0.0;
    }
};

void test_nearest(const merge_case & c, const merge_inputs & in) {
    std::vector<float> cosine, first;
    std::vector<int32_t> nearest, first_nearest;
    for (int n_parts : { 1, 2, 7 }) {
        cosine.assign(c.n_gone + 1, NAN);
        nearest.assign(c.n_gone + 1, -7);
        for (int p = n_parts - 1; p >= 0; --p) {
            edgekv_cpu_merge_nearest(&in.view, in.gone.data(), c.n_gone, in.kept.data(), c.n_kept, cosine.data(), nearest.data(), p, n_parts);
        }
        check(std::isnan(cosine.back()) && nearest.back() == -7, "nearest: %s: written behind the end", c.name().c_str());
        cosine.pop_back(); nearest.pop_back();
        if (first.empty()) { first = cosine; first_nearest = nearest; }
        check(cosine == first && nearest == first_nearest, "nearest: %s: %d parts differ", c.name().c_str(), n_parts);
    }
    for (int i = 0; i < c.n_gone; ++i) {
        double best = -2;
        int at = 0;
        for (int j = 0; j < c.n_kept; ++j) {
            const double u = in.cosine(in.gone[i], in.kept[j], c.d);
            if (u > best) { best = u; at = j; }
        }
        const int j = nearest[i];
        if (!check(j >= 0 && j < c.n_kept, "nearest: %s: row %d goes to %d", c.name().c_str(), i, j)) return;
        check(std::fabs(cosine[i] - best) < MAX_COSINE_ERROR, "nearest: %s: row %d has cosine %g, not %g", c.name().c_str(), i, cosine[i], best);
        check(j == at || best - in.cosine(in.gone[i], in.kept[j], c.d) < MAX_COSINE_ERROR, "nearest: %s: row %d goes to %d, not %d", c.name().c_str(), i, j, at);
        check(!c.twins || j < c.n_kept/2 || j == 2*(c.n_kept/2), "nearest: %s: row %d goes to the second of equal keys", c.name().c_str(), i);
    }
}

// the first half of the kept rows receives the evicted ones, unevenly and some of them nothing
void test_fold(const merge_case & c, merge_inputs & in, random_source & rnd) {
    const int n = (c.n_kept + 1)/2;
    std::vector<int32_t> counts(n, 0);
    std::vector<float> own(n), weights(c.n_gone);
    for (int i = 0; i < c.n_gone; ++i) ++counts[rnd.below(n)*rnd.below(n)/n];
    for (float & x : own)     x = rnd.normal();
    for (float & x : weights) x = rnd.normal();
    const auto before = in.m.bytes;
    const edgekv_shares shares { n, in.kept.data(), own.data(), counts.data(), in.gone.data(), weights.data() };
    edgekv_cpu_merge_fold(&in.view, &shares);

    auto expected = before;
    for (int i = 0, at = 0; i < n; ++i) {
        std::vector<double> sum(c.d);
        std::vector<float> f32(c.d), exact(c.d);
        double largest = 0;
        auto add = [&](int32_t r, float w) {
            double length = 0;
            for (int x = 0; x < c.d; ++x) { sum[x] += (double) w*in.m.f32[(size_t) r*c.d + x]; length += std::pow(w*in.m.f32[(size_t) r*c.d + x], 2); }
            largest = std::max(largest, std::sqrt(length));
        };
        add(in.kept[i], own[i]);
        for (int j = 0; j < counts[i]; ++j, ++at) add(in.gone[at], weights[at]);
        for (int x = 0; x < c.d; ++x) f32[x] = (float) sum[x];
        // as near to the sum as its rounding to the type: not the same bytes, because f32 and double sums may round apart
        char * row = &expected[in.kept[i]*in.m.nb];
        ggml_quantize_chunk(c.type, f32.data(), row, 0, 1, c.d, nullptr);
        std::vector<float> got(c.d), ideal(c.d);
        edgekv_cpu_rows_to_f32(c.type, in.m.bytes.data(), in.m.nb, in.kept[i], 1, c.d, got.data());
        edgekv_cpu_rows_to_f32(c.type, expected.data(), in.m.nb, in.kept[i], 1, c.d, ideal.data());
        double error = 0, rounding = 0;
        for (int x = 0; x < c.d; ++x) { error += std::pow(got[x] - sum[x], 2); rounding += std::pow(ideal[x] - sum[x], 2); }
        const double over = std::sqrt(error) - 1.05*std::sqrt(rounding);
        check(over <= MAX_FOLD_ERROR*largest, "fold: %s: row %d is off by %g, rounding to the type by %g", c.name().c_str(), i, std::sqrt(error), std::sqrt(rounding));
        memcpy(row, &in.m.bytes[in.kept[i]*in.m.nb], ggml_row_size(c.type, c.d));
    }
    check(expected == in.m.bytes, "fold: %s: a row that receives nothing was written", c.name().c_str());
}

void test_merge(random_source & rnd, int n_random) {
    std::vector<merge_case> cases;
    for (ggml_type type : TYPES) for (int d : HEAD_SIZES) if (fits(type, d)) cases.push_back({ type, d, 300, 77, 2, false, d == 96 });
    for (auto [gone, kept] : { std::pair<int, int>(1, 1), { 600, 1 }, { 1, 600 }, { 256, 32 }, { 257, 33 }, { 255, 31 }, { 0, 5 }, { 15, 64 }, { 513, 1000 } }) {
        for (bool twins : { false, true }) cases.push_back({ GGML_TYPE_F16, 64, gone, kept, 0, twins, false });
    }
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) cases.push_back({ type, 64, 40, 20, 100, false, false }); // most keys are zero
    for (auto [d, type] : { std::pair<int, ggml_type>(1, GGML_TYPE_F16), { 7, GGML_TYPE_F32 }, { 40, GGML_TYPE_BF16 } }) cases.push_back({ type, d, 50, 40, 1, true, true });
    for (int i = 0; i < n_random; ++i) {
        merge_case c { rnd.one_of(TYPES), rnd.one_of(HEAD_SIZES), rnd.below(700), rnd.range(1, 300), rnd.below(4), rnd.below(2) == 0, rnd.below(2) == 0 };
        if (fits(c.type, c.d)) cases.push_back(c);
    }
    for (const auto & c : cases) {
        merge_inputs in(c, rnd);
        test_nearest(c, in);
        test_fold(c, in, rnd);
    }
}

void run(const test_case & c, random_source & rnd) {
    const inputs in(c, rnd);
    const auto a = attend_reference(in);
    const auto expected = values_reference(in, a);
    test_attend_parts(in, expected);
    test_attend_prompt(in, expected);
    if (c.spread == 1) test_score(in, a);
}

} // namespace

int main(int argc, char ** argv) {
    const uint32_t seed = argc > 1 ? (uint32_t) strtoul(argv[1], nullptr, 10) : 1;
    const int n_random = argc > 2 ? atoi(argv[2]) : 60;
    printf("seed %u\n", seed);
    ggml_cpu_init(); // its table of f16 values
    random_source rnd(seed);
    test_rows_to_f32(rnd);
    test_merge(rnd, n_random);
    for (const auto & c : fixed_cases()) run(c, rnd);
    for (int i = 0; i < n_random; ++i) run(random_case(rnd), rnd);
    print_table();
    return finish();
}
