#pragma once
// The one list of cases that the kernels of every backend are held against: each type, head size,
// group, length, then random ones. A program leaves out what its kernels do not take and what it
// has no time for.

#include "kernel-cases.h"
#include "merge-cases.h"

#include <array>
#include <cstring>

namespace {

const ggml_type TYPES[] = { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1,
    GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL, GGML_TYPE_F32 };
const int HEAD_SIZES[] = { 64, 80, 96, 128, 256 };
const int GROUPS[] = { 1, 3, 4, 7, 8, 16 };
const int N_TOKENS[] = { 1, 2, 5, 8, 65, 300 };
const int LENGTHS[] = { 0, 1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 1000, 4096 };

// which cases a program takes: f32, rows of that type; wide, logits so large that halves are too
// coarse for them; latent, a V that is part of K; step, that sizes of heads are multiples of; most,
// multiplications in one
struct taken_cases {
    bool f32, wide, latent;
    int step;
    double most;

    bool has(ggml_type type) const { return f32 || type != GGML_TYPE_F32; }
    bool has(const test_case & c) const {
        double n = 0;
        for (int len : c.len) n += len;
        return has(c.type_k) && has(c.type_v) && (wide || c.spread == 1) && (latent || !c.v_in_k) &&
            c.d_k % step == 0 && c.d_v % step == 0 &&
            n * c.group * c.n_tokens * (c.d_k + c.d_v) <= most;
    }
    bool has(const merge_case & c) const {
        return has(c.type) && c.d % step == 0 && (double) c.n_gone * c.n_kept * c.d <= most;
    }

    std::vector<ggml_type> types() const {
        std::vector<ggml_type> all;
        for (ggml_type type : TYPES)
            if (has(type)) all.push_back(type);
        return all;
    }
};

constexpr double FEW = 4e6; // for a stand-in on the CPU, or a sanitizer
constexpr taken_cases ON_CPU = { true, true, true, 1, INFINITY },
                      ON_CUDA = { false, false, false, 8, INFINITY },
                      ON_CUDA_STANDIN = { false, false, false, 8, FEW },
                      ON_METAL = { false, true, false, 1, FEW };

std::vector<test_case> fixed_cases(const taken_cases & taken) {
    std::vector<test_case> all;
    auto add = [&](auto && change) {
        test_case c;
        change(c);
        if (taken.has(c)) all.push_back(c);
    };
    for (ggml_type type : TYPES)
        for (int d : HEAD_SIZES)
            for (int n : { 1, 8, 65 }) {
                if (fits(type, d))
                    add([&](test_case & c) {
                        c.type_k = c.type_v = type;
                        c.d_k = c.d_v = d;
                        c.n_tokens = n;
                    });
            }
    for (auto [k, v] : { std::pair<ggml_type, ggml_type>(GGML_TYPE_F16, GGML_TYPE_Q8_0),
             { GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }, { GGML_TYPE_Q4_0, GGML_TYPE_F16 },
             { GGML_TYPE_BF16, GGML_TYPE_IQ4_NL }, { GGML_TYPE_Q5_1, GGML_TYPE_Q4_1 },
             { GGML_TYPE_F32, GGML_TYPE_Q5_0 } }) {
        for (int n : { 1, 2, 65 })
            add([&](test_case & c) {
                c.type_k = k;
                c.type_v = v;
                c.d_k = 96;
                c.d_v = 128;
                c.n_tokens = n;
            });
    }
    for (auto [d_k, d_v] : { std::pair<int, int>(192, 128), { 64, 256 }, { 80, 96 }, { 72, 40 } }) {
        for (int n : { 1, 65 })
            add([&](test_case & c) {
                c.d_k = d_k;
                c.d_v = d_v;
                c.n_tokens = n;
            });
    }
    // latent attention: GLM-4.7-Flash, DeepSeek-V3, and rows that fill no register
    for (auto [d_v, d_k, group] :
        { std::array<int, 3> { 512, 576, 20 }, { 512, 576, 128 }, { 32, 40, 5 } })
        for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL })
            for (int n : { 1, 2, 65 }) {
                if (fits(type, d_k))
                    add([&](test_case & c) {
                        c.type_k = c.type_v = type;
                        c.d_k = d_k;
                        c.d_v = d_v;
                        c.group = group;
                        c.v_in_k = true;
                        c.n_tokens = n;
                        c.len = { 90 };
                    });
            }
    for (int group : GROUPS)
        for (int n : N_TOKENS)
            for (int long_one : { 45, 577 })
                add([&](test_case & c) {
                    c.group = group;
                    c.n_tokens = n;
                    c.len = { 70, 0, long_one };
                });
    for (int n_len : LENGTHS)
        for (int n : { 1, 2, 65 })
            for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0 }) {
                add([&](test_case & c) {
                    c.type_k = c.type_v = type;
                    c.group = 2;
                    c.n_tokens = n;
                    c.len = { n_len, 33, 0 };
                });
            }
    add([&](test_case & c) {
        c.len = { 4096, 3 };
        c.type_k = c.type_v = GGML_TYPE_Q4_0;
    });
    add([&](test_case & c) { c.len.assign(std::begin(LENGTHS), std::end(LENGTHS)); });
    add([&](test_case & c) { c.len = { 0, 0 }; });
    for (int n : { 1, 8, 300 })
        for (int bits = 1; bits < 32; ++bits)
            add([&](test_case & c) {
                c.n_tokens = n;
                c.len =
                    n < 300 ? std::vector<int> { 133, 40, 100 } : std::vector<int> { 333, 40, 300 };
                c.group = 3;
                c.window = bits & 1;
                c.sinks = bits & 2;
                c.gaps = bits & 4;
                c.softcap = bits & 8 ? 3.0f : 0.0f;
                c.alibi = bits & 16;
            });
    // maxima grow by far, most weights vanish
    for (int n : { 8, 300 })
        for (float softcap : { 0.0f, 20.0f })
            add([&](test_case & c) {
                c.n_tokens = n;
                c.len = { 700, 300 };
                c.spread = 40;
                c.softcap = softcap;
                c.sinks = true;
            });
    for (int n : { 32, 63, 64, 129 })
        add([&](test_case & c) {
            c.n_tokens = n;
            c.group = 1;
            c.len = { n, n + 64, n + 1 };
            c.window = true;
        });
    for (int n : { 32, 65 })
        for (int group : { 1, 4 })
            add([&](test_case & c) {
                c.n_tokens = n;
                c.group = group;
                c.len = { 150, 0, 65 };
                c.type_k = GGML_TYPE_Q8_0;
            });
    return all;
}

test_case random_case(random_source & rnd, const taken_cases & taken) {
    for (;;) {
        test_case c;
        do {
            c.type_k = rnd.one_of(TYPES);
            c.d_k = rnd.one_of(HEAD_SIZES);
        } while (!fits(c.type_k, c.d_k));
        do {
            c.type_v = rnd.one_of(TYPES);
            c.d_v = rnd.one_of(HEAD_SIZES);
        } while (!fits(c.type_v, c.d_v));
        if (rnd.below(2) && fits(c.type_k, c.d_v)) c.type_v = c.type_k;
        c.group = rnd.one_of(GROUPS);
        c.n_tokens = rnd.one_of(N_TOKENS);
        c.len.clear();
        for (int i = rnd.range(1, c.n_tokens > 8 ? 2 : 5); i > 0; --i)
            c.len.push_back(rnd.below(2) ? rnd.one_of(LENGTHS) : c.n_tokens + rnd.below(400));
        c.window = rnd.below(2);
        c.sinks = rnd.below(2);
        c.gaps = rnd.below(2);
        c.alibi = rnd.below(3) == 0;
        c.spread = rnd.below(4) ? 1.0f : 30.0f;
        c.softcap = rnd.below(3) ? 0.0f : 0.5f + rnd.below(30);
        if (taken.has(c)) return c;
    }
}

// PROGRAM SEED N_RANDOM few: where a case takes long
inline bool asks_few(int argc, char ** argv) { return argc > 3 && !strcmp(argv[3], "few"); }

// of the fixed cases every one, or a few; then random ones
template <typename R>
void each_case(random_source & rnd, int n_random, bool few, const taken_cases & taken, R && run) {
    const auto fixed = fixed_cases(taken);
    for (size_t i = 0; i < fixed.size(); i += few ? 9 : 1) run(fixed[i]);
    for (int i = 0; i < n_random; ++i) run(random_case(rnd, taken));
}

std::vector<merge_case> merge_cases(random_source & rnd, int n_random, const taken_cases & taken) {
    std::vector<merge_case> cases;
    auto add = [&](const merge_case & c) {
        if (fits(c.type, c.d) && taken.has(c)) cases.push_back(c);
    };
    for (ggml_type type : TYPES)
        for (int d : HEAD_SIZES) add({ type, d, 90, 77, 2, false, d == 96 });
    for (auto [gone, kept] : MERGE_SIZES)
        for (bool twins : { false, true }) add({ GGML_TYPE_F16, 64, gone, kept, 0, twins, false });
    // most keys are zero
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL })
        add({ type, 64, 40, 20, 100, false, false });
    for (auto [d, type] : { std::pair<int, ggml_type>(1, GGML_TYPE_F16), { 7, GGML_TYPE_F32 },
             { 40, GGML_TYPE_BF16 } })
        add({ type, d, 50, 40, 1, true, true });
    for (int i = 0; i < n_random; ++i) {
        add({ rnd.one_of(TYPES), rnd.one_of(HEAD_SIZES), rnd.below(700), rnd.range(1, 300),
            rnd.below(4), rnd.below(2) == 0, rnd.below(2) == 0 });
    }
    return cases;
}

// x times a Walsh-Hadamard matrix
inline void hadamard_loop(const float * x, float * y, int n) {
    const float scale = 1.0f / sqrtf((float) n);
    for (int i = 0; i < n; ++i) y[i] = x[i] * scale;
    for (int half = 1; half < n; half *= 2)
        for (int i = 0; i < n; i += 2 * half)
            for (int j = i; j < i + half; ++j) {
                const float a = y[j], b = y[j + half];
                y[j] = a + b;
                y[j + half] = a - b;
            }
}

} // namespace
