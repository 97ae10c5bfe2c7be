// The kernels for prompts with every register that the flags allow, against plain loops in double
// precision
//     test-lanes [seed] [number of random cases] [few: one of nine fixed cases]
#include "cases.h"
#include "cpu/edgekv-columns.h"
#include "cpu/edgekv-hadamard.h"
#include "cpu/edgekv-int16.h"
#include "cpu/edgekv-int8.h"
#include "cpu/edgekv-product.h"
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

template <class W>
void test_power(const char * name) {
    using L = typename W::L;
    double worst = 0;
    float y[L::N];
    for (float x = -120; x < 8; x += 0.01f) {
        L::store(y, W::power(L::set(x)));
        worst = std::max(worst, std::fabs(y[L::N - 1] / std::exp2((double) x) - 1));
    }
    check(worst < 1.1e-4, "power, %s: relative error %g", name, worst);
    for (const float x : { -1000.0f, -1e30f, -INFINITY }) {
        L::store(y, W::power(L::set(x)));
        check(y[0] == 0, "power, %s: of %g: %g", name, x, y[0]);
    }
    L::store(y, W::power(L::set(NAN)));
    check(std::isnan(y[0]), "power, %s: what is no number became %g", name, y[0]);
}

template <class L, class W>
void test_prompt(
    const char * name, const inputs & in, const std::vector<double> & expected, double max_nmse) {
    typename edgekv::prompt_attention<L, W>::workspace w;
    std::vector<float> out(expected.size()), other(expected.size());
    for (int nth : { 1, 1000 }) { // the more threads, the smaller the blocks
        auto & x = nth == 1 ? out : other;
        std::fill(x.begin(), x.end(), NAN);
        std::atomic<int32_t> next { 0 };
        edgekv::prompt_attention<L, W>(in.rows, in.qs, x.data(), nullptr).run(w, nth, next);
    }
    check(!memcmp(out.data(), other.data(), out.size() * sizeof(float)),
        "%s: %s: small blocks differ from large ones", name, in.c.name().c_str());
    judge(name, in, compare(out, expected), max_nmse);
}

template <class L, class W>
void test_score(
    const char * name, const inputs & in, const columns_reference & expected, double max_nmse) {
    constexpr int n_parts = 3;
    typename edgekv::panels<L, W>::workspace w;
    std::vector<float> norm((size_t) in.n_head * in.c.n_tokens * 2, NAN);
    edgekv_rows rows = in.rows;
    rows.v = nullptr;
    std::atomic<int32_t> next { 0 };
    edgekv::prompt_attention<L, W>(rows, in.qs, nullptr, norm.data()).run(w, 1, next);
    columns got(in);
    for (int p = 0; p < n_parts; ++p)
        edgekv::column_scores<L, W>(rows, in.qs, norm.data(), got.c).run(w, p, n_parts);
    compare_columns(name, in, got, expected, max_nmse);
}

struct plain_rows {
    static constexpr int AT_ONCE = 3;
    const float * x;
    const edgekv::weight_block * blocks;
    void unpack(int r0, int n, int n_in, float * out) const {
        memcpy(out, x + (size_t) r0 * n_in, (size_t) n * n_in * sizeof(float));
    }
    void levels(int r0, int n, int n_in, edgekv::weight_block * to) const {
        std::copy_n(blocks + (size_t) r0 * n_in / 32, (size_t) n * n_in / 32, to);
    }
};

// blocks of levels up to `most`, the largest among them, and the values that they stand for; spans:
// lows are integers of eight blocks
void random_levels(random_source & rnd, int most, bool low, bool two_scales, bool spans,
    std::vector<edgekv::weight_block> & blocks, std::vector<float> & x) {
    float step = 0;
    uint8_t m[8];
    for (size_t i = 0; i < blocks.size(); ++i) {
        auto & b = blocks[i];
        b.scale = rnd.normal();
        b.low = two_scales ? rnd.normal() : low ? 10 * rnd.normal() : 0;
        if (i % 8 == 0) step = 0.5f * rnd.normal();
        m[i % 8] = (uint8_t) rnd.range(0, 63);
        if (low && spans) b.low = step * m[i % 8];
        b.sum = 0;
        for (int j = 0; j < 32; ++j) {
            b.u[j] = (int8_t) (rnd.below(2) ? most : rnd.range(low ? 0 : -most, most));
            const float scaled = (two_scales && j >= 16 ? b.second : b.scale) * b.u[j];
            b.sum += scaled;
            x[i * 32 + j] = scaled + (low ? b.low : 0);
        }
        if (low && spans && i % 8 == 7) edgekv::set_lows(&b - 7, step, m);
    }
}

// sizes around those of a block, of a panel and of what stays in a cache
template <class W, bool LOW = true>
void test_product(const char * name, double max_nmse) {
    using kernel = edgekv::product<W, plain_rows>;
    random_source rnd(7);
    constexpr int LEAST = W::LEVELS ? 32 * W::SPAN : 1;
    for (const int n_in : { LEAST, 2 * LEAST, 512, W::LEVELS ? 33 * LEAST : 1029, 33 })
        for (const int n_rows : { 1, kernel::P - 1, 2 * kernel::P + 1 })
            for (const int n_tokens : { 1, W::ROWS, 2 * W::ROWS + 1 }) {
                if (n_in % LEAST) continue;
                std::vector<float> w((size_t) n_rows * n_in), x((size_t) n_tokens * n_in);
                for (auto * all : { &w, &x })
                    for (float & value : *all) value = rnd.normal();
                std::vector<edgekv::weight_block> blocks(w.size() / 32);
                if constexpr (W::LEVELS)
                    random_levels(rnd, std::min<int>(W::MOST, INT8_MAX), LOW, W::PARTS > 1,
                        W::SPAN > 1, blocks, w);
                std::vector<float> got((size_t) n_tokens * n_rows, NAN);
                std::vector<uint32_t> words(kernel::n_all_words(n_in, n_tokens));
                const kernel p = { { w.data(), blocks.data() }, n_in, n_rows, n_tokens, x.data(),
                    got.data(), words.data() };
                for (int ith = 0; ith < 3; ++ith) p.make_words(ith, 3);
                typename kernel::workspace s;
                std::atomic<int32_t> next { 0 };
                p.run(s, next, 2);
                nmse error;
                for (int t = 0; t < n_tokens; ++t)
                    for (int r = 0; r < n_rows; ++r) {
                        // a single sum may be near 0: the error stands beside its parts
                        double sum = 0, squares = 0;
                        for (int i = 0; i < n_in; ++i) {
                            const double part =
                                (double) w[(size_t) r * n_in + i] * x[(size_t) t * n_in + i];
                            sum += part;
                            squares += part * part;
                        }
                        error.add(got[(size_t) t * n_rows + r], sum, std::sqrt(squares));
                    }
                check(error.value() < max_nmse, "product, %s: %d x %d by %d: NMSE %g", name, n_rows,
                    n_in, n_tokens, error.value());
            }
}

#if EDGEKV_INT8
// what 8 bits make of blocks whose values are alike, nearly alike or no numbers
void test_token_blocks() {
    using edgekv::token_block;
    const auto worst = [](std::vector<float> x) {
        double most = 0;
        const token_block::range range(x.data(), (int) x.size());
        for (size_t i = 0; i < x.size(); i += 32) {
            const token_block b(x.data() + i, range, false), of_span(x.data() + i, range, true);
            float sum = 0;
            int in_steps = 0;
            for (int j = 0; j < 32; ++j) {
                const float value = b.step * b.q[j] + b.base;
                sum += value;
                in_steps += b.q[j];
                most = std::max(most, std::fabs((double) value - x[i + j]));
            }
            const double tolerance = 1e-4 * (1 + std::fabs(sum));
            check(std::fabs(b.sum - sum) < tolerance && of_span.in_steps == in_steps,
                "token block: sums %g and %d steps for %g and %d", b.sum, of_span.in_steps, sum,
                in_steps);
        }
        return most;
    };
    std::vector<float> x(256, 3.0f);
    check(worst(x) == 0, "token block: values that are alike");
    check(worst(std::vector<float>(32)) == 0, "token block: zeros");
    x.assign(32, 0.0f);
    x[7] = 1e-40f; // a step without an inverse
    check(worst(x) <= 1e-40, "token block: nearly alike");
    for (int i = 0; i < 32; ++i) x[i] = 0.1f * (float) i - 1;
    check(worst(x) <= 3.1 / 254 / 2 * 1.001, "token block: half a step");
    for (float none : { NAN, INFINITY }) {
        x[20] = none;
        const token_block b(x.data(), { x.data(), 32 }, false);
        check(std::isnan(b.base), "token block: %g becomes a number", none);
    }
}
#endif

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
    const auto test = [&](auto lanes, auto words, const char * name, double max_nmse) {
        using L = decltype(lanes);
        using W = decltype(words);
        test_prompt<L, W>(name, in, expected, max_nmse);
        if (c.spread == 1) test_score<L, W>(name, in, expected_columns, max_nmse);
    };
    each_register([&](auto lanes, const char * name) {
        test(lanes, edgekv::f32_words<decltype(lanes)>(), name, MAX_NMSE);
    });
#if defined(__AVX2__) && defined(__GNUC__)
    test(edgekv::int16_words::L(), edgekv::int16_words(), "pairs of int16", 5e-6); // worst 2.0e-6
#endif
#if EDGEKV_PAIRS
    test(edgekv::best_lanes(), edgekv::bf16_words(), "pairs of bf16", 2e-4); // worst 1.1e-4
#endif
#if EDGEKV_TILES
    if (edgekv::has_tiles())
        test(edgekv::tile_lanes(), edgekv::tile_words(), "tiles of bf16", 2e-4);
#endif
}

void test_hadamard(random_source & rnd) {
#if defined(__AVX__)
    for (int n = edgekv::hadamard_register::N; n <= edgekv::HADAMARD_MOST; n *= 2) {
        std::vector<float> x(n), y(n), want(n);
        for (float & v : x) v = rnd.normal();
        edgekv::hadamard(x.data(), y.data(), n, 1.0f / sqrtf((float) n));
        hadamard_loop(x.data(), want.data(), n);
        check(!memcmp(y.data(), want.data(), n * sizeof(float)),
            "hadamard: %d values have other bits than those of a loop", n);
    }
#else
    (void) rnd;
#endif
}

} // namespace

int main(int argc, char ** argv) {
    const uint32_t seed = argc > 1 ? (uint32_t) strtoul(argv[1], nullptr, 10) : 1;
    const int n_random = argc > 2 ? atoi(argv[2]) : 20;
    printf("seed %u, registers of %d values\n", seed, edgekv::best_lanes::N);
    ggml_cpu_init();
    random_source rnd(seed);
    test_hadamard(rnd);
    each_register([](auto lanes, const char * name) { test_exp2<decltype(lanes)>(name); });
    each_register([](auto lanes, const char * name) {
        test_product<edgekv::f32_words<decltype(lanes)>>(name, MAX_NMSE);
    });
#if defined(__AVX2__) && defined(__GNUC__)
    test_product<edgekv::int16_words>("pairs of int16", 1e-6);
#endif
#if EDGEKV_INT8
    test_token_blocks();
    // tokens have 8 bits: a single one 1.0e-4
    test_product<edgekv::int8_words<true>>("int8", 2e-4);
    test_product<edgekv::int8_words<false>, false>("int8 without low", 2e-4);
    test_product<edgekv::int8_words<true, 8>>("int8 of eight blocks", 6e-4); // 4.6e-4
    test_product<edgekv::int8_words<false, 8, 2>, false>("int8 with two scales", 6e-4);
#endif
#if EDGEKV_PAIRS
    test_power<edgekv::bf16_words>("pairs of bf16");
    test_product<edgekv::bf16_words>("pairs of bf16", 5e-5); // of 8 bits: a single one 2.3e-5
#if EDGEKV_TILES
    if (edgekv::has_tiles()) test_product<edgekv::tile_words>("tiles of bf16", 5e-5);
#endif
#endif
    each_case(rnd, n_random, asks_few(argc, argv), ON_CPU, [&](const test_case & c) {
        if (c.n_tokens > 2) run(c, rnd);
    });
    print_table();
    return finish();
}
