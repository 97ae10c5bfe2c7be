#pragma once
// The cases that kernels for GPUs are held against: every type, head size, group, length, then random ones.

#include "kernel-cases.h"
#include "merge-cases.h"

namespace {

const ggml_type TYPES[] = { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL };
const int HEAD_SIZES[] = { 64, 80, 96, 128, 256 };
const int GROUPS[]     = { 1, 3, 4, 7, 8, 16 };
const int N_TOKENS[]   = { 1, 2, 5, 8 };
const int LENGTHS[]    = { 0, 1, 15, 16, 17, 31, 32, 33, 255, 256, 257 };

std::vector<test_case> fixed_cases() {
    std::vector<test_case> all;
    auto add = [&](auto && change) { test_case c; change(c); all.push_back(c); };
    for (ggml_type type : TYPES) for (int d : HEAD_SIZES) {
        if (fits(type, d)) add([&](test_case & c) { c.type_k = c.type_v = type; c.d_k = c.d_v = d; c.len = { 33, 0, 77 }; });
    }
    for (auto [k, v] : { std::pair<ggml_type, ggml_type>(GGML_TYPE_F16, GGML_TYPE_Q8_0), { GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }, { GGML_TYPE_Q4_0, GGML_TYPE_F16 },
                         { GGML_TYPE_BF16, GGML_TYPE_IQ4_NL }, { GGML_TYPE_Q5_1, GGML_TYPE_Q4_1 } }) {
        add([&](test_case & c) { c.type_k = k; c.type_v = v; c.d_k = 96; c.d_v = 128; c.n_tokens = 2; });
    }
    for (int n : { 32, 65 }) for (int group : { 1, 4 }) add([&](test_case & c) { c.n_tokens = n; c.group = group; c.len = { 150, 0, 65 }; c.type_k = GGML_TYPE_Q8_0; });
    for (auto [d_k, d_v] : { std::pair<int, int>(192, 128), { 64, 256 }, { 72, 40 } }) add([&](test_case & c) { c.d_k = d_k; c.d_v = d_v; c.len = { 21, 40 }; });
    for (int group : GROUPS) for (int n : N_TOKENS) add([&](test_case & c) { c.group = group; c.n_tokens = n; c.len = { 70, 0, 45 }; });
    for (int n : LENGTHS) add([&](test_case & c) { c.type_k = c.type_v = GGML_TYPE_Q8_0; c.group = 2; c.len = { n, 33, 0 }; });
    add([&](test_case & c) { c.len = { 4096, 3 }; c.type_k = c.type_v = GGML_TYPE_Q4_0; });
    add([&](test_case & c) { c.len = { 0, 0 }; });
    for (int n : { 1, 8 }) for (int bits = 1; bits < 32; ++bits) add([&](test_case & c) {
        c.n_tokens = n; c.len = { 133, 40, 100 }; c.group = 3;
        c.window = bits & 1; c.sinks = bits & 2; c.gaps = bits & 4; c.softcap = bits & 8 ? 3.0f : 0.0f; c.alibi = bits & 16;
    });
    return all;
}

test_case random_case(random_source & rnd) {
    test_case c;
    do { c.type_k = rnd.one_of(TYPES); c.d_k = rnd.one_of(HEAD_SIZES); } while (!fits(c.type_k, c.d_k));
    do { c.type_v = rnd.one_of(TYPES); c.d_v = rnd.one_of(HEAD_SIZES); } while (!fits(c.type_v, c.d_v));
    if (rnd.below(2) && fits(c.type_k, c.d_v)) c.type_v = c.type_k;
    c.group    = rnd.one_of(GROUPS);
    c.n_tokens = rnd.one_of(N_TOKENS);
    c.len.clear();
    for (int i = rnd.range(1, 4); i > 0; --i) c.len.push_back(rnd.below(2) ? rnd.one_of(LENGTHS) : c.n_tokens + rnd.below(200));
    c.window = rnd.below(2); c.sinks = rnd.below(2); c.gaps = rnd.below(2); c.alibi = rnd.below(3) == 0;
    c.softcap = rnd.below(3) ? 0.0f : 0.5f + rnd.below(30);
    return c;
}

std::vector<merge_case> merge_cases(random_source & rnd, int n_random) {
    std::vector<merge_case> cases;
    for (ggml_type type : TYPES) for (int d : HEAD_SIZES) if (fits(type, d)) cases.push_back({ type, d, 90, 77, 2, false, d == 96 });
    for (auto [gone, kept] : MERGE_SIZES) for (bool twins : { false, true }) cases.push_back({ GGML_TYPE_F16, 64, gone, kept, 0, twins, false });
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL }) cases.push_back({ type, 64, 40, 20, 100, false, false }); // most keys are zero
    for (int i = 0; i < n_random; ++i) {
        merge_case c { rnd.one_of(TYPES), rnd.one_of(HEAD_SIZES), rnd.below(300), rnd.range(1, 200), rnd.below(4), rnd.below(2) == 0, rnd.below(2) == 0 };
        if (fits(c.type, c.d)) cases.push_back(c);
    }
    return cases;
}

// of the fixed cases every one, or a few; then random ones
template <typename R>
void each_case(random_source & rnd, int n_random, bool few, R && run) {
    const auto fixed = fixed_cases();
    for (size_t i = 0; i < fixed.size(); i += few ? 9 : 1) run(fixed[i]);
    for (int i = 0; i < n_random; ++i) run(random_case(rnd));
}

} // namespace
