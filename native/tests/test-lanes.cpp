// The kernels for prompts with every register that the flags allow, against plain loops in double
// precision
//     test-lanes [seed] [number of random cases]
#include "cases.h"
#include "cpu/edgekv-columns.h"
#include "cpu/edgekv-prompt.h"

#include "ggml-cpu.h"

#include <cstdlib>

namespace {

constexpr double MAX_NMSE = 1e-10; // measured worst 4e-12

template <class L>
void test_exp2(const char * name) {
    double worst = 0;
    float x[L::N], y[L::N];
    for (float a = -124.5f; a < 100.0f; a += 0.001f * L::N) {
        for (int i = 0; i < L::N; ++i) x[i] = a + 0.001f * i;
        L::store(y, edgekv::exp2<L>(L::load(x)));
        for (int i = 0; i < L::N; ++i)
            worst = std::max(worst, std::fabs(y[i] / std::exp2((double) x[i]) - 1));
    }
    check(worst < 3e-7, "exp2, %s: relative error %g", name, worst);
    const float ends[] = { 0.0f, -1.0f, 8.0f, -125.5f, -1000.0f, -1e30f, -INFINITY },
                expected[] = { 1.0f, 0.5f, 256.0f, 0.0f, 0.0f, 0.0f, 0.0f };
    for (int e = 0; e < 7; ++e) {
        L::store(y, edgekv::exp2<L>(L::set(ends[e])));
        for (float z : y)
            check(std::fabs(z - expected[e]) <= 1e-7f * expected[e], "exp2, %s: of %g: %g", name,
                ends[e], z);
    }
}

template <class L>
void test_prompt(const char * name, const inputs & in, const std::vector<double> & expected) {
    typename edgekv::prompt_attention<L>::workspace w;
    std::vector<float> out(expected.size()), other(expected.size());
    for (int nth : { 1, 1000 }) { // the more threads, the smaller the blocks
        auto & x = nth == 1 ? out : other;
        std::fill(x.begin(), x.end(), NAN);
        std::atomic<int32_t> next { 0 };
        edgekv::prompt_attention<L>(in.rows, in.qs, x.data(), nullptr).run(w, nth, next);
    }
    check(!memcmp(out.data(), other.data(), out.size() * sizeof(float)),
        "%s: %s: small blocks differ from large ones", name, in.c.name().c_str());
    judge(name, in, compare(out, expected), MAX_NMSE);
}

template <class L>
void test_score(const char * name, const inputs & in, const columns_reference & expected) {
    constexpr int n_parts = 3;
    typename edgekv::panels<L>::workspace w;
    std::vector<float> norm((size_t) in.n_head * in.c.n_tokens * 2, NAN);
    edgekv_rows rows = in.rows;
    rows.v = nullptr;
    std::atomic<int32_t> next { 0 };
    edgekv::prompt_attention<L>(rows, in.qs, nullptr, norm.data()).run(w, 1, next);
    columns got(in);
    for (int p = 0; p < n_parts; ++p)
        edgekv::column_scores<L>(rows, in.qs, norm.data(), got.c).run(w, p, n_parts);
    compare_columns(name, in, got, expected, MAX_NMSE);
}

// f(lanes, name)
template <typename F>
void each_register(F && f) {
    f(edgekv::plain_lanes<4, 4, 2>(), "plain loops");
#if defined(__GNUC__)
    f(edgekv::simd_lanes<4, 4, 3>(), "128 bits");
#if defined(__AVX__)
    f(edgekv::simd_lanes<8, 4, 3>(), "256 bits");
#endif
#if defined(__AVX512F__)
    f(edgekv::simd_lanes<16, 8, 3>(), "512 bits");
#endif
#endif
    f(edgekv::best_lanes(), "these flags' best");
}

void run(const test_case & c, random_source & rnd) {
    const inputs in(c, rnd);
    const auto weights = attend_reference(in);
    const auto expected = values_reference(in, weights);
    const columns_reference expected_columns(in, weights);
    each_register([&](auto lanes, const char * name) {
        test_prompt<decltype(lanes)>(name, in, expected);
        if (c.spread == 1) test_score<decltype(lanes)>(name, in, expected_columns);
    });
}

} // namespace

int main(int argc, char ** argv) {
    const uint32_t seed = argc > 1 ? (uint32_t) strtoul(argv[1], nullptr, 10) : 1;
    const int n_random = argc > 2 ? atoi(argv[2]) : 20;
    printf("seed %u, registers of %d values\n", seed, edgekv::best_lanes::N);
    ggml_cpu_init();
    random_source rnd(seed);
    each_register([](auto lanes, const char * name) { test_exp2<decltype(lanes)>(name); });
    each_case(rnd, n_random, false, ON_CPU, [&](const test_case & c) {
        if (c.n_tokens > 2) run(c, rnd);
    });
    print_table();
    return finish();
}
