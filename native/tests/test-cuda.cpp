// The CUDA kernels against plain loops in double precision. Built twice: against the stand-in in
// cuda/, where they run on the CPU and this shows their logic only, and, where there is a CUDA
// toolkit, for a GPU.
//     test-cuda [--test] [seed] [number of random cases] [few: one of nine fixed cases, for a
//     sanitizer] test-cuda --perf [rows per head]     (on the stand-in times mean nothing)
//     test-cuda --support
#include "device.h"
#include "predict-cases.h"
#include "cases.h"
#include "modes.h"
#include "cuda/edgekv-cuda.h"

namespace {

// queries, weights and scaled values are rounded to halves (2^-11 each): measured worst 8e-7
// (attend), 2e-6 (score: m2)
constexpr double MAX_NMSE_ATTEND = 2e-6, MAX_NMSE_SCORE = 1e-5;

// one case's inputs on the device
struct device_inputs {
    device_array<char> k, v;
    device_array<float> q, sinks, pos, recalled;
    device_array<int32_t> first, len, start;
    edgekv_rows rows;
    edgekv_queries qs;

    explicit device_inputs(const inputs & in)
        : k(in.k.bytes), v(in.v.bytes), q(in.q), sinks(in.sinks), pos(in.pos),
          recalled(in.recalled), first(in.first), len(in.len), start(in.start), rows(in.rows),
          qs(in.qs) {
        rows.k = k.data;
        rows.v = v.data;
        rows.first = first.data;
        rows.len = len.data;
        rows.sinks = sinks.or_null();
        rows.pos = pos.or_null();
        qs.q = q.data;
        qs.start = start.or_null();
        qs.recalled = recalled.or_null();
    }
};

// ---- attend

void test_attend(const inputs & in, const std::vector<double> & expected) {
    if (!check(edgekv_cuda_attend_supports(in.c.type_k, in.c.type_v, in.c.d_k, in.c.d_v),
            "attend: %s is not supported", in.c.name().c_str()))
        return;
    device_inputs d(in);
    for (int n_parts : { edgekv_cuda_attend_parts(&d.rows), 1, 23 }) {
        std::vector<float> before;
        for (int order : { 0, 1 }) {
            set_order(order);
            device_array<char> workspace(
                edgekv_cuda_attend_workspace(&d.rows, in.c.n_tokens, n_parts));
            device_array<float> dst(expected.size());
            must(edgekv_cuda_attend(&d.rows, &d.qs, dst.data, n_parts, workspace.data, nullptr),
                "attend");
            const auto out = dst.get();
            if (order)
                check(!memcmp(out.data(), before.data(), out.size() * sizeof(float)),
                    "attend: %s: %d parts: two runs differ", in.c.name().c_str(), n_parts);
            else judge("attend", in, compare(out, expected), MAX_NMSE_ATTEND);
            before = out;
        }
    }
}

// ---- score

// all tokens in n_calls calls, as chunks of a prompt come
columns run_score(const inputs & in, device_inputs & d, int n_calls, bool has_moments = true) {
    columns cols(in);
    device_array<float> sum(cols.sum), max(cols.max), entropy(cols.entropy), mean(cols.mean),
        m2(cols.m2);
    const int n_tokens = in.c.n_tokens, longest = *std::max_element(in.len.begin(), in.len.end());
    std::vector<int32_t> after;
    for (int t = 0; t < n_tokens; ++t) after.push_back(n_tokens - 1 - t);
    const device_array<int32_t> n_after(after);
    for (int call = 0; call < n_calls; ++call) {
        const int t0 = n_tokens * call / n_calls, n = n_tokens * (call + 1) / n_calls - t0;
        const edgekv_columns c = { sum.data, max.data, entropy.data,
            has_moments ? mean.data : nullptr, has_moments ? m2.data : nullptr, in.n_rows, t0 };
        // the rows of later calls are there already: n_after says who does not see them
        edgekv_queries qs = d.qs;
        qs.q += t0 * qs.stride_t;
        qs.n_tokens = n;
        qs.n_after = n_calls > 1 ? n_after.data + t0 : nullptr;
        if (qs.start) qs.start += t0;
        device_array<char> workspace(edgekv_cuda_score_workspace(&d.rows, n, longest));
        must(edgekv_cuda_score(&d.rows, &qs, &c, longest, workspace.data, nullptr), "score");
    }
    cols.sum = sum.get();
    cols.max = max.get();
    cols.entropy = entropy.get();
    cols.mean = mean.get();
    cols.m2 = m2.get();
    return cols;
}

void test_score(const inputs & in, const std::vector<attention> & a) {
    const columns_reference expected(in, a);
    device_inputs d(in);
    d.rows.v = nullptr;
    set_order(0);
    const columns once = run_score(in, d, 1);
    compare_columns("score, one call", in, once, expected, MAX_NMSE_SCORE);
    set_order(1);
    const columns again = run_score(in, d, 1);
    for (auto x :
        { &columns::sum, &columns::max, &columns::entropy, &columns::mean, &columns::m2 }) {
        check(!memcmp((once.*x).data(), (again.*x).data(), (once.*x).size() * sizeof(float)),
            "score: %s: two runs differ", in.c.name().c_str());
    }
    if (in.c.n_tokens <= 2) return;
    compare_columns("score, calls", in, run_score(in, d, 3), expected, MAX_NMSE_SCORE);
    columns few = run_score(in, d, 1, false);
    few.mean = once.mean;
    few.m2 = once.m2;
    compare_columns("score, no variance", in, few, expected, MAX_NMSE_SCORE);
}

// ---- predict

// a GPU's fast logarithms; with exact ones, on the stand-in, worst 2e-6
constexpr double MAX_PREDICT_ERROR = 1e-3;

void test_predict(random_source & rnd) {
    for (const auto & c : predict_cases(ON_CUDA.types(), HEAD_SIZES)) {
        const predict_inputs in(c, rnd);
        const device_array<char> key_bytes(in.keys.bytes), value_bytes(in.values.bytes);
        const device_array<float> weights(in.weights);
        const edgekv_numbered keys = in.keys_at(key_bytes.data),
                              values = in.values_at(value_bytes.data);
        edgekv_map map = in.map;
        map.weights = weights.data;
        std::vector<float> before;
        for (int order : { 0, 1 }) {
            set_order(order);
            device_array<char> workspace(edgekv_cuda_predict_workspace(&keys, c.n));
            device_array<float> out(c.n + 1), unlike(c.n + 1);
            must(edgekv_cuda_predict(
                     &keys, &values, &map, c.n, out.data, unlike.data, workspace.data, nullptr),
                "predict");
            auto got = out.get();
            const auto got_unlike = unlike.get();
            if (!order) judge_predict(c, in, got, got_unlike, MAX_PREDICT_ERROR);
            got.insert(got.end(), got_unlike.begin(), got_unlike.end());
            if (order)
                check(!memcmp(got.data(), before.data(), got.size() * sizeof(float)),
                    "predict: %s: two runs differ", c.name().c_str());
            before = got;
        }
    }
}

// ---- evict

std::vector<char> gathered(
    const std::vector<char> & rows, size_t n_bytes, const std::vector<int32_t> & index) {
    std::vector<char> to;
    for (int32_t i : index)
        to.insert(to.end(), rows.begin() + i * n_bytes, rows.begin() + (i + 1) * n_bytes);
    return to;
}

void test_evict(random_source & rnd, size_t n_bytes, int n_rows, int n_kept, bool ascending) {
    std::vector<char> rows(n_rows * n_bytes);
    for (char & x : rows) x = (char) rnd.below(256);
    std::vector<int32_t> all(n_rows);
    for (int i = 0; i < n_rows; ++i) all[i] = i;
    std::shuffle(all.begin(), all.end(), rnd.g);
    std::vector<int32_t> index(all.begin(), all.begin() + n_kept);
    if (ascending) std::sort(index.begin(), index.end());
    const auto expected = gathered(rows, n_bytes, index);
    const device_array<int32_t> on_device(index);
    const std::string name = std::to_string(n_kept) + " of " + std::to_string(n_rows) +
        " rows of " + std::to_string(n_bytes) + " bytes";

    const device_array<char> from(rows);
    device_array<char> to(expected.size() + 2); // what lies behind must stay
    must(
        edgekv_cuda_gather(from.data, to.data, n_bytes, on_device.data, n_kept, nullptr), "gather");
    auto got = to.get();
    check(got.back() == '\xff' && got[expected.size()] == '\xff',
        "gather: %s: wrote behind the last row", name.c_str());
    got.resize(expected.size());
    check(got == expected, "gather: %s", name.c_str());
    device_array<char> same(expected.size() + 2);
    must(edgekv_cuda_gather(from.data, same.data, n_bytes, nullptr, n_kept, nullptr), "gather");
    got = same.get();
    check(got.back() == '\xff' && got[expected.size()] == '\xff' &&
            std::equal(rows.begin(), rows.begin() + expected.size(), got.begin()),
        "gather: %s, those that come first", name.c_str());
}

// ---- merge

// quantised values are rounded to halves: measured worst 1.5e-4 (q8_0), f16 2e-7
constexpr double MAX_COSINE_ERROR = 3e-4;

void test_nearest(const merge_case & c, const merge_inputs & in, edgekv_numbered keys) {
    const device_array<int32_t> gone(in.gone), kept(in.kept);
    std::vector<float> before;
    for (int order : { 0, 1 }) {
        set_order(order);
        device_array<char> workspace(edgekv_cuda_merge_workspace(&keys, c.n_kept));
        device_array<float> cosine(c.n_gone + 1);
        device_array<int32_t> nearest(c.n_gone + 1);
        must(edgekv_cuda_merge_nearest(&keys, gone.data, c.n_gone, kept.data, c.n_kept, cosine.data,
                 nearest.data, workspace.data, nullptr),
            "nearest");
        auto values = cosine.get();
        auto rows = nearest.get();
        check(std::isnan(values.back()) && rows.back() == -1, "nearest: %s: written behind the end",
            c.name().c_str());
        values.pop_back();
        rows.pop_back();
        if (order) check(values == before, "nearest: %s: two runs differ", c.name().c_str());
        else judge_nearest(c, in, values, rows, MAX_COSINE_ERROR);
        before = values;
    }
}

void test_fold(
    const merge_case & c, const merge_inputs & in, edgekv_numbered to, random_source & rnd) {
    const merge_shares s(c, in, rnd);
    device_array<char> bytes(in.m.bytes);
    const device_array<int32_t> rows(s.rows), counts(s.counts), begin(s.begin), sources(in.gone);
    const device_array<float> own(s.own), weights(s.weights);
    const edgekv_shares shares { s.view.n, rows.data, own.data, counts.data, sources.data,
        weights.data };
    to.base = bytes.data;
    must(edgekv_cuda_merge_fold(&to, &shares, begin.data, nullptr), "fold");
    judge_fold(c, in, s, bytes.get());
}

void test_merge(random_source & rnd, int n_random, const taken_cases & taken) {
    for (const auto & c : merge_cases(rnd, n_random, taken)) {
        const merge_inputs in(c, rnd);
        const device_array<char> bytes(in.m.bytes);
        const edgekv_numbered keys { bytes.data, in.m.nb, c.type, c.d };
        test_nearest(c, in, keys);
        test_fold(c, in, keys, rnd);
    }
}

void run(const test_case & c, random_source & rnd) {
    inputs in(c, rnd);
    const auto a = attend_reference(in);
    test_attend(in, values_reference(in, a));
    test_score(in, a);
    if (c.n_tokens > EDGEKV_ALIKE_MAX || rnd.below(3)) return;
    in.recall(rnd);
    test_attend(in, recalled_reference(in, a));
}

} // namespace

int main(int argc, char ** argv) {
    if (print_support(argc, argv, ON_CUDA.types(),
            [](ggml_type type, int d) { return edgekv_cuda_attend_supports(type, type, d, d); }))
        return 0;
    if (asked(argc, argv, "--perf")) return perf(argc, argv);
    asked(argc, argv, "--test");
    const uint32_t seed = argc > 1 ? (uint32_t) strtoul(argv[1], nullptr, 10) : 1;
    const int n_random = argc > 2 ? atoi(argv[2]) : 20;
    const bool few = asks_few(argc, argv);
#ifdef EDGEKV_STANDIN
    const taken_cases taken = ON_CUDA_STANDIN;
#else
    const taken_cases taken = few ? ON_CUDA_STANDIN : ON_CUDA;
#endif
    printf("seed %u\n", seed);
    random_source rnd(seed);
    for (size_t n_bytes : { 36, 54, 68, 72, 80, 128, 136, 144, 512 })
        for (int n_kept : { 0, 1, 17, 100 })
            for (bool ascending : { false, true }) {
                test_evict(rnd, n_bytes, 100, n_kept, ascending);
            }
    test_predict(rnd);
    test_merge(rnd, n_random, taken);
    each_case(rnd, n_random, few, taken, [&](const test_case & c) { run(c, rnd); });
    print_table();
    return finish();
}
